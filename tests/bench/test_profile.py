"""`wbmm bench profile`: operators with their calls and shares, in each runtime; what is reported, never how fast."""

import csv
from collections import Counter

import pytest

from wbmm import cli
from wbmm.bench import profile

SMALL = ["--size", "64", "64", "--rounds", "2", "--batch", "2"]


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_add_up():
    seconds, calls = Counter(a=6.0, b=3.0, c=0.5, d=0.5), Counter(a=2, b=4, c=6, d=8)
    rows = profile.rows(seconds, calls, rounds=2, batch=1, top=2)
    assert [row["model"] for row in rows] == ["a", "b", "2 others"]
    assert [row["calls"] for row in rows] == [1, 2, 7]
    assert [row["ms"] for row in rows] == [3000, 1500, 500]
    assert [row["part"] for row in rows] == [0.6, 0.3, 0.1]


@pytest.mark.parametrize(
    ("model", "runtime", "operator"),
    [
        ("wbmm_a:compact", "eager", "aten::layer_norm"),
        ("wbmm_a", "training", "Optimizer.step"),
        ("wbmm_a:compact", "openvino", "Convolution"),
    ],
)
def test_every_runtime(model, runtime, operator, tmp_path, capsys):
    if runtime == "openvino":
        pytest.importorskip("openvino")
    command = ["bench", "profile", model, "--runtime", runtime, *SMALL, "--top", "200", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    assert operator in capsys.readouterr().out
    rows = read(tmp_path / "profile.csv")
    assert sum(float(row["part"]) for row in rows) == pytest.approx(1, abs=1e-3)
    assert all(float(row["calls"]) > 0 for row in rows)
    assert "| operator |" in (tmp_path / "profile.md").read_text()


@pytest.mark.parametrize("argv", [["wbmm_q"], ["wbmm_a", "--batch", "0"], ["wbmm_a", "--top", "0"], ["wbmm_a:odd"]])
def test_bad_arguments(argv, capsys):
    assert cli.main(["bench", "profile", *argv]) == 1
    assert argv[-1] in capsys.readouterr().err

"""`wbmm bench paths`: the paths of a pair compute the same, and the one that is said to be taken is."""

import csv

import pytest
import torch

from wbmm import cli
from wbmm.bench import paths


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(paths, "WINDOWS", (3, 10))
    monkeypatch.setattr(paths, "COUNTS", (1, 3))
    monkeypatch.setattr(paths, "LINEARS", ((5, 8, 32),))
    monkeypatch.setattr(paths, "FEED_FORWARDS", ((2, 4, 3), (4, 32, 70)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_paths_compute_the_same(dtype):
    pairs = [*paths.window_pairs(dtype, channels=4), *paths.linear_pairs(dtype)]
    assert len(pairs) == 5
    pairs += [*paths.width_pairs(dtype, channels=4), *paths.block_pairs(dtype)]
    assert len(pairs) == 9
    assert [pair[3] for pair in pairs[-2:]] == [False, True], "one block holds the small one"
    near = 1e-4 if dtype is torch.float32 else 0.1
    with torch.no_grad():
        for *_, first, second in pairs:
            assert first().dtype is dtype
            torch.testing.assert_close(first(), second(), rtol=near, atol=near)


def test_rows_and_files(tmp_path, capsys):
    assert cli.main(["bench", "paths", "--rounds", "1", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "3 windows of 10x10" in out
    assert "cpu, float32 weights, precision tf32" in out
    with (tmp_path / "paths.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["dtype"], row["precision"], row["rounds"]) for row in rows} == {("float32", "tf32", "1")}
    taken = {row["model"]: row["taken"] for row in rows}
    assert taken["3 windows of 3x3"] == "product"
    assert taken["3 windows of 10x10"] == ("convolution" if paths.takes_onednn(torch.ones(1)) else "product")


def test_bad_rounds(capsys):
    assert cli.main(["bench", "paths", "--rounds", "0"]) == 1
    assert "--rounds 0" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--device", "cuda"], ["--dtype", "float16"]])
def test_paths_are_those_of_the_cpu(option, capsys):
    assert cli.main(["bench", "paths", *option]) == 1
    error = capsys.readouterr().err
    assert " ".join(option) in error
    assert "these are paths of the CPU in float32 and bfloat16" in error


def test_bfloat16_by_its_short_name(tmp_path, capsys):
    assert cli.main(["bench", "paths", "--dtype", "bf16", "--rounds", "1", "--out", str(tmp_path)]) == 0
    assert "cpu, bfloat16 weights" in capsys.readouterr().out
    with (tmp_path / "paths.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["dtype"] for row in rows} == {"bfloat16"}
    assert "--dtype bfloat16" in rows[0]["command"]

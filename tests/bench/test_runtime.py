"""`wbmm bench runtime`: every runtime has its row, beside the baseline; what is reported, never how fast."""

import csv

import pytest
import timm

import wbmm
from wbmm import cli


@pytest.fixture
def checkpoint(tmp_path):
    model = timm.create_model("wbmm_a", dims=(8, 16, 32, 64), num_classes=10).eval()
    return str(wbmm.save_model(model, tmp_path / "narrow.safetensors"))


def rows(capsys, checkpoint, *argv):
    command = ["bench", "runtime", checkpoint, "--baseline", "test_convnext", "--size", "56", "56", "--rounds", "2"]
    assert cli.main([*command, *argv]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    return [[part.strip() for part in line if part.strip()] for line in lines if len(line) > 5]


@pytest.mark.parametrize(
    "names",
    [["eager", "onnxruntime"], pytest.param(["eager", "compiled", "openvino", "int8"], marks=pytest.mark.heavy)],
    ids=len,
)
def test_every_runtime_has_its_row(checkpoint, capsys, names):
    table = rows(capsys, checkpoint, "--batch", "1", "3", "--runtimes", *names)
    wanted = ["test_convnext, eager", *names, *(["test_convnext, openvino"] if "openvino" in names else [])]
    for batch in ("1", "3"):
        found = {row[0]: row for row in table if row[1] == batch}
        assert sorted(found) == sorted(wanted)
        assert found["test_convnext, eager"][-2:] == ["1.00x", "1.00x"]
        assert all(float(row[2]) > 0 for row in found.values())


def test_files(checkpoint, tmp_path, capsys):
    out = tmp_path / "results"
    rows(capsys, checkpoint, "--batch", "2", "--runtimes", "eager", "--limit", "--out", str(out))
    with (out / "runtime.csv").open(newline="") as file:
        found = {row["model"]: row for row in csv.DictReader(file)}
    assert set(found) == {"test_convnext, eager", "eager"}
    assert 0 < float(found["eager"]["share"]) < 1
    assert "| runtime |" in (out / "runtime.md").read_text()
    assert found["eager"]["command"].endswith("--runtimes eager --batch 2 --size 56 56 --rounds 2 --limit")


def test_what_cannot_be_measured(checkpoint, capsys):
    assert cli.main(["bench", "runtime", "wbmm_q"]) == 1
    assert "'wbmm_q' is neither a file nor a model" in capsys.readouterr().err
    assert cli.main(["bench", "runtime", checkpoint, "--batch", "0"]) == 1
    assert "--batch [0]" in capsys.readouterr().err

"""`wbmm demo`: its parts, and as a heavy test the whole of it."""

import argparse
import json
import sys

import pytest
import torch

from wbmm.cli import main
from wbmm.commands import demo


def arguments(**changes):
    return argparse.Namespace(**{"config": demo.CONFIG, "out": None, "overrides": [], **changes})


@pytest.mark.parametrize(
    ("accuracies", "changes", "code"),
    [
        (("98.61 %", "98.61 %"), {}, 0),
        (("98.61 %", "98.33 %"), {}, 1),  # fusing changed a prediction
        (("96.94 %", "96.94 %"), {}, 1),  # below what the demo promises
        (("96.94 %", "96.94 %"), {"overrides": ["schedule.epochs=1"]}, 0),
    ],
)
def test_verdict(accuracies, changes, code, capsys):
    assert demo._verdict([("form", accuracy, "", "") for accuracy in accuracies], arguments(**changes)) == code


def test_a_folder_that_is_taken_gets_a_number(tmp_path):
    assert demo._free_folder(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    assert demo._free_folder(tmp_path / "demo") == tmp_path / "demo-2"


def test_missing_packages_are_named_before_training(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ValueError, match=r"needs sklearn, onnx: pip install 'wbmm\[export,train\]'"):
        demo.run(arguments())


@pytest.mark.heavy
def test_the_demo_reaches_its_accuracy_fused_and_exported(tmp_path, capsys):
    torch.set_num_threads(2)
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
    table = capsys.readouterr().out
    for name in ("last.pt", "fused.pth", "fused.onnx", "curves.png", "summary.md"):
        assert (tmp_path / "demo" / name).is_file()
        assert name in table
    records = [json.loads(line) for line in (tmp_path / "demo" / "metrics.jsonl").read_text().splitlines()]
    waits = [record["data_wait"] for record in records if record["kind"] == "train"]
    assert sum(waits) / len(waits) < 0.05

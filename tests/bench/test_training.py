"""`wbmm bench train`: a step is a step, every model has its row, memory where asked for."""

import csv

import pytest
import torch

from wbmm import cli
from wbmm.bench.setting import TrainingStep, build


def test_a_step_learns():
    model = build("wbmm_a")
    step = TrainingStep(model, torch.randn(2, 3, 32, 32))
    before = [parameter.clone() for parameter in model.parameters()]
    step()
    moved = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    assert sum(moved) > len(moved) // 2
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_rows_and_files(tmp_path, capsys):
    argv = ["bench", "train", "wbmm_a", "wbmm_a:plain-training", "--baseline", "test_convnext", "--size", "32", "48"]
    assert cli.main([*argv, "--batch", "2", "--rounds", "1", "--out", str(tmp_path)]) == 0
    assert "peak memory" not in capsys.readouterr().out
    with (tmp_path / "train.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == ["test_convnext", "wbmm_a", "wbmm_a:plain-training"]
    assert rows[0]["ratio"] == "1"
    assert all(float(row["images_per_s"]) > 0 for row in rows)
    assert rows[0]["command"].endswith("--rounds 1")
    assert "cross entropy" in (tmp_path / "train.md").read_text()


@pytest.mark.heavy
def test_memory_grows_with_the_batch(tmp_path, capsys):
    spec = "wbmm_a:plain-training"
    argv = ["bench", "train", spec, "--baseline", spec, "--size", "64", "64", "--batch", "1", "32", "--rounds", "1"]
    assert cli.main([*argv, "--memory", "--out", str(tmp_path)]) == 0
    assert "peak memory, MB" in capsys.readouterr().out
    with (tmp_path / "train.csv").open(newline="") as file:
        small, large = (float(row["peak_mb"]) for row in csv.DictReader(file))
    assert 0 < small < large


def test_fused_forms_are_not_trained(capsys):
    assert cli.main(["bench", "train", "wbmm_a:compact"]) == 1
    assert "form 'compact' is none of training, plain-training" in capsys.readouterr().err

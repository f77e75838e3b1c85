"""`wbmm bench memory`: peaks of processes of their own."""

from contextlib import nullcontext

import pytest
import timm
import torch

from wbmm import cli
from wbmm.bench import memory
from wbmm.bench.memory import probe
from wbmm.bench.setting import CPU, Setting


@pytest.mark.heavy
def test_checkpointing_takes_less(capsys):
    argv = ["bench", "memory", "wbmm_a", "--size", "224", "288", "--batch", "8", "--modes", "training", "checkpointing"]
    assert cli.main([*argv, "--markdown"]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "wbmm_a" in line]
    training, checkpointing = (int(row[4]) for row in rows)
    assert 0 < checkpointing < training


@pytest.mark.heavy
def test_a_larger_input_takes_more():
    small, large = (probe("wbmm_a", "inference", (side, side), 1) for side in (64, 448))
    assert 0 < small < large


def test_what_is_wrong_is_said(capsys):
    assert cli.main(["bench", "memory", "wbmm_x"]) == 1
    assert "timm knows no model 'wbmm_x'" in capsys.readouterr().err
    assert cli.main(["bench", "memory", "wbmm_a", "--batch", "0"]) == 1
    assert "at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["step", *memory.MODES])
def test_a_gpu_counts_from_before_the_measured_pass(mode, monkeypatch):
    """Not the copies that fusing makes, nor what the first pass leaves behind; and on the GPU that was asked for."""
    log = []
    monkeypatch.setattr(Setting, "apply", lambda self: None)
    monkeypatch.setattr(memory, "_one_pass", lambda *args: lambda: log.append("pass"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: log.append(f"current {device}") or nullcontext())
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: log.append(f"reset {device}"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: log.append(f"peak {device}") or 7)
    assert memory.measure("wbmm_a", mode, (32, 32), 1, Setting("cuda:1")) == 7
    assert log == ["current cuda:1", "pass", "reset cuda:1", "pass", "peak cuda:1"]


@pytest.mark.parametrize("setting", [CPU, Setting(dtype="bfloat16"), Setting(dtype="bfloat16", autocast=True)], ids=str)
@pytest.mark.parametrize("mode", ["step", "training", "checkpointing"])
def test_passes_compute_in_the_setting_and_do_not_add_up(mode, setting, monkeypatch):
    """The second pass, which is measured, is like the first: gradients are dropped before it."""
    models, seen = [], []
    create = timm.create_model

    def create_model(*args, **kwargs):
        models.append(create(*args, **kwargs))
        return models[-1]

    monkeypatch.setattr(timm, "create_model", create_model)
    one_pass = memory._one_pass("wbmm_a", mode, torch.randn(2, 3, 32, 32), setting)
    models[0].stem.register_forward_hook(
        lambda stem, args, out: seen.append((args[0].dtype, sum(p.grad is not None for p in models[0].parameters())))
    )
    one_pass()
    one_pass()
    assert seen == [(torch.float32 if setting.autocast else getattr(torch, setting.dtype), 0)] * 2

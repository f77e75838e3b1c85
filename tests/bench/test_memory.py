"""`wbmm bench memory`: peaks of processes of their own."""

import pytest

from wbmm import cli
from wbmm.bench.memory import probe


@pytest.mark.heavy
def test_checkpointing_takes_less(capsys):
    argv = ["bench", "memory", "wbmm_a", "--size", "224", "288", "--modes", "training", "checkpointing"]
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

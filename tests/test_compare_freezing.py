"""scripts/compare_freezing.py: its ways agree, and one that does not is an error."""

import importlib.util
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "scripts" / "compare_freezing.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("compare_freezing", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)  # compiling takes a minute
    return module


def test_four_ways(script):
    with torch.no_grad():
        ways = script.candidates("wbmm_a", batch=1, size=64)
    assert list(ways) == ["onednn", "reference", "compiled", "compiled reference"]


def test_a_way_that_differs_is_an_error(script, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **options: lambda x: 2 * model(x))
    with torch.no_grad(), pytest.raises(ValueError, match="wbmm_a, batch 1: compiled differs from the reference by"):
        script.candidates("wbmm_a", batch=1, size=64)

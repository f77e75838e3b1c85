"""The timing core and the model benchmark: what they report, never how fast."""

import pytest
import torch

from wbmm import cli
from wbmm.bench.setting import build
from wbmm.layers import FusedBlock
from wbmm.timing import Timing, remove_outliers, time_interleaved


def test_candidates_take_turns():
    calls = []
    timings = time_interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=4, warmup=1)
    assert calls == ["a", "b"] * 5
    assert all(1 <= len(t.seconds) <= 4 for t in timings.values())


def test_outliers_are_removed():
    assert remove_outliers([1.0, 1.1, 0.9, 1.0, 1.05, 50.0]) == [1.0, 1.1, 0.9, 1.0, 1.05]
    assert remove_outliers([1.0, 9.0]) == [1.0, 9.0]
    assert Timing((3.0, 1.0, 2.0)).median == 2.0
    assert Timing((3.0, 1.0, 2.0)).best == 1.0


def test_models_are_built_in_the_form_asked_for():
    assert any(isinstance(m, FusedBlock) for m in build("wbmm_a:compact").modules())
    assert not any(isinstance(m, FusedBlock) for m in build("wbmm_a").modules())
    with pytest.raises(ValueError, match="'sparse' is none of training, compact, dense"):
        build("wbmm_a:sparse")
    with pytest.raises(ValueError, match="timm knows no model 'wbmm_q'"):
        build("wbmm_q")


def test_bench_model(capsys):
    argv = [
        "bench",
        "model",
        "wbmm_a:compact",
        "wbmm_a",
        "--baseline",
        "wbmm_a",
        "--batch",
        "1",
        "2",
        "--size",
        "32",
        "48",
        "--rounds",
        "2",
    ]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith("wbmm_a")]
    assert [row[:3] for row in rows] == [
        ["wbmm_a", "32x48", "1"],
        ["wbmm_a:compact", "32x48", "1"],
        ["wbmm_a", "32x48", "2"],
        ["wbmm_a:compact", "32x48", "2"],
    ]
    assert rows[0][5] == "1.00x"
    assert "32x48" in out
    assert torch.__version__ in out


def test_a_cuda_device_is_timed_by_its_own_events(monkeypatch):
    """Two events on the stream of the device that was asked for, not the clock around the launches."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            return 250.0

    class Device:
        def __init__(self, device):
            log.append(str(device))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(f"synchronize {device}"))
    timings = time_interleaved({"a": lambda: log.append("call")}, rounds=1, warmup=0, device="cuda:1")
    assert log == ["cuda:1", "synchronize cuda:1", "record", "call", "record", "wait"]
    assert timings["a"].seconds == (0.25,)

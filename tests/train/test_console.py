"""The progress bar and the plain lines."""

import io
import sys

import pytest

from wbmm.train import console as module
from wbmm.train.console import BarConsole, Pace, PlainConsole, duration, make_console


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    stream = _Terminal()
    console = make_console(4, stream=stream)
    assert isinstance(console, BarConsole)
    record = {"step": 4, "epoch": 2.0, "loss": 0.5, "lr": 1e-3, "images_per_s": 99.0}
    console.train({**record, "data_wait": 0.01, "memory_mb": 10.0, "eta_s": 5.0})
    console.eval({"step": 4, "epoch": 2.0, "top1": 91.0}, ["top1"])
    console.close()
    text = stream.getvalue()
    for part in ("epoch 2.00/4", "50%", "loss 0.5000", "99 images/s", "wait 1.0%", "ETA 0:00:05", "top1 91.00"):
        assert part in text


def test_a_narrow_terminal_gets_the_bar_and_the_time_left(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream = _Terminal()
    console = make_console(4, stream=stream)
    record = {"step": 4, "epoch": 2.0, "loss": 0.5, "lr": 1e-3, "images_per_s": 99.0, "data_wait": 0.01}
    console.train({**record, "memory_mb": 10.0, "eta_s": 5.0})
    console.message("a sentence that is longer than a terminal of eighty columns is wide, with a path at its end")
    console.close()
    for part in ("━━━", "loss 0.5000", "99 images/s", "ETA 0:00:05", "wide, with a path"):
        assert part in stream.getvalue()
    assert "…" not in stream.getvalue()


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_the_loss_is_smoothed_and_the_speed_is_that_of_the_steps(clock):
    pace = Pace(epochs=2, images=8)
    for step, loss in ((1, 1.0), (2, 3.0), (3, float("nan"))):
        pace.step(step, step / 10, loss, 1e-3)
        clock[0] += 2
    assert 1.0 < pace.figures["loss"] < 3.0
    assert (pace.figures["images_per_s"], pace.figures["eta_s"]) == (4.0, pytest.approx(34.0))
    pace.pause()
    clock[0] += 600  # an evaluation
    pace.step(4, 0.4, 2.0, 1e-3)
    assert pace.figures["images_per_s"] == 4.0
    assert "4 images/s" in pace.line()


def test_the_bar_moves_between_reports(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    stream = _Terminal()
    console = make_console(4, 8, stream)
    console.step(1, 1.0, 0.5, 1e-3)
    clock[0] += 1
    console.step(2, 2.0, 0.5, 1e-3)
    clock[0] += 1
    console.evaluating(40, 1000)
    console.close()
    text = stream.getvalue()
    for part in ("epoch 2.00/4", "50%", "step 2/4", "loss 0.5000", "8 images/s", "ETA 0:00:02", "40 of 1,000 images"):
        assert part in text


def test_lines_at_intervals_where_reports_are_far_apart(clock):
    stream = io.StringIO()
    console = make_console(4, 8, stream)
    for step in range(1, 9):
        console.step(step, step / 2, 0.5, 1e-3)
        clock[0] += 10
    clock[0] += 30
    console.evaluating(40, 1000)
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[1] for line in lines[:-1]] == ["step 4", "step 7"]
    assert lines[-1] == "evaluating: 40 of 1000 images"


def test_reports_at_every_step_are_no_line_a_step(clock):
    stream = io.StringIO()
    console = make_console(4, 8, stream)
    for step in range(1, 13):
        record = {"step": step, "epoch": step / 4, "loss": 0.5, "lr": 1e-3, "images_per_s": 99.0}
        console.train({**record, "data_wait": 0.0, "memory_mb": 10.0, "eta_s": 5.0})
        clock[0] += 0.5
    assert [line.split("  ")[1] for line in stream.getvalue().splitlines()] == ["step 1", "step 5", "step 9"]


def test_durations():
    assert [duration(s) for s in (5, 61, 3600, 90061)] == ["0:00:05", "0:01:01", "1:00:00", "1d 01:01:01"]


def test_a_terminal_without_rich_gets_lines(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert isinstance(make_console(4, stream=_Terminal()), PlainConsole)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(ImportError, match=r"pip install 'wbmm\[train\]'"):
        BarConsole(1, _Terminal())

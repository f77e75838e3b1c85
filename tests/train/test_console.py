"""The progress bar and the plain lines."""

import io
import sys

import pytest

from wbmm.train.log import BarConsole, PlainConsole, duration, make_console


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    stream = _Terminal()
    console = make_console(4, stream)
    assert isinstance(console, BarConsole)
    record = {"step": 4, "epoch": 2.0, "loss": 0.5, "lr": 1e-3, "images_per_s": 99.0}
    console.train({**record, "data_wait": 0.01, "memory_mb": 10.0, "eta_s": 5.0})
    console.eval({"step": 4, "epoch": 2.0, "top1": 91.0}, ["top1"])
    console.close()
    text = stream.getvalue()
    for part in ("epoch 2.00/4", "50%", "loss 0.5000", "99 images/s", "wait 1.0%", "ETA 0:00:05", "top1 91.00"):
        assert part in text


def test_durations():
    assert [duration(s) for s in (5, 61, 3600, 90061)] == ["0:00:05", "0:01:01", "1:00:00", "1d 01:01:01"]


def test_a_terminal_without_rich_gets_lines(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert isinstance(make_console(4, _Terminal()), PlainConsole)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(ImportError, match=r"pip install 'wbmm\[train\]'"):
        BarConsole(1, _Terminal())

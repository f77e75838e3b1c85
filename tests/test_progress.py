"""Progress where no terminal is: lines at intervals, none for short work; a bar on a terminal, lines without rich."""

import sys
import time

import pytest

from wbmm import progress
from wbmm.progress import progress_bar


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_at_intervals_and_at_the_end(clock, capsys):
    with progress_bar(100, "images") as advance:
        for _ in range(10):
            clock[0] += 12
            advance(10)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "images: 30 of 100 in 0:36, about 1:24 left",
        "images: 60 of 100 in 1:12, about 0:48 left",
        "images: 90 of 100 in 1:48, about 0:12 left",
        "images: 100 of 100 in 2:00",
    ]


def test_an_unknown_number(clock, capsys):
    with progress_bar(None, "trials") as advance:
        clock[0] += 75
        advance(1)
        assert capsys.readouterr().err == "trials: 1 in 1:15\n"
        clock[0] += 5
        advance(1)
    assert capsys.readouterr().err == "trials: 2 in 1:20\n"


def test_a_step_that_takes_long_is_told_of(capsys, monkeypatch):
    """Nobody calls while one thing is worked on, for instance a file that is exported."""
    monkeypatch.setattr(progress, "INTERVAL_S", 0.05)
    with progress_bar(None, "exporting"):
        time.sleep(0.2)
    before = capsys.readouterr().err
    time.sleep(0.1)
    assert before.startswith("exporting: 0:00 so far\n")
    assert capsys.readouterr().err == ""


def test_short_work_says_nothing(clock, capsys):
    with progress_bar(3, "images") as advance:
        clock[0] += 29
        advance(3)
    assert capsys.readouterr().err == ""


def test_an_error_passes_through(clock, capsys):
    def work():
        with progress_bar(3, "images") as advance:
            clock[0] += 40
            advance(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert capsys.readouterr().err == "images: 1 of 3 in 0:40, about 1:20 left\n"


@pytest.mark.parametrize("rich", [True, False])
def test_on_a_terminal(clock, capsys, monkeypatch, rich):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    with progress_bar(4, "images [1]") as advance:
        clock[0] += 40
        advance(1)
    error = capsys.readouterr().err
    assert ("images [1]" in error) if rich else error.startswith("images [1]: 1 of 4 in 0:40")
    assert ("1/4" in error) == rich

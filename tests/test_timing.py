"""The timing core: who is faster is told right whatever happens around, and what is not typical does not count."""

import pytest

from wbmm import timing
from wbmm.bench.results import Cell, Entry, RunLog, run_cells
from wbmm.timing import Timing, remove_outliers, time_interleaved


class Clock:
    """Time that passes only when a candidate says so."""

    def __init__(self, monkeypatch):
        self.now, self.load = 0.0, 1.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def costs(self, seconds):
        def call():
            self.now += seconds * self.load

        return call


def test_a_known_cost_is_ranked_right_under_a_load_that_comes_and_goes(monkeypatch):
    clock = Clock(monkeypatch)
    rounds = []

    def after_a_round():
        rounds.append(clock.load)
        clock.load = 1.0 + 4.0 * (len(rounds) % 3 == 0)  # every third round the machine is five times slower

    calls = {"slow": clock.costs(0.3), "fast": clock.costs(0.1), "middle": clock.costs(0.2)}
    found = time_interleaved(calls, rounds=12, warmup=1, on_round=after_a_round)
    assert found["fast"].median < found["middle"].median < found["slow"].median
    assert found["slow"].median / found["fast"].median == pytest.approx(3), "the load meets all of them alike"
    assert len(rounds) == 13


def test_what_happens_once_does_not_count(monkeypatch):
    clock = Clock(monkeypatch)
    seen = []

    def hiccup():
        seen.append(None)
        clock.now += 60.0 if len(seen) == 5 else 0.1 + 0.001 * (len(seen) % 3)

    found = time_interleaved({"a": hiccup}, rounds=10, warmup=2)["a"]
    assert max(found.seconds) < 0.2
    assert len(found.seconds) == 9


def test_warm_up_does_not_count(monkeypatch):
    clock = Clock(monkeypatch)
    costs = iter([9.0, 9.0, 0.1, 0.1, 0.1])
    found = time_interleaved({"a": lambda: clock.costs(next(costs))()}, rounds=3, warmup=2)["a"]
    assert found.seconds == pytest.approx((0.1, 0.1, 0.1))


def test_outliers_are_what_lies_far_outside_the_quartiles():
    assert remove_outliers([1.0, 1.1, 0.9, 1.0, 1.05, 50.0, 0.001]) == [1.0, 1.1, 0.9, 1.0, 1.05]
    assert remove_outliers([1.0, 50.0]) == [1.0, 50.0], "of two, none is the typical one"
    spread = Timing((1.0, 2.0, 3.0, 4.0, 5.0))
    assert spread.low < spread.median < spread.high


def test_an_outlier_among_runs_is_in_the_log_and_not_in_the_figure():
    entry = Entry("op", {}, {"a": {"seconds": [1.0, 1.1, 0.9, 1.0, 9.0]}})
    assert entry.timing("a").seconds == (1.0, 1.1, 0.9, 1.0)


def test_a_budget_foresees_how_long_a_cell_takes(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    monkeypatch.setattr("wbmm.bench.results.time.monotonic", lambda: clock.now)
    measured = []

    def cell(work):
        def measure():
            measured.append(work)
            clock.now += 10.0 * work
            return {"a": {"seconds": [1.0]}}

        return Cell({"work": work}, ["a"], measure, work)

    run_cells([cell(work) for work in (1, 2, 4, 8, 16)], RunLog(None, "op", ""), budget=2.0)
    assert measured == [1, 2, 4], "80 s more would end after 120 s"
    assert "2 of 5 cells were left out" in capsys.readouterr().err

"""The log of a benchmark: nothing lost or doubled by a kill, and never two machines in one file."""

import json

import pytest

from wbmm.bench import results
from wbmm.bench.results import Cell, RunLog, plan_text, read_log, run_cells

RESULT = {"a": {"seconds": [1.0, 3.0]}, "b": {"why_not": "no such thing"}}


def cells(calls, numbers=(1, 2, 3), names=("a", "b")):
    def measure(number):
        calls.append(number)
        return {name: RESULT.get(name, {"seconds": [2.0]}) for name in names}

    return [Cell({"batch": number}, names, lambda number=number: measure(number)) for number in numbers]


def test_what_is_appended_is_read_again(tmp_path):
    run_cells(cells([]), RunLog(tmp_path / "new", "op", "wbmm bench op"))
    entries = read_log(tmp_path / "new" / "op.jsonl")
    assert [entry.cell for entry in entries] == [{"batch": 1}, {"batch": 2}, {"batch": 3}]
    assert entries[0].results == RESULT
    assert entries[0].timing("a").median == 2
    assert entries[0].timing("b") is None
    assert (entries[0].bench, entries[0].command) == ("op", "wbmm bench op")
    assert entries[0].facts["machine"]
    assert read_log(tmp_path / "none") == []


def test_a_killed_run_goes_on_with_nothing_lost_or_doubled(tmp_path):
    calls = []
    run_cells(cells(calls, (1, 2)), RunLog(tmp_path, "op", ""))
    path = tmp_path / "op.jsonl"
    path.write_text(path.read_text()[:-40])  # as a kill in the middle of the second line leaves it
    entries = run_cells(cells(calls), RunLog(tmp_path, "op", ""))
    assert calls == [1, 2, 2, 3]
    assert [entry.cell["batch"] for entry in entries] == [1, 2, 3]
    assert [entry.cell["batch"] for entry in read_log(path)] == [1, 2, 3]
    run_cells(cells(calls), RunLog(tmp_path, "op", ""))
    assert calls == [1, 2, 2, 3]
    run_cells(cells(calls), RunLog(tmp_path, "op", "", fresh=True))
    assert calls == [1, 2, 2, 3, 1, 2, 3]
    assert len(read_log(path)) == 3, "the last measurement of each cell counts"


def test_a_further_candidate_is_measured_with_the_others(tmp_path):
    calls = []
    run_cells(cells(calls), RunLog(tmp_path, "op", ""))
    (entry,) = run_cells(cells(calls, (2,), ("a", "b", "c")), RunLog(tmp_path, "op", ""))
    assert calls == [1, 2, 3, 2]
    assert list(entry.results) == ["a", "b", "c"]


def test_another_machine_does_not_go_on(tmp_path, monkeypatch):
    run_cells(cells([]), RunLog(tmp_path, "op", ""))
    facts = json.loads((tmp_path / "op.jsonl").read_text().splitlines()[0])["facts"]
    monkeypatch.setattr(results, "machine_facts", lambda device: {**facts, "machine": "another"})
    with pytest.raises(ValueError, match="and this is another: choose another --out"):
        RunLog(tmp_path, "op", "")
    RunLog(tmp_path, "op", "", fresh=True)


def test_a_budget_and_a_plan(tmp_path, capsys):
    calls = []
    log = RunLog(tmp_path, "op", "")
    assert run_cells(cells(calls), log, budget=-1) == []
    assert "3 cells were left out" in capsys.readouterr().err
    run_cells(cells(calls, (1,)), log)
    text = plan_text(cells(calls), log, memory_GB=lambda cell: "7").splitlines()
    assert text[0].split() == ["cell", "candidates", "measured", "before", "memory", "GB"]
    assert [line.split()[-2] for line in text[2:]] == ["yes", "no", "no"]
    assert calls == [1]

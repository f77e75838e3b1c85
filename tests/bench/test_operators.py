"""The operator benchmark: which rows a table has, that the clock ranks them right, and that a killed run goes on."""

import argparse
import time
from dataclasses import asdict

import pytest
import torch

from wbmm import cli
from wbmm.bench import operators as op_bench
from wbmm.bench.operators import Case, Operator, measure, operators, paper_figures, plan, records
from wbmm.bench.results import Entry, read_log

CASE = Case(batch=2, map=14, channels=4, dtype="float32", layout="nchw", mode="forward", device="cpu")
SMALL = ["--channels", "4", "--batch", "2", "--map", "7", "14", "--runs", "2", "--rounds", "2"]


def fake(seconds, name="fake", why=None):
    """An operator of known cost."""

    def call(x, weights):
        time.sleep(seconds)
        return x

    return Operator(name, 1, lambda case: [torch.zeros(1)], call, lambda case: why, lambda case: 0)


def test_operators_of_known_cost_are_ranked_right():
    rows = [fake(0.03, "slow"), fake(0.0, "fast"), fake(0.01, "middle")]
    found = {name: result["seconds"] for name, result in measure(CASE, rows, runs=2, rounds=3).items()}
    assert [len(runs) for runs in found.values()] == [2, 2, 2]
    assert max(found["fast 1x1"]) < min(found["middle 1x1"]) < max(found["middle 1x1"]) < min(found["slow 1x1"])
    assert found["slow 1x1"][0] == pytest.approx(0.03, rel=0.9)


def test_rows_of_one_cell_agree_with_each_other():
    """The windowed product, cached or not, and every backend that runs here compute the same."""
    rows = [row for row in operators() if row.size == 7 and row.method.startswith("WBMM") and not row.why_not(CASE)]
    assert len(rows) >= 3
    x, table = CASE.images(), rows[1].weights(CASE)[0]
    weights = {row.name: row.weights(CASE)[0] for row in rows}
    expanded = [name for name, weight in weights.items() if weight.ndim == 3]
    assert expanded == ["WBMM-C 7x7"]
    results = [row.call(x, [table]) for row in rows if weights[row.name].ndim == 2]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_why_an_operator_does_not_run():
    why = {row.name: row.why_not(Case(2, 7, 4, "float32", "nchw", "training", "cpu")) for row in operators()}
    assert why["WBMM-NC 14x14"] == "a 14x14 window is larger than the map"
    assert why["WBMM-C 7x7"] == "the cached matrix is for inference"
    assert "CUDA" in why["DW-LKA 13x13"]
    assert why["DW-Std 27x27"] is None


def test_out_of_memory_is_a_cell_without_a_figure(monkeypatch):
    monkeypatch.setattr(op_bench, "available_memory", lambda: 0)
    assert measure(CASE, [fake(0.0)], 1, 1) == {"fake 1x1": {"why_not": "out of memory: 0.0 GB"}}


def test_an_error_of_the_allocator_is_a_cell_too_and_any_other_is_raised():
    def fails(text):
        def call(x, weights):
            raise RuntimeError(text)

        return Operator("fails", 1, lambda case: [torch.zeros(1)], call, lambda case: None, lambda case: 0)

    found = measure(CASE, [fails("CUDA out of memory. Tried to allocate 3 GiB"), fake(0.0)], 1, 1)
    assert found["fails 1x1"]["why_not"].startswith("out of memory: CUDA out of memory")
    assert len(found["fake 1x1"]["seconds"]) == 1
    with pytest.raises(RuntimeError, match="something else"):
        measure(CASE, [fails("something else")], 1, 1)


def test_a_run_that_was_stopped_goes_on_with_nothing_lost_or_doubled(tmp_path, capsys, monkeypatch):
    argv = ["bench", "op", *SMALL, "--out", str(tmp_path)]
    calls = []

    def interrupted(case, rows, runs, rounds):
        calls.append(case.map)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(case, rows, runs, rounds)

    monkeypatch.setattr(op_bench, "measure", interrupted)
    assert cli.main(argv) == 130
    with open(tmp_path / "op.jsonl", "a", encoding="utf-8") as file:
        file.write('{"batch": 2, "map": 14, "chan')  # what a kill in the middle of a line leaves
    assert cli.main(argv) == 0
    assert calls == [7, 14, 14]
    cells = [entry.cell.get("map") for entry in read_log(tmp_path / "op.jsonl")]
    assert cells == [None, 7, 14], "the limits, then each map once"
    assert cli.main(argv) == 0
    assert calls == [7, 14, 14]
    captured = capsys.readouterr()
    assert "DW-Std 5x5" in captured.out
    assert "3 of 3 cells were measured before" in captured.err
    assert (tmp_path / "op.csv").read_text().startswith("model,batch,map")
    assert cli.main([*argv, "--fresh"]) == 0
    assert calls == [7, 14, 14, 7, 14]
    assert len(read_log(tmp_path / "op.jsonl")) == 3


def test_what_an_operator_has_to_compute_and_to_move():
    rows = {row.name: row for row in operators()}
    case = Case(batch=2, map=15, channels=4, dtype="bfloat16", layout="nchw", mode="forward", device="cpu")
    maps = 2 * 2 * 4 * 15 * 15 * 2
    assert rows["DW-Std 5x5"].macs(case) == 2 * 4 * 15 * 15 * 25
    assert rows["WBMM-C 7x7"].macs(case) == 2 * 4 * 9 * 49 * 49, "nine windows, the last ones padded"
    assert rows["DW-Std 5x5"].least_bytes(case) == maps + 4 * 25 * 2
    assert rows["WBMM-C 7x7"].least_bytes(case) == maps + 4 * 49 * 49 * 2
    assert rows["WBMM-NC 7x7"].least_bytes(case) == maps + 4 * 13 * 13 * 2


def test_the_papers_figures_stand_beside_its_own_operators_alone():
    case = Case(128, 56, 256, "float32", "nchw", "forward", "cpu")
    rows = operators()
    entry = Entry("op", asdict(case), {row.name: {"seconds": [2.0]} for row in rows})
    found = {row["model"]: row for row in records([entry], rows)}
    assert found["WBMM-C 14x14"]["paper_ratio"] == pytest.approx(63 / 31)
    assert found["WBMM-C 14x14"]["images_per_s"] == 64
    assert "paper_ratio" not in found["WBMM 7x7 (tiled)"]
    assert len(paper_figures()) == 337


def test_small_cells_come_first():
    args = argparse.Namespace(batch=[16, 4], map=[28, 7], channels=8, dtype=["float32"], layout=["nchw"])
    args.mode, args.device = ["forward"], "cpu"
    sizes = [case.bytes() for case in plan(args)]
    assert sizes == sorted(sizes)
    assert len(sizes) == 4


def test_the_budget_leaves_cells_out_and_a_dry_run_measures_nothing(capsys, monkeypatch):
    assert cli.main(["bench", "op", *SMALL, "--budget", "0"]) == 0
    assert "3 cells were left out" in capsys.readouterr().err
    monkeypatch.setattr(op_bench, "measure", lambda *args: pytest.fail("nothing is measured"))
    assert cli.main(["bench", "op", *SMALL, "--dry-run"]) == 0
    assert "batch 2, map 14, channels 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--batch", "0"], "--batch 0"), (["--runs", "0"], "--runs 0"), (["--device", "cuda:7"], "--device cuda:7")],
)
def test_wrong_arguments_are_one_line(arguments, named, capsys):
    assert cli.main(["bench", "op", *arguments]) == 1
    assert named in capsys.readouterr().err

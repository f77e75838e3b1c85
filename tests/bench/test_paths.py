"""`wbmm bench paths`: the paths of a pair compute the same, and the one that is said to be taken is."""

import csv

import pytest
import torch

from wbmm import cli
from wbmm.bench import paths


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(paths, "WINDOWS", (3, 10))
    monkeypatch.setattr(paths, "COUNTS", (1, 3))
    monkeypatch.setattr(paths, "LINEARS", ((5, 8, 32),))
    monkeypatch.setattr(paths, "FEED_FORWARDS", ((2, 4, 3), (4, 16, 70)))


def test_both_paths_compute_the_same():
    pairs = [*paths.window_pairs(channels=4), *paths.linear_pairs()]
    assert len(pairs) == 5
    pairs += [*paths.width_pairs(channels=4), *paths.block_pairs()]
    assert len(pairs) == 9
    assert [pair[3] for pair in pairs[-2:]] == [False, True], "one block holds the small one"
    with torch.no_grad():
        for *_, first, second in pairs:
            torch.testing.assert_close(first(), second(), rtol=1e-4, atol=1e-4)


def test_rows_and_files(tmp_path, capsys):
    assert cli.main(["bench", "paths", "--rounds", "1", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "3 windows of 10x10" in out
    assert "cpu, float32 weights, precision tf32" in out
    with (tmp_path / "paths.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["dtype"], row["precision"], row["rounds"]) for row in rows} == {("float32", "tf32", "1")}
    taken = {row["model"]: row["taken"] for row in rows}
    assert taken["3 windows of 3x3"] == "product"
    assert taken["3 windows of 10x10"] == ("convolution" if paths.takes_onednn(torch.ones(1)) else "product")


def test_bad_rounds(capsys):
    assert cli.main(["bench", "paths", "--rounds", "0"]) == 1
    assert "--rounds 0" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--device", "cuda"], ["--dtype", "bfloat16"]])
def test_paths_are_those_of_the_cpu(option, capsys):
    assert cli.main(["bench", "paths", *option]) == 1
    error = capsys.readouterr().err
    assert " ".join(option) in error
    assert "these are paths of the CPU in float32" in error

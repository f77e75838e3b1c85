"""Rows as tables and files, and what they were measured on."""

import csv

import pytest
import torch

from wbmm.bench.results import speed_record, table, write_report
from wbmm.machine import machine_facts, measured_line
from wbmm.timing import Timing

RECORDS = [
    speed_record("slow", 4, Timing((2.0, 1.0, 4.0)), Timing((2.0, 1.0, 4.0))),
    {**speed_record("fast, twice", 4, Timing((0.5, 1.0)), Timing((2.0, 1.0, 4.0))), "peak_mb": 12.3},
]


def test_a_record():
    assert RECORDS[1] == {
        "model": "fast, twice",
        "batch": 4,
        "images_per_s": 4 / 0.75,
        "images_per_s_best": 8.0,
        "ratio": 2 / 0.75,
        "ratio_best": 2.0,
        "peak_mb": 12.3,
    }


def test_columns_that_nobody_has_are_left_out():
    text = table(RECORDS, markdown=True)
    assert "share of the limit" not in text
    assert text.splitlines()[2] == "| slow | 4 | 2.00 | 4.00 | 1.00x | 1.00x | -- |"
    assert text.splitlines()[3].endswith("| 2.67x | 2.00x | 12 |")


def test_files(tmp_path):
    page, sheet = write_report(tmp_path / "new", "train", RECORDS, {"height": 8}, ["a b", "--batch", "4"], "A note.")
    with sheet.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == ["slow", "fast, twice"]
    assert [row["peak_mb"] for row in rows] == ["", "12.3"]
    assert rows[0]["command"] == "wbmm bench train 'a b' --batch 4"
    assert rows[0]["height"] == "8"
    text = page.read_text()
    assert text.startswith("# wbmm bench train\n")
    assert "A note." in text
    assert measured_line(machine_facts()) in text


def test_the_files_of_another_benchmark_stay(tmp_path):
    (tmp_path / "train.csv").write_text("name,value\n")
    with pytest.raises(ValueError, match="choose another --out"):
        write_report(tmp_path, "train", RECORDS, {}, [], "")
    assert [path.name for path in tmp_path.iterdir()] == ["train.csv"]


def test_the_machine_has_a_name():
    facts = machine_facts()
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == str(torch.get_num_threads())
    assert facts["machine"] in measured_line(facts)

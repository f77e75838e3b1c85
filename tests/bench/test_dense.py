"""`wbmm bench seg` and `det` on the log: six backbones, the paper's figures beside them, runs that go on."""

import argparse
import csv

import pytest
import torch
import torch.nn as nn

from wbmm.bench import dense, detectors, segmentors
from wbmm.bench.dense import BACKBONES, measure, run_dense
from wbmm.bench.results import read_log
from wbmm.bench.setting import CPU
from wbmm.timing import Timing


@pytest.fixture
def built():
    return []


def arguments(tmp_path, *more):
    parser = argparse.ArgumentParser()
    segmentors.add_arguments(parser)
    return parser.parse_args(["--sizes", "512x512", "--batch", "2", "--rounds", "1", "--out", str(tmp_path), *more])


def test_six_backbones_beside_the_papers(tmp_path, built, monkeypatch, capsys):
    def build(name, letter):
        built.append((name, letter))
        return nn.Identity()

    monkeypatch.setattr(torch, "randn", lambda *shape: torch.zeros(1, 3, 2, 2))
    args = arguments(tmp_path)
    assert run_dense(args, "seg", build, "conv3x3", segmentors.paper_speeds(), "A note", segmentors.add_arguments) == 0
    assert [name for name, _ in built] == [name for name in BACKBONES if name != "unireplknet-lka"]
    with (tmp_path / "seg.csv").open(newline="") as file:
        rows = {row["backbone"]: row for row in csv.DictReader(file)}
    assert rows["hier"]["paper_images_per_s"] == "83.7"
    assert float(rows["hier"]["paper_ratio"]) == pytest.approx(83.7 / 95.3, rel=1e-4)
    assert rows["7x7"]["layout"] == "channels_last"
    (entry,) = read_log(tmp_path / "seg.jsonl")
    assert set(entry.results) == set(BACKBONES), "the paper's six"
    assert "CUDA package" in entry.results["unireplknet-lka"]["why_not"]
    assert run_dense(args, "seg", build, "conv3x3", {}, "A note", segmentors.add_arguments) == 0
    assert len(built) == 5, "nothing is measured twice"
    assert "unireplknet-lka: the large-kernel CUDA package" in capsys.readouterr().out


def test_each_backbone_counts_in_its_faster_layout(monkeypatch):
    seconds = {"nchw": 1.0, "channels_last": 2.0}

    def fake_time(self, calls, label, rounds, warmup=1, pause=0.0):
        return {key: Timing((seconds[key[1]],)) for key in calls}

    monkeypatch.setattr(type(CPU), "time", fake_time)
    found = measure(lambda *key: nn.Identity(), ["7x7"], "t", (4, 4), 1, 1, ["nchw", "channels_last"], CPU)
    assert found == {"7x7": {"seconds": [1.0], "layout": "nchw"}}


def test_boxes_are_inside_the_image_and_of_many_sizes():
    boxes = detectors._spread(torch.zeros(2, 3, 96, 128), 50)
    assert boxes.shape == (100, 5)
    assert boxes[:, 0].unique().tolist() == [0, 1]
    left, top, right, bottom = boxes[:, 1:].T
    assert ((left >= 0) & (top >= 0) & (right <= 128) & (bottom <= 96) & (right > left) & (bottom > top)).all()
    assert (right - left).max() > 4 * (right - left).min()


def test_what_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="--sizes 512: expected HxW"):
        dense.read_size("512")

"""`wbmm bench seg`: throughput, parameters and FLOPs of whole UPerNet segmentors, backbone against backbone.

The paper's two tables of segmentation speed: six backbones, three sizes, batches of 2 to 16. The row with the
large-kernel package runs where that can be imported.
"""

import argparse
import csv
from importlib import resources

import torch
import torch.nn as nn

from wbmm.mm import require
from wbmm.models.costs import count_macs, count_params
from wbmm.models.fuse import fuse
from wbmm.paper_tables import load_dense_tables
from wbmm.text import render_table

from .dense import BACKBONES, LKA_BACKBONE, add_dense_arguments, check, configuration, run_dense
from .results import say

EXAMPLE = "wbmm bench seg --sizes 512x512 --batch 2 --backbones conv3x3 7x7 hier"
COST_HEADERS = ("backbone", "params M", "paper", "FLOPs G", "paper")
COST_SIZE = (512, 2048)  # where the paper counts FLOPs
BASELINE = "conv3x3"
NOTE = "UPerNet, 150 classes, fused, eager"
CONFIG = "configs/ade20k/{}_upernet_8xb2-160k_ade20k-512x512.py"
# The paper's parameters (M) and FLOPs (G) of the whole segmentor, from its table of ADE20K.
PAPER = load_dense_tables()["ade20k"].costs()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dense_arguments(parser, ["t"], list(BACKBONES), ["512x512", "512x1024", "1024x1024"], [2, 4, 8, 16])


def run(args: argparse.Namespace) -> int:
    check(args)
    require("seg")
    if not args.cost:
        return run_dense(args, "seg", _build_fused, BASELINE, paper_speeds(), NOTE, add_arguments)
    names = [name for name in BACKBONES if name in args.backbones and name != LKA_BACKBONE]
    print(render_table(COST_HEADERS, _costs(args.models, names), markdown=args.markdown))
    where = "x".join(map(str, COST_SIZE))
    print(f"\nUPerNet, 150 classes, fused, multiply-adds at {where}; counted, and beside it the paper's")
    return 0


def build(name: str, letter: str) -> nn.Module:
    """A segmentor with random weights, in eval mode; called with images it gives logits at a quarter of their size."""
    require("seg")
    from wbmm.mm.networks import build_segmentor

    return build_segmentor(configuration(CONFIG, name, letter))


def _build_fused(name: str, letter: str) -> nn.Module:
    return fuse(build(name, letter))


def paper_speeds() -> dict[tuple[str, str, int, int, int], float]:
    """The paper's images a second on an A800 by (letter, backbone, height, width, batch)."""
    text = resources.files("wbmm.bench").joinpath("paper_segmentors.csv").read_text(encoding="utf-8")
    return {
        (row["size"], row["backbone"], *(int(row[key]) for key in ("height", "width", "batch"))): float(
            row["images_per_s"]
        )
        for row in csv.DictReader(text.splitlines())
    }


def count(name: str, letter: str) -> tuple[int, int]:
    """Parameters with the auxiliary head, which is there in training, as the paper counts them; FLOPs without it."""
    with torch.device("meta"):
        segmentor = fuse(build(name, letter))
    return count_params(segmentor), count_macs(segmentor, COST_SIZE)[""]


def _costs(models: list[str], names: list[str]) -> list[list[str]]:
    rows = []
    for letter in models:
        for name in names:
            say(f"{name}, {letter}")
            params, macs = count(name, letter)
            paper = PAPER.get((letter, name), ("--", "--"))
            rows.append(
                [f"{name}, {letter.upper()}", f"{params / 1e6:.1f}", str(paper[0]), f"{macs / 1e9:.0f}", str(paper[1])]
            )
    return rows

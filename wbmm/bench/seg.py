"""`wbmm bench seg`: throughput, parameters and FLOPs of whole UPerNet segmentors, backbone against backbone."""

import argparse
from functools import partial

import torch
import torch.nn as nn

from wbmm.mm import require
from wbmm.models.fuse import fuse
from wbmm.models.profile import count_macs, count_params
from wbmm.text import render_table

from .results import say
from .setting import Setting, add_setting_arguments

EXAMPLE = "wbmm bench seg --sizes 512x512 --batch 2 --backbones conv3x3 7x7 hier"
SPEED_HEADERS = ("backbone", "input", "batch", "images/s (median)", "images/s (best)", "ratio of medians")
COST_HEADERS = ("backbone", "params M", "paper", "FLOPs G", "paper")
COST_SIZE = (512, 2048)  # where the paper counts FLOPs
BASELINE = "conv3x3"

CONFIG = "configs/ade20k/{}_upernet_8xb2-160k_ade20k-512x512.py"
# Where the name of a configuration begins, {} being t or s, and what is changed in its backbone.
BACKBONES = {
    "conv3x3": ("wbmm-{}-dense", {"mixer": "dw3"}),
    "conv5x5": ("wbmm-{}-dense", {"mixer": "dw5"}),
    "unireplknet": ("unireplknet-{}", {}),
    "7x7": ("wbmm-{}-dense", {}),
    "hier": ("wbmm-{}-hier", {}),
}
# The paper's parameters (M) and FLOPs (G) of the whole segmentor, from its table of ADE20K.
PAPER = {
    ("t", "unireplknet"): (62, 946),
    ("t", "7x7"): (62, 944),
    ("t", "hier"): (66, 948),
    ("s", "unireplknet"): (87, 1036),
    ("s", "7x7"): (87, 1033),
    ("s", "hier"): (92, 1038),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=("t", "s"), default=["t"], help="Tiny, Small (default: t)")
    parser.add_argument("--backbones", nargs="+", choices=BACKBONES, default=list(BACKBONES))
    parser.add_argument("--sizes", nargs="+", default=["512x512", "512x1024", "1024x1024"], metavar="HxW")
    parser.add_argument("--batch", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=10)
    add_setting_arguments(parser)
    parser.add_argument("--cost", action="store_true", help="parameters and FLOPs at 512x2048 alone, nothing is timed")
    parser.add_argument("--markdown", action="store_true")


def run(args: argparse.Namespace) -> int:
    sizes = [_size(text) for text in args.sizes]
    if min(*args.batch, args.rounds) < 1:
        raise ValueError(f"--batch {args.batch}, --rounds {args.rounds}: each must be at least 1")
    require("seg")
    names = [name for name in BACKBONES if name in args.backbones or (name == BASELINE and not args.cost)]
    if args.cost:
        print(render_table(COST_HEADERS, _costs(args.models, names), markdown=args.markdown))
        where = "x".join(map(str, COST_SIZE))
        print(f"\nUPerNet, 150 classes, fused, multiply-adds at {where}; counted, and beside it the paper's")
    else:
        setting = Setting.from_args(args)
        print(render_table(SPEED_HEADERS, _speeds(args, setting, names, sizes), markdown=args.markdown))
        print(
            f"\nUPerNet, 150 classes, fused, eager, channels-last, {setting.describe()}, {torch.get_num_threads()} "
            f"threads, torch {torch.__version__}; ratios to Conv 3x3 of the same size in the same interleaved run"
        )
    return 0


def _size(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--sizes {text}: expected HxW, such as 512x1024")
    return int(parts[0]), int(parts[1])


def build(name: str, letter: str) -> nn.Module:
    """A segmentor with random weights, in eval mode; called with images it gives logits at a quarter of their size."""
    require("seg")
    from wbmm.mm.build import build_segmentor

    return build_segmentor(configuration(CONFIG, name, letter))


def configuration(path: str, name: str, letter: str):
    """The configuration of a segmentor or detector on one of `BACKBONES`, for a single process.

    Args:
        path: of its file, with {} for the backbone.
        name: the backbone.
        letter: t or s.
    """
    from wbmm.mm.build import load_mm_config

    stem, changes = BACKBONES[name]
    changes = {"sync_bn": False, **changes}
    return load_mm_config(
        path.format(stem.format(letter)), {f"model.backbone.{key}": value for key, value in changes.items()}
    )


def _speeds(
    args: argparse.Namespace, setting: Setting, names: list[str], sizes: list[tuple[int, int]]
) -> list[list[str]]:
    rows = []
    for letter in args.models:
        models = {name: setting.place(fuse(build(name, letter))) for name in names}
        for size in sizes:
            for batch in args.batch:
                rows += _speed_rows(letter, models, batch, size, args.rounds, setting)
    return rows


def _speed_rows(
    letter: str, models: dict[str, nn.Module], batch: int, size: tuple[int, int], rounds: int, setting: Setting
) -> list[list[str]]:
    """Interleaved forward passes at one size and batch size."""
    images, where = setting.place(torch.randn(batch, 3, *size)), f"{size[0]}x{size[1]}"
    with torch.inference_mode():
        calls = {name: partial(setting.forward, model, images) for name, model in models.items()}
        timings = setting.time(calls, f"{letter.upper()}, {where}, batch {batch}, rounds", rounds, warmup=1)
    base = timings[BASELINE].median
    return [
        [
            f"{name}, {letter.upper()}",
            where,
            str(batch),
            f"{batch / timing.median:.2f}",
            f"{batch / timing.best:.2f}",
            f"{base / timing.median:.2f}x",
        ]
        for name, timing in timings.items()
    ]


def _costs(models: list[str], names: list[str]) -> list[list[str]]:
    """Parameters with the auxiliary head, which is there in training, as the paper counts them; FLOPs without it."""
    rows = []
    for letter in models:
        for name in names:
            say(f"{name}, {letter}")
            with torch.device("meta"):
                segmentor = fuse(build(name, letter))
            params = count_params(segmentor)
            macs = count_macs(segmentor, COST_SIZE)[""]
            paper = PAPER.get((letter, name), ("--", "--"))
            rows.append(
                [f"{name}, {letter.upper()}", f"{params / 1e6:.1f}", str(paper[0]), f"{macs / 1e9:.0f}", str(paper[1])]
            )
    return rows

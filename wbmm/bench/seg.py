"""`wbmm bench seg`: throughput, parameters and FLOPs of whole UPerNet segmentors, backbone against backbone."""

import argparse
import sys

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.text import render_table
from wbmm.timing import time_interleaved

EXAMPLE = "wbmm bench seg --sizes 512x512 --batch 2 --backbones conv3x3 7x7 hier"
SPEED_HEADERS = ("backbone", "input", "batch", "images/s (median)", "images/s (best)", "ratio of medians")
COST_HEADERS = ("backbone", "params M", "paper", "FLOPs G", "paper")
COST_SIZE = (512, 2048)  # where the paper counts FLOPs
BASELINE = "conv3x3"

# Arguments of WBMMBackbone by name; {} is t or s.
BACKBONES = {
    "conv3x3": {"arch": "wbmm_{}_dense", "mixer": "dw3"},
    "conv5x5": {"arch": "wbmm_{}_dense", "mixer": "dw5"},
    "unireplknet": {"arch": "unireplknet_{}"},
    "7x7": {"arch": "wbmm_{}_dense"},
    "hier": {"arch": "wbmm_{}_hier"},
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
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cost", action="store_true", help="parameters and FLOPs at 512x2048 alone, nothing is timed")
    parser.add_argument("--markdown", action="store_true")


def run(args: argparse.Namespace) -> int:
    sizes = [_size(text) for text in args.sizes]
    if min(*args.batch, args.rounds) < 1:
        raise ValueError(f"--batch {args.batch}, --rounds {args.rounds}: each must be at least 1")
    names = [name for name in BACKBONES if name in args.backbones or (name == BASELINE and not args.cost)]
    if args.cost:
        print(render_table(COST_HEADERS, _costs(args.models, names), markdown=args.markdown))
        where = "x".join(map(str, COST_SIZE))
        print(f"\nUPerNet, 150 classes, fused, multiply-adds at {where}; counted, and beside it the paper's")
    else:
        print(render_table(SPEED_HEADERS, _speeds(args, names, sizes), markdown=args.markdown))
        print(f"\nUPerNet, 150 classes, float32, fused, eager, {args.device}, {torch.get_num_threads()} threads, torch "
              f"{torch.__version__}; ratios to Conv 3x3 of the same size in the same interleaved run")  # fmt: skip
    return 0


def _size(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--sizes {text}: expected HxW, such as 512x1024")
    return int(parts[0]), int(parts[1])


def build(name: str, model: str) -> nn.Module:
    """A segmentor with random weights, in eval mode; from images to logits at a quarter of their resolution."""
    from wbmm.mm.build import require

    try:
        require("seg")
    except ImportError as error:
        raise ValueError(str(error)) from None
    from mmseg.models import UPerHead

    from wbmm.mm.backbone import WBMMBackbone

    options = {key: value.format(model) for key, value in BACKBONES[name].items()}
    backbone = WBMMBackbone(**options, sync_bn=False)
    channels = [info["num_chs"] for info in backbone.feature_info]
    head = UPerHead(
        in_channels=channels,
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3, 6),
        channels=512,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg={"type": "BN"},
        align_corners=False,
    )
    return Segmentor(backbone, head).eval()


class Segmentor(nn.Module):
    """Backbone and decode head, as they run at test time."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.decode_head = head

    def forward(self, images: Tensor) -> Tensor:
        return self.decode_head(self.backbone(images))


def _speeds(args: argparse.Namespace, names: list[str], sizes: list[tuple[int, int]]) -> list[list[str]]:
    from wbmm.models.fuse import fuse

    rows = []
    for letter in args.models:
        layout = {"device": args.device, "memory_format": torch.channels_last}
        models = {name: fuse(build(name, letter)).to(**layout) for name in names}
        for size in sizes:
            for batch in args.batch:
                _say(f"{letter}, {size[0]}x{size[1]}, batch {batch}")
                rows += _speed_rows(letter, models, batch, size, args)
    return rows


def _speed_rows(letter: str, models: dict[str, nn.Module], batch: int, size: tuple[int, int], args) -> list[list[str]]:
    images = torch.randn(batch, 3, *size, device=args.device).contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        calls = {name: lambda model=model: model(images) for name, model in models.items()}
        timings = time_interleaved(calls, rounds=args.rounds, warmup=1)
    base = timings[BASELINE].median
    return [
        [
            f"{name}, {letter.upper()}",
            f"{size[0]}x{size[1]}",
            str(batch),
            f"{batch / timing.median:.2f}",
            f"{batch / timing.best:.2f}",
            f"{base / timing.median:.2f}x",
        ]
        for name, timing in timings.items()
    ]


def _costs(models: list[str], names: list[str]) -> list[list[str]]:
    """Parameters with the auxiliary head, which is there in training, as the paper counts them; FLOPs without it."""
    from wbmm.models.fuse import fuse
    from wbmm.models.profile import count_macs, count_params

    rows = []
    for letter in models:
        for name in names:
            _say(f"{name}, {letter}")
            with torch.device("meta"):
                segmentor = fuse(build(name, letter))
            auxiliary = _auxiliary_params(segmentor.backbone.feature_info[2]["num_chs"])
            params = count_params(segmentor) + auxiliary
            macs = count_macs(segmentor, COST_SIZE)[""]
            paper = PAPER.get((letter, name), ("--", "--"))
            rows.append(
                [f"{name}, {letter.upper()}", f"{params / 1e6:.1f}", str(paper[0]), f"{macs / 1e9:.0f}", str(paper[1])]
            )
    return rows


def _auxiliary_params(channels: int, width: int = 256, classes: int = 150) -> int:
    """Of the FCN head of one convolution: its weights, its norm, and the classifier."""
    return channels * width * 9 + 2 * width + width * classes + classes


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)

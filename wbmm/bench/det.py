"""`wbmm bench det`: parameters and FLOPs of whole Cascade Mask R-CNN detectors beside the paper's."""

import argparse
import sys

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.text import render_table

from .seg import BACKBONES

EXAMPLE = "wbmm bench det --models t s --backbones unireplknet 7x7 hier"
HEADERS = ("backbone", "params M", "fused M", "paper", "FLOPs G", "paper", "backbone G", "FPN, RPN", "boxes", "masks")
SIZE = (800, 1280)  # where the paper counts FLOPs
BOXES, MASKS = 1000, 100  # RoIs of the box heads and of the mask heads, an image
CHANNELS, CLASSES, STAGES = 256, 80, 3
# The paper's parameters (M) and FLOPs (G) of the whole detector, from its table of COCO.
PAPER = {
    ("t", "unireplknet"): (89, 749),
    ("t", "7x7"): (89, 747),
    ("t", "hier"): (92, 751),
    ("s", "unireplknet"): (113, 835),
    ("s", "7x7"): (113, 833),
    ("s", "hier"): (118, 837),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models", nargs="+", choices=("t", "s"), default=["t", "s"], help="Tiny, Small (default: both)"
    )
    parser.add_argument("--backbones", nargs="+", choices=BACKBONES, default=["unireplknet", "7x7", "hier"])
    parser.add_argument("--size", type=int, nargs=2, default=SIZE, metavar=("H", "W"), help="default: 800 1280")
    parser.add_argument("--markdown", action="store_true")


class Detector(nn.Module):
    """The layers of Cascade Mask R-CNN on a fixed number of RoIs: what is counted, without sampling and suppression."""

    def __init__(self, backbone: nn.Module) -> None:
        from mmdet.models import FPN, ConvFCBBoxHead, FCNMaskHead, RPNHead

        super().__init__()
        self.backbone = backbone
        self.neck = FPN([info["num_chs"] for info in backbone.feature_info], CHANNELS, num_outs=5)
        self.rpn_head = RPNHead(in_channels=CHANNELS, feat_channels=CHANNELS, anchor_generator=ANCHORS)
        self.bbox_head = nn.ModuleList(
            ConvFCBBoxHead(
                num_shared_convs=4,
                num_shared_fcs=1,
                in_channels=CHANNELS,
                conv_out_channels=CHANNELS,
                fc_out_channels=1024,
                roi_feat_size=7,
                num_classes=CLASSES,
                norm_cfg={"type": "BN"},
            )
            for _ in range(STAGES)
        )
        self.mask_head = nn.ModuleList(
            FCNMaskHead(num_convs=4, in_channels=CHANNELS, conv_out_channels=CHANNELS, num_classes=CLASSES)
            for _ in range(STAGES)
        )

    def forward(self, images: Tensor) -> None:
        maps = self.neck(self.backbone(images))
        self.rpn_head(maps)
        for box_head, mask_head in zip(self.bbox_head, self.mask_head, strict=True):
            box_head(images.new_zeros(BOXES, CHANNELS, 7, 7))
            mask_head(images.new_zeros(MASKS, CHANNELS, 14, 14))


ANCHORS = {"type": "AnchorGenerator", "scales": [8], "ratios": [0.5, 1.0, 2.0], "strides": [4, 8, 16, 32, 64]}


def build(name: str, model: str) -> Detector:
    """A detector without memory, in training form and eval mode."""
    from wbmm.mm.build import require

    try:
        require("det")
    except ImportError as error:
        raise ValueError(str(error)) from None
    from mmengine.registry import DefaultScope

    from wbmm.mm.backbone import WBMMBackbone

    options = {key: value.format(model) for key, value in BACKBONES[name].items()}
    with DefaultScope.overwrite_default_scope("mmdet"), torch.device("meta"):
        return Detector(WBMMBackbone(**options, sync_bn=False)).eval()


def count(detector: Detector, size: tuple[int, int] = SIZE) -> tuple[int, int, dict[str, int]]:
    """Parameters in training form and fused, and multiply-adds of the fused form by part; `""` is the whole."""
    from wbmm.models.fuse import fuse
    from wbmm.models.profile import count_macs, count_params

    with torch.device("meta"):
        fused = fuse(detector)
    macs = count_macs(fused, size)
    parts = {"backbone": ("backbone",), "neck": ("neck", "rpn_head"), "boxes": ("bbox_head",), "masks": ("mask_head",)}
    sums = {
        part: sum(value for name, value in macs.items() for key in keys if name == key or _direct(name, key, macs))
        for part, keys in parts.items()
    }
    return count_params(detector), count_params(fused), {"": macs[""], **sums}


def _direct(name: str, key: str, macs: dict[str, int]) -> bool:
    """Whether a module is a member of a list that has no entry of its own."""
    return key not in macs and name.startswith(f"{key}.") and name.count(".") == 1


def run(args: argparse.Namespace) -> int:
    if min(args.size) < 32:
        raise ValueError(f"--size {args.size[0]} {args.size[1]}: each side must be at least 32")
    rows = []
    for letter in args.models:
        for name in (name for name in BACKBONES if name in args.backbones):
            if sys.stderr.isatty():
                print(f"{name}, {letter}", file=sys.stderr, flush=True)
            params, fused, macs = count(build(name, letter), tuple(args.size))
            paper = PAPER.get((letter, name), ("--", "--")) if tuple(args.size) == SIZE else ("--", "--")
            giga = [f"{macs[part] / 1e9:.0f}" for part in ("", "backbone", "neck", "boxes", "masks")]
            label = f"{name}, {letter.upper()}"
            millions = [f"{number / 1e6:.1f}" for number in (params, fused)]
            rows.append([label, *millions, str(paper[0]), giga[0], str(paper[1]), *giga[1:]])
    print(render_table(HEADERS, rows, markdown=args.markdown))
    where = "x".join(map(str, args.size))
    print(f"\nCascade Mask R-CNN, {CLASSES} classes, fused, multiply-adds at {where} (height x width) with {BOXES} "
          f"RoIs for the box heads and {MASKS} for the mask heads; counted, and beside it the paper's")  # fmt: skip
    return 0

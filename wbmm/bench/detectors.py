"""`wbmm bench det`: speed of whole Cascade Mask R-CNN detectors, and their parameters and FLOPs beside the paper's.

Timed are backbone, FPN, RPN, RoIAlign and all heads of the cascade on a fixed number of RoIs: with random weights the
number of detections would be as well. Suppression of overlapping boxes is left out. The paper has no such table.
"""

import argparse

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.mm import require
from wbmm.models.costs import count_macs, count_params
from wbmm.models.fuse import fuse
from wbmm.paper_tables import load_dense_tables
from wbmm.text import render_table

from .dense import BACKBONES, LKA_BACKBONE, add_dense_arguments, check, configuration, run_dense
from .results import say

EXAMPLE = "wbmm bench det --cost --models t s --backbones unireplknet 7x7 hier"
HEADERS = ("backbone", "params M", "fused M", "paper", "FLOPs G", "paper", "backbone G", "FPN, RPN", "boxes", "masks")
SIZE = (800, 1280)  # where the paper counts FLOPs
BASELINE = "unireplknet"
NOTE = (
    "Cascade Mask R-CNN, 80 classes, fused, eager, with RoIAlign (in float32 always) on a fixed number of boxes and "
    "without suppression"
)
CONFIG = "configs/coco/{}_cascade-mask-rcnn_8xb2-3x_coco.py"
# The paper's parameters (M) and FLOPs (G) of the whole detector, from its table of COCO.
PAPER = load_dense_tables()["coco"].costs()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dense_arguments(parser, ["t"], ["unireplknet", LKA_BACKBONE, "7x7", "hier"], ["800x1280"], [1])


def run(args: argparse.Namespace) -> int:
    sizes = check(args)
    require("det")
    if min(side for size in sizes for side in size) < 32:
        raise ValueError(f"--sizes {' '.join(args.sizes)}: each side must be at least 32")
    if args.cost:
        for size in sizes:
            _print_costs(args, size)
        return 0
    return run_dense(args, "det", _build_timed, BASELINE, {}, NOTE, add_arguments)


def _build_timed(name: str, letter: str) -> nn.Module:
    require("det")
    from wbmm.mm.networks import build_detector

    return fuse(OnGivenRois(build_detector(configuration(CONFIG, name, letter))).eval())


def _print_costs(args: argparse.Namespace, size: tuple[int, int]) -> None:
    rows = []
    for letter in args.models:
        for name in (name for name in BACKBONES if name in args.backbones and name != LKA_BACKBONE):
            say(f"{name}, {letter}")
            detector = build(name, letter)
            params, fused, macs = count(detector, size)
            paper = PAPER.get((letter, name), ("--", "--")) if size == SIZE else ("--", "--")
            giga = [f"{macs[part] / 1e9:.0f}" for part in ("", "backbone", "neck", "boxes", "masks")]
            label = f"{name}, {letter.upper()}"
            millions = [f"{number / 1e6:.1f}" for number in (params, fused)]
            rows.append([label, *millions, str(paper[0]), giga[0], str(paper[1]), *giga[1:]])
    print(render_table(HEADERS, rows, markdown=args.markdown))
    where = "x".join(map(str, size))
    print(
        f"\nCascade Mask R-CNN, {detector.mask_head[0].num_classes} classes, fused, multiply-adds at {where} (height x "
        f"width) with {detector.boxes} RoIs for the box heads and {detector.masks} for the mask heads; counted, and "
        "beside it the paper's"
    )


class OnFixedRois(nn.Module):
    """The layers of Cascade Mask R-CNN on a fixed number of RoIs: what is counted, without sampling and suppression.

    Attributes:
        boxes: RoIs of the box heads, an image: as many as the RPN proposes in testing.
        masks: RoIs of the mask heads: as many as there are detections at most.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.boxes, self.masks = (detector.test_cfg[part].max_per_img for part in ("rpn", "rcnn"))
        self.backbone, self.neck, self.rpn_head = detector.backbone, detector.neck, detector.rpn_head
        heads = detector.roi_head
        self.bbox_head, self.mask_head = heads.bbox_head, heads.mask_head
        self._box_shape, self._mask_shape = map(_roi_shape, (heads.bbox_roi_extractor[0], heads.mask_roi_extractor[0]))

    def forward(self, images: Tensor) -> None:
        self.rpn_head(self.neck(self.backbone(images)))
        for box_head, mask_head in zip(self.bbox_head, self.mask_head, strict=True):
            box_head(images.new_zeros(self.boxes, *self._box_shape))
            mask_head(images.new_zeros(self.masks, *self._mask_shape))


class OnGivenRois(OnFixedRois):
    """The same with RoIAlign on boxes that are spread over the image: what is timed."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__(detector)
        heads = detector.roi_head
        self.box_extractors, self.mask_extractors = heads.bbox_roi_extractor, heads.mask_roi_extractor

    def forward(self, images: Tensor) -> None:
        maps = [part.contiguous() for part in self.neck(self.backbone(images))]  # mmcv's operators read NCHW memory
        self.rpn_head(maps)
        dtype, maps = maps[0].dtype, [part.float() for part in maps]  # mmcv has no RoIAlign in bfloat16
        boxes, masks = (_spread(images.float(), count) for count in (self.boxes, self.masks))
        for i, (box_head, mask_head) in enumerate(zip(self.bbox_head, self.mask_head, strict=True)):
            box_head(self.box_extractors[i](maps[: self.box_extractors[i].num_inputs], boxes).to(dtype))
            mask_head(self.mask_extractors[i](maps[: self.mask_extractors[i].num_inputs], masks).to(dtype))


def _spread(images: Tensor, count: int) -> Tensor:
    """`count` boxes of many sizes for each image, as (image, left, top, right, bottom)."""
    batch, _, height, width = images.shape
    part = torch.linspace(0.02, 0.9, count, device=images.device, dtype=images.dtype)
    side = 16 + part * (min(height, width) - 16)
    left, top = (part * 7 % 1) * (width - side), (part * 13 % 1) * (height - side)
    boxes = torch.stack([left, top, left + side, top + side], 1)
    return torch.cat([torch.cat([torch.full_like(boxes[:, :1], i), boxes], 1) for i in range(batch)])


def _roi_shape(extractor: nn.Module) -> tuple[int, int, int]:
    return (extractor.out_channels, *extractor.roi_layers[0].output_size)


def build(name: str, letter: str) -> OnFixedRois:
    """A detector without memory, in training form and eval mode."""
    require("det")
    from wbmm.mm.networks import build_detector

    with torch.device("meta"):
        return OnFixedRois(build_detector(configuration(CONFIG, name, letter))).eval()


def count(detector: OnFixedRois, size: tuple[int, int] = SIZE) -> tuple[int, int, dict[str, int]]:
    """Parameters in training form and fused, and multiply-adds of the fused form by part; `""` is the whole."""
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

"""Segmentors of mmseg and detectors of mmdet as what `wbmm export --config` exports."""

import copy
from pathlib import Path

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from wbmm.deploy.export import Exportable
from wbmm.extras import install_extra
from wbmm.io.card import ModelCard
from wbmm.io.picture_pipeline import PicturePipeline

__all__ = ["BackboneMaps", "NeckMaps", "SegmentorLogits", "open_exportable", "picture_pipeline"]

SIZES = {"segmentor": (512, 512), "detector": (800, 1280)}  # of images, where the configuration has none
CARRIED = ("LoadImageFromFile", "LoadImageFromNDArray", "Resize", "LoadAnnotations")


def open_exportable(config: Path, checkpoint: Path, features: bool = False, neck: bool = False) -> Exportable:
    """A segmentor, a detector, with `neck` its backbone and neck, or with `features` the backbone of either.

    Args:
        config: its configuration.
        checkpoint: its weights, loaded strictly.
    """
    try:
        from .build import build_detector, build_segmentor, load_mm_config
    except ImportError as error:
        raise ValueError(
            f"--config needs MMSegmentation or MMDetection ({error}): {install_extra('seg')}, or {install_extra('det')}"
        ) from None
    cfg = load_mm_config(config)
    kind = "segmentor" if "decode_head" in cfg.model else "detector"
    build = build_segmentor if kind == "segmentor" else build_detector
    model = build(cfg, checkpoint)
    card, bgr = _card(cfg, model, kind)
    if features:
        names = [f"stage{i + 1}" for i in model.backbone.out_indices]
        return Exportable(BackboneMaps(model, bgr), card.replace(kind="features", num_classes=0), names)
    if kind == "segmentor":
        pictures = picture_pipeline(cfg, model)
        height, width = card.input_size[1:] if pictures.scale is None else pictures.scale[::-1]
        width, height = pictures.padded(width, height)
        card = card.replace(pictures=pictures, input_size=(card.input_size[0], height, width))
        return Exportable(SegmentorLogits(model, bgr), card, ["logits"])
    if not neck:
        return _whole_detector(cfg, model, card, bgr)
    return _neck(model, card, bgr)


def _whole_detector(cfg, model: nn.Module, card: ModelCard, bgr: bool) -> Exportable:
    from .build import dataset_meta
    from .detector_graph import OUTPUTS, DetectorGraph, compare_detections

    net = DetectorGraph(model, bgr)
    resize, palette = _resize_step(cfg, "PackDetInputs"), dataset_meta(model).get("palette")
    pictures = _resizing(
        resize,
        pad_value=net.pad_value,
        threshold=float(model.test_cfg.rcnn.get("mask_thr_binary", 0.5)),
        palette=_colours(palette, net.num_classes),
    )
    width, height = pictures.scale or SIZES["detector"][::-1]
    names = dataset_meta(model).get("classes")
    names = list(names) if names and len(names) == net.num_classes else None
    card = card.replace(
        num_classes=net.num_classes,
        class_names=names,
        pictures=pictures,
        input_size=(card.input_size[0], height, width),
    )
    names = OUTPUTS if net.mask_heads else OUTPUTS[:-1]
    return Exportable(net, card, list(names), smallest=65, compare=compare_detections, boxes=True)


def _neck(model: nn.Module, card: ModelCard, bgr: bool) -> Exportable:
    # A map of level n has 1 / 2**n of the image's resolution; the backbone's first is at level 2.
    net, first = NeckMaps(model, bgr), 2 + model.backbone.out_indices[0] + getattr(model.neck, "start_level", 0)
    levels = range(first, first + model.neck.num_outs)
    return Exportable(net, card, [f"p{level}" for level in levels], smallest=2 ** levels[-1] + 1)


def _card(cfg, model: nn.Module, kind: str) -> tuple[ModelCard, bool]:
    """The card, and whether the model takes BGR."""
    from .build import dataset_meta

    images = cfg.model.get("data_preprocessor") or cfg.get("data_preprocessor") or {}
    channels = cfg.model.backbone.get("in_chans", 3)
    mean, std = (
        tuple(value / 255 for value in images.get(key) or [default] * channels)
        for key, default in (("mean", 0.0), ("std", 1.0))
    )
    names = (getattr(model, "dataset_meta", None) or {}).get("classes")
    count = model.decode_head.num_classes if kind == "segmentor" else 0
    if names is None and len(dataset_meta(model).get("classes", ())) == count > 0:
        names = dataset_meta(model)["classes"]  # of the test data, if they are the model's
    card = ModelCard(
        model=cfg.model.backbone.get("arch") or "custom",
        num_classes=count,
        input_size=(channels, *(images.get("size") or SIZES[kind])),
        mean=mean,
        std=std,
        interpolation="bilinear",
        crop_pct=1.0,
        class_names=list(names) if names else None,
        kind=kind,
    )
    return card, channels == 3 and not images.get("bgr_to_rgb", False)


def picture_pipeline(cfg, model: nn.Module) -> PicturePipeline:
    """The test pipeline of a segmentor, for its exported file to carry.

    Raises:
        ValueError: there is something in it that an exported file cannot do.
    """
    from .build import dataset_meta

    if cfg.model.get("test_cfg", {}).get("mode", "whole") != "whole":
        raise ValueError(
            "model.test_cfg.mode is 'slide', and an exported segmentor takes whole pictures: "
            "set model.test_cfg.mode to 'whole' in the configuration"
        )
    resize = _resize_step(cfg, "PackSegInputs")
    images = cfg.model.get("data_preprocessor") or cfg.get("data_preprocessor") or {}
    padding = images.get("test_cfg") or {}
    head, palette = model.decode_head, dataset_meta(model).get("palette")
    return _resizing(
        resize,
        pad_size=_pair(padding.get("size")),
        size_divisor=padding.get("size_divisor"),
        pad_value=images.get("pad_val", 0),
        align_corners=head.align_corners,
        threshold=head.threshold if head.out_channels == 1 else None,
        palette=_colours(palette, head.num_classes),
    )


def _resize_step(cfg, packing: str) -> dict:
    """The resizing of a test pipeline; a `ValueError` if that does more than an exported file can."""
    steps = ((cfg.get("test_dataloader") or {}).get("dataset") or {}).get("pipeline") or []
    carried = (*CARRIED, packing)
    odd = [step["type"] for step in steps if step["type"] not in carried]
    resizes = [step for step in steps if step["type"] == "Resize"]
    if odd or len(resizes) > 1:
        raise ValueError(
            f"the test pipeline has {odd[0] if odd else 'two steps Resize'}, which an exported file cannot carry; "
            f"it may have {', '.join(carried)}, each once"
        )
    return resizes[0] if resizes else {}


def _resizing(resize: dict, **others) -> PicturePipeline:
    return PicturePipeline(
        scale=_pair(resize.get("scale")),
        scale_factor=_pair(resize.get("scale_factor")),
        keep_ratio=resize.get("keep_ratio", False),
        interpolation=resize.get("interpolation", "bilinear"),
        backend=resize.get("backend", "cv2"),
        **others,
    )


def _colours(palette, count: int) -> list | None:
    return [[int(value) for value in colour] for colour in palette] if palette and len(palette) >= count else None


def _pair(value) -> tuple | None:
    """One number for both sides, or two."""
    return value if value is None else tuple(value) if isinstance(value, list | tuple) else (value, value)


class BackboneMaps(nn.Module):
    """Images in RGB to the maps of a backbone; models that were trained on BGR get their channels turned."""

    def __init__(self, model: nn.Module, bgr: bool = False) -> None:
        super().__init__()
        self.backbone = model.backbone
        self.bgr = bgr

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return self.backbone(images.flip(1) if self.bgr else images)


class NeckMaps(BackboneMaps):
    """Backbone and neck: the maps that a detector's heads work on."""

    def __init__(self, model: nn.Module, bgr: bool = False) -> None:
        super().__init__(model, bgr)
        if getattr(model, "neck", None) is None:
            raise ValueError(f"a {type(model).__name__} has no neck to export; take its backbone (--features)")
        self.neck = copy.copy(model.neck)
        self.extra = 0
        if getattr(self.neck, "add_extra_convs", True) is False:
            self.extra = self.neck.num_outs - len(self.neck.lateral_convs)
            self.neck.num_outs -= self.extra

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        maps = list(self.neck(super().forward(images)))
        for _ in range(self.extra):
            # Every second pixel. FPN takes max pooling for it, which would pin the size in torch.export.
            channels = maps[-1].shape[1]
            maps.append(F.conv2d(maps[-1], maps[-1].new_ones(channels, 1, 1, 1), stride=2, groups=channels))
        return tuple(maps)


class SegmentorLogits(BackboneMaps):
    """A whole segmentor: logits `[B, classes, H, W]` at the size of the images, as in mmseg's whole-image testing."""

    def __init__(self, model: nn.Module, bgr: bool = False) -> None:
        super().__init__(model, bgr)
        if isinstance(model.decode_head, nn.ModuleList):
            raise ValueError(f"a {type(model).__name__} has a cascade of heads, which cannot be exported")
        self.neck = getattr(model, "neck", None) or nn.Identity()
        self.decode_head = model.decode_head

    def forward(self, images: Tensor) -> Tensor:
        logits = self.decode_head(self.neck(super().forward(images)))
        align = self.decode_head.align_corners
        return F.interpolate(logits, size=images.shape[2:], mode="bilinear", align_corners=align)

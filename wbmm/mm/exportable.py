"""Segmentors of mmseg and detectors of mmdet as what `wbmm export --config` exports.

`DetectorGraph` is Mask R-CNN or Cascade Mask R-CNN as one graph: a picture in; boxes, labels, scores and masks out. It
takes the same steps as MMDetection's prediction of one picture, in operators that exporters know, with the model's
weights.
"""

import copy
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from wbmm.deploy.export import Exportable
from wbmm.deploy.export.graph import roi_features, suppress
from wbmm.deploy.export.verify import Comparison
from wbmm.extras import install_extra
from wbmm.io.card import ModelCard
from wbmm.io.picture_pipeline import PicturePipeline

__all__ = [
    "OUTPUTS",
    "BackboneMaps",
    "DetectorGraph",
    "NeckMaps",
    "SegmentorLogits",
    "compare_detections",
    "decode_boxes",
    "open_exportable",
    "picture_pipeline",
]

SIZES = {"segmentor": (512, 512), "detector": (800, 1280)}  # of images, where the configuration has none
CARRIED = ("LoadImageFromFile", "LoadImageFromNDArray", "Resize", "LoadAnnotations")


def open_exportable(config: Path, checkpoint: Path, features: bool = False, neck: bool = False) -> Exportable:
    """A segmentor, a detector, with `neck` its backbone and neck, or with `features` the backbone of either.

    Args:
        config: its configuration.
        checkpoint: its weights, loaded strictly.
    """
    try:
        from .networks import build_detector, build_segmentor, load_mm_config
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
    from .networks import dataset_meta

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
    from .networks import dataset_meta

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
    from .networks import dataset_meta

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


OUTPUTS = ["boxes", "labels", "scores", "masks"]
LONE = 0.02  # share of detections that may have no partner in the other form
KNOWN = {"MaskRCNN", "CascadeRCNN", "FasterRCNN"}


class DetectorGraph(NeckMaps):
    """A whole detector, for one picture at a time.

    Gives boxes `[1, K, 4]` (left, top, right, bottom, in pixels of what came in), labels `[1, K]`, scores `[1, K]` and,
    where the detector has them, masks `[1, K, 28, 28]`: probabilities on a grid over each box.

    Args:
        model: a `MaskRCNN`, `FasterRCNN` or `CascadeRCNN` of MMDetection.
        bgr: the model takes BGR.
    """

    def __init__(self, model: nn.Module, bgr: bool = False) -> None:
        super().__init__(model, bgr)
        _check(model)
        head, preprocessor = model.roi_head, model.data_preprocessor
        self.rpn_head, self.roi_head = model.rpn_head, head
        self.divisor, self.pad_value = preprocessor.pad_size_divisor, float(preprocessor.pad_value)
        several = isinstance(head.bbox_head, nn.ModuleList)
        self.box_heads = list(head.bbox_head) if several else [head.bbox_head]
        self.box_extractors = list(head.bbox_roi_extractor) if several else [head.bbox_roi_extractor]
        masks = getattr(head, "mask_head", None) if head.with_mask else None
        self.mask_heads = [] if masks is None else list(masks) if several else [masks]
        extractors = head.mask_roi_extractor if masks is not None else []
        self.mask_extractors = extractors if isinstance(extractors, list | nn.ModuleList) else [extractors]
        self.num_classes = self.box_heads[0].num_classes
        self.rpn_test, self.rcnn_test = model.test_cfg.rpn, model.test_cfg.rcnn

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        height, width = images.shape[2:]
        padding = (0, -width % self.divisor, 0, -height % self.divisor)
        maps = super().forward(F.pad(images, padding, value=self.pad_value))
        boxes = self._propose(maps, (height, width))
        boxes, scores, labels = self._classify(maps, boxes, (height, width))
        outputs = [boxes, labels, scores]
        if self.mask_heads:
            outputs.append(self._masks(maps, boxes, labels))
        return tuple(part[None] for part in outputs)

    def _propose(self, maps: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
        """`[K, 4]`: where the RPN sees objects, by level, then the best of all levels."""
        head, cfg = self.rpn_head, self.rpn_test
        boxes, scores = [], []
        for level, part in enumerate(maps):
            logits, deltas = head.forward_single(part)
            anchors = self._anchors(level, part)
            score, delta = logits[0].permute(1, 2, 0).reshape(-1).sigmoid(), deltas[0].permute(1, 2, 0).reshape(-1, 4)
            # Enough empty places that a small map has as many as are taken; no score is as low as theirs.
            score = torch.cat([score, score.new_full((cfg.nms_pre,), -1.0)])
            delta, anchors = (torch.cat([part, part.new_zeros(cfg.nms_pre, 4)]) for part in (delta, anchors))
            score, place = score.topk(cfg.nms_pre)
            box = decode_boxes(anchors[place], delta[place], head.bbox_coder, size)
            least = cfg.get("min_bbox_size", -1)
            if least >= 0:
                large = torch.logical_and(box[:, 2] - box[:, 0] > least, box[:, 3] - box[:, 1] > least)
                score = torch.where(large, score, torch.full_like(score, -1.0))
            boxes.append(box), scores.append(score)
        return suppress(torch.stack(boxes), torch.stack(scores), cfg.nms.iou_threshold, 0.0, cfg.max_per_img)[0]

    def _anchors(self, level: int, part: Tensor) -> Tensor:
        """`[H * W * A, 4]`."""
        generator = self.rpn_head.prior_generator
        stride_x, stride_y = generator.strides[level]
        base = generator.base_anchors[level].to(part)
        x = torch.arange(part.shape[3]).to(part) * stride_x
        y = torch.arange(part.shape[2]).to(part) * stride_y
        shift_y, shift_x = torch.meshgrid(y, x, indexing="ij")
        shifts = torch.stack([shift_x, shift_y, shift_x, shift_y], dim=-1)
        return (shifts[:, :, None] + base).reshape(-1, 4)

    def _classify(self, maps: Sequence[Tensor], boxes: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Boxes `[K, 4]`, scores and labels `[K]`, from proposals; a cascade refines them from stage to stage."""
        logits, cfg = [], self.rcnn_test
        for stage, (head, extractor) in enumerate(zip(self.box_heads, self.box_extractors, strict=True)):
            score, delta = head(_extract(extractor, maps, boxes))
            logits.append(score)
            if stage + 1 < len(self.box_heads):
                best = score[:, :-1].argmax(1)
                boxes = decode_boxes(boxes, _of_class(delta, best, head), head.bbox_coder, size)
        scores = (sum(logits) / len(logits)).softmax(-1)[:, :-1]
        delta = delta.reshape(delta.shape[0], -1, 4)
        boxes = decode_boxes(boxes[:, None].expand(-1, delta.shape[1], -1), delta, head.bbox_coder, size)
        boxes = boxes.expand(-1, scores.shape[1], -1)
        groups = boxes.transpose(0, 1), scores.transpose(0, 1)
        return suppress(*groups, cfg.nms.iou_threshold, cfg.score_thr, cfg.max_per_img)

    def _masks(self, maps: Sequence[Tensor], boxes: Tensor, labels: Tensor) -> Tensor:
        """Probabilities `[K, h, w]` of the labels' classes; the mean over the stages of a cascade."""
        parts = []
        for head, extractor in zip(self.mask_heads, self.mask_extractors, strict=True):
            logits = head(_extract(extractor, maps, boxes))
            if head.class_agnostic:
                parts.append(logits[:, 0].sigmoid())
                continue
            place = labels[:, None, None, None].expand(-1, 1, *logits.shape[2:])
            parts.append(logits.gather(1, place)[:, 0].sigmoid())
        return sum(parts) / len(parts)


def _extract(extractor: nn.Module, maps: Sequence[Tensor], boxes: Tensor) -> Tensor:
    layers = extractor.roi_layers
    strides = list(extractor.featmap_strides)
    size, sampling = layers[0].output_size[0], layers[0].sampling_ratio
    return roi_features(list(maps[: len(strides)]), boxes, strides, extractor.finest_scale, size, sampling)


def _of_class(delta: Tensor, label: Tensor, head: nn.Module) -> Tensor:
    if head.reg_class_agnostic:
        return delta
    delta = delta.reshape(delta.shape[0], -1, 4)
    return delta.gather(1, label[:, None, None].expand(-1, 1, 4))[:, 0]


def decode_boxes(boxes: Tensor, deltas: Tensor, coder, size: tuple[int, int]) -> Tensor:
    """Boxes `[..., 4]` moved and scaled by `deltas [..., 4]` and cut at the edge of the picture, as mmdet's coder does.

    Args:
        coder: a `DeltaXYWHBBoxCoder`.
        size: (height, width).
    """
    deltas = deltas * deltas.new_tensor(coder.stds) + deltas.new_tensor(coder.means)
    most = abs(math.log(16 / 1000))
    centre, side = (boxes[..., :2] + boxes[..., 2:]) * 0.5, boxes[..., 2:] - boxes[..., :2]
    centre = centre + side * deltas[..., :2]
    half = side * deltas[..., 2:].clamp(-most, most).exp() * 0.5
    x0, y0, x1, y1 = torch.cat([centre - half, centre + half], -1).unbind(-1)
    height, width = size
    return torch.stack([x0.clamp(0, width), y0.clamp(0, height), x1.clamp(0, width), y1.clamp(0, height)], -1)


def compare_detections(what: str, images: str, x: Tensor, reference, candidate) -> Comparison:
    """The detections of two forms on the same image: each beside the nearest one of its class.

    Scores that differ in their last digits can swap two boxes in the suppression, so a few may be without a partner.
    """
    with torch.inference_mode():
        expected, found = ([part[0].double() for part in form(x)] for form in (reference, candidate))
    count = max(len(expected[0]), len(found[0]))
    largest = max([1.0, *(part[0].abs().max().item() for part in (expected, found) if part[0].numel())])
    differences = sorted(min(_differences(expected, found, i), default=math.inf) for i in range(len(expected[0])))
    differences += [math.inf] * (len(found[0]) - len(expected[0]))
    allowed = math.ceil(LONE * count)
    matched = differences[: len(differences) - allowed] if count > 1 else differences
    worst = max(matched, default=0.0)
    return Comparison(what, f"{images}, {count} boxes", tuple(x.shape), largest, worst)


def _differences(expected: list[Tensor], found: list[Tensor], i: int) -> list[float]:
    """How far each detection of the other form is from detection `i`: box, score and mask; those of its class alone."""
    same = found[1] == expected[1][i]
    parts = [(found[0][same] - expected[0][i]).abs().amax(1)] if same.any() else []
    for a, b in zip(expected[2:], found[2:], strict=True):
        parts.append((b[same] - a[i]).abs().flatten(1).amax(1) if b.ndim > 1 else (b[same] - a[i]).abs())
    return torch.stack(parts).amax(0).tolist() if same.any() else []


def _check(model: nn.Module) -> None:
    """Raises for a detector that the graph does not compute."""
    head, name = getattr(model, "roi_head", None), type(model).__name__
    reasons = []
    if name not in KNOWN or head is None or not hasattr(model, "rpn_head"):
        raise ValueError(f"a {name} cannot be exported whole, only {', '.join(sorted(KNOWN))}; take --neck")
    boxes = head.bbox_head if isinstance(head.bbox_head, nn.ModuleList) else [head.bbox_head]
    for coder in (model.rpn_head.bbox_coder, *(part.bbox_coder for part in boxes)):
        if type(coder).__name__ != "DeltaXYWHBBoxCoder" or not coder.clip_border or coder.add_ctr_clamp:
            reasons.append(f"a box coder {type(coder).__name__}")
    for cfg in (model.test_cfg.rpn, model.test_cfg.rcnn):
        if cfg.nms.get("type", "nms") != "nms" or cfg.nms.get("class_agnostic"):
            reasons.append(f"suppression by {dict(cfg.nms)}")
    if not model.rpn_head.use_sigmoid_cls or model.rpn_head.prior_generator.center_offset:
        reasons.append("an RPN with a softmax or shifted anchors")
    masks = (head.mask_roi_extractor,) if head.with_mask else ()
    for extractor in (head.bbox_roi_extractor, *masks):
        for part in extractor if isinstance(extractor, nn.ModuleList) else [extractor]:
            layer = part.roi_layers[0]
            if type(part).__name__ != "SingleRoIExtractor" or type(layer).__name__ != "RoIAlign":
                reasons.append(f"RoIs by {type(part).__name__} and {type(layer).__name__}")
            elif not layer.aligned or layer.pool_mode != "avg":
                reasons.append("a RoIAlign that is not aligned, or takes maxima")
    if any(part.custom_cls_channels for part in boxes):
        reasons.append("a loss with an activation of its own")
    if reasons:
        raise ValueError(f"this {name} cannot be exported whole: it has {reasons[0]}; take --neck")

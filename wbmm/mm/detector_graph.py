"""Mask R-CNN and Cascade Mask R-CNN as one graph: a picture in; boxes, labels, scores and masks out.

The same steps as MMDetection's prediction of one picture, in operators that exporters know, with the model's weights.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from wbmm.deploy.export.boxes import roi_features, suppress
from wbmm.deploy.export.verify import Comparison

from .exportable import NeckMaps

__all__ = ["OUTPUTS", "DetectorGraph", "compare_detections", "decode_boxes"]

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

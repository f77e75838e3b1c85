"""A detector's two operators on boxes, as single nodes: suppression, and features of regions of interest.

In ONNX they are the standard's NonMaxSuppression and RoiAlign, which ONNX Runtime and OpenVINO have.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torchvision.ops import nms, roi_align

from .to_onnx import ints, operators

__all__ = ["box_translations", "roi_features", "suppress"]


@torch.library.custom_op("wbmm::suppress", mutates_args=())
def suppress(boxes: Tensor, scores: Tensor, overlap: float, above: float, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Non-maximum suppression inside each group, and of all that are left the best.

    Args:
        boxes: `[G, N, 4]`, left, top, right, bottom.
        scores: `[G, N]`.
        overlap: intersection over union beyond which the lower box goes.
        above: boxes must have a higher score.
        most: how many are kept of all groups.

    Returns:
        boxes `[K, 4]`, scores `[K]` and groups `[K]`, the best first.
    """
    kept = []
    for group in range(len(boxes)):
        candidates = (scores[group] > above).nonzero()[:, 0]
        chosen = candidates[nms(boxes[group, candidates], scores[group, candidates], overlap)[:most]]
        kept.append(torch.stack([torch.full_like(chosen, group), chosen]))
    groups, places = torch.cat(kept, 1)
    order = scores[groups, places].sort(descending=True, stable=True).indices[:most]
    groups, places = groups[order], places[order]
    return boxes[groups, places], scores[groups, places], groups


@suppress.register_fake
def _(boxes, scores, overlap, above, most):
    # At least 2, for the tracer alone: it takes 0 and 1 for cases of their own. Files run with any number.
    count = torch.library.get_ctx().new_dynamic_size(min=2, max=max(most, 2))
    return boxes.new_empty(count, 4), scores.new_empty(count), torch.empty(count, dtype=torch.int64)


@torch.library.custom_op("wbmm::roi_features", mutates_args=())
def roi_features(
    maps: Sequence[Tensor], boxes: Tensor, strides: Sequence[int], finest: int, size: int, sampling: int
) -> Tensor:
    """Features `[K, C, size, size]` of boxes, each from the map that fits the box's size.

    Args:
        maps: `[1, C, H, W]`, from fine to coarse.
        boxes: `[K, 4]` in pixels of the image.
        strides: of the maps.
        finest: boxes below twice this side take the first map, below four times the second, ...
        size: of the features.
        sampling: points in each direction of a bin; 0 for as many as there are pixels.
    """
    levels = _levels(boxes, finest, len(maps))
    out = boxes.new_zeros(len(boxes), maps[0].shape[1], size, size)
    for level, (part, stride) in enumerate(zip(maps, strides, strict=True)):
        chosen = (levels == level).nonzero()[:, 0]
        out[chosen] = roi_align(part, [boxes[chosen]], size, 1 / stride, sampling, aligned=True)
    return out


def _levels(boxes: Tensor, finest: int, count: int) -> Tensor:
    side = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt()
    return (side / finest + 1e-6).log2().floor().clamp(0, count - 1).long()


@roi_features.register_fake
def _(maps, boxes, strides, finest, size, sampling):
    return boxes.new_empty(boxes.shape[0], maps[0].shape[1], size, size)


def box_translations() -> dict[Callable, Callable]:
    """For `torch.onnx.export(custom_translation_table=...)`."""
    return {suppress._opoverload: _suppress, roi_features._opoverload: _roi_features}


def _suppress(boxes, scores, overlap, above, most):
    o = operators()
    number, limit = (o.Constant(value_float=float(value)) for value in (overlap, above))
    found = o.NonMaxSuppression(boxes, o.Unsqueeze(scores, ints(1)), ints(most), number, limit)  # group, 0, place
    places = o.Gather(found, ints(0, 2), axis=1)
    scores = o.GatherND(scores, places)
    count = o.Min(o.Shape(scores), ints(most))
    best, order = o.TopK(scores, count, axis=0)
    places = o.Gather(places, order, axis=0)
    return o.GatherND(boxes, places), best, o.Squeeze(o.Slice(places, ints(0), ints(1), ints(1)), ints(1))


def _roi_features(maps, boxes, strides, finest, size, sampling):
    o = operators()
    left, top, right, bottom = o.Split(boxes, num_outputs=4, axis=1)
    side = o.Sqrt(o.Mul(o.Sub(right, left), o.Sub(bottom, top)))
    relative = o.Add(o.Div(side, o.Constant(value_float=float(finest))), o.Constant(value_float=1e-6))
    level = o.Floor(o.Div(o.Log(relative), o.Log(o.Constant(value_float=2.0))))
    last = o.Constant(value_float=float(len(maps) - 1))
    level = o.Squeeze(o.Min(o.Max(level, o.Constant(value_float=0.0)), last), ints(1))
    parts, places = [], []
    for number, (part, stride) in enumerate(zip(maps, strides, strict=True)):
        chosen = o.Squeeze(o.NonZero(o.Equal(level, o.Constant(value_float=float(number)))), ints(0))
        rois = o.Gather(boxes, chosen, axis=0)
        batch = o.Mul(chosen, ints(0))
        parts.append(
            o.RoiAlign(
                part,
                rois,
                batch,
                coordinate_transformation_mode="half_pixel",
                output_height=int(size),
                output_width=int(size),
                sampling_ratio=int(sampling),
                spatial_scale=1 / stride,
            )
        )
        places.append(chosen)
    place = o.Concat(*places, axis=0)
    _, order = o.TopK(place, o.Shape(place), axis=0, largest=0)
    return o.Gather(o.Concat(*parts, axis=0), order, axis=0)

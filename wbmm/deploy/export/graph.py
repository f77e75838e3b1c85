"""The module that is exported: a model, perhaps with normalisation in front, with some parts as single nodes.

With single nodes tracing is several times faster, and we choose what a file computes there (`to_onnx.py`). A detector's
two operators on boxes are such nodes too: in ONNX they are the standard's NonMaxSuppression and RoiAlign, which ONNX
Runtime and OpenVINO have.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import nms, roi_align

from wbmm.io.card import ModelCard
from wbmm.layers import DenseWBMM2d, FusedFeedForward
from wbmm.layers.mixers import CompactMixer
from wbmm.ops import reference
from wbmm.ops.backends.onednn.windowed import is_convolvable, table_to_kernel, windowed_convolution
from wbmm.ops.reference import opaque_product
from wbmm.ops.tables import scales_of
from wbmm.ops.windows import crop, pad_to_windows
from wbmm.text import first_line

from .verify import Shapes

__all__ = [
    "INPUT_NAME",
    "ConvolvedMixer",
    "ExactAdaptivePool",
    "Features",
    "Graph",
    "Normalize",
    "OpaqueFeedForward",
    "OpaqueMixer",
    "capture",
    "make_opaque",
    "opaque_convolution",
    "opaque_ffn",
    "replace_pooling",
    "roi_features",
    "suppress",
]

INPUT_NAME = "images"


class Normalize(nn.Module):
    """Bytes 0..255 to normalised images: one multiplication and one addition a channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (mean, std))
        self.register_buffer("scale", (1 / (255 * std)).float())
        self.register_buffer("shift", (-mean / std).float())

    def forward(self, images: Tensor) -> Tensor:
        return images.float() * self.scale + self.shift


class Features(nn.Module):
    """The maps of every stage of a model of timm's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if not hasattr(model, "forward_intermediates"):
            raise ValueError(f"a {type(model).__name__} has no forward_intermediates, so there are no feature maps")
        self.model = model

    def forward(self, images: Tensor) -> list[Tensor]:
        return self.model.forward_intermediates(images, intermediates_only=True)


class Graph(nn.Module):
    """What an exported file computes.

    Args:
        net: from normalised images to a tensor or several.
        card: what the file will say; its `input` tells whether normalisation is inside.
        output_names: one a tensor.
    """

    def __init__(self, net: nn.Module, card: ModelCard, output_names: Sequence[str]) -> None:
        super().__init__()
        self.net = net
        self.normalize = Normalize(card.mean, card.std) if card.input == "uint8" else nn.Identity()
        self.card = card
        self.output_names = list(output_names)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs = self.net(self.normalize(images))
        return outputs if isinstance(outputs, Tensor) else tuple(outputs)


class ExactAdaptivePool(nn.Module):
    """`nn.AdaptiveAvgPool2d` for maps of any size, as two small matrix products.

    Its bins depend on the size of the map, which exporters want to be a constant. Here they are rows of a matrix that
    the graph builds from the size.
    """

    def __init__(self, output_size: tuple[int, int]) -> None:
        super().__init__()
        self.output_size = output_size

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (self._bins(side, bins, x) for side, bins in zip(x.shape[-2:], self.output_size, strict=True))
        return rows @ x @ columns.transpose(0, 1)

    @staticmethod
    def _bins(side: int, bins: int, like: Tensor) -> Tensor:
        """`[bins, side]`: bin i averages positions floor(i*side/bins) to ceil((i+1)*side/bins), the end excluded."""
        i = torch.arange(bins, device=like.device)[:, None]
        start = torch.div(i * side, bins, rounding_mode="floor")
        end = torch.div((i + 1) * side + bins - 1, bins, rounding_mode="floor")
        position = torch.arange(side, device=like.device)[None]
        inside = torch.logical_and(position >= start, position < end)
        return inside.to(like.dtype) / (end - start).to(like.dtype)


def replace_pooling(module: nn.Module) -> nn.Module:
    """Gives adaptive average pooling to more than one bin its exact form, in place."""
    for name, child in module.named_children():
        if isinstance(child, nn.AdaptiveAvgPool2d) and child.output_size not in (1, (1, 1)):
            size = child.output_size
            setattr(module, name, ExactAdaptivePool((size, size) if isinstance(size, int) else tuple(size)))
        else:
            replace_pooling(child)
    return module


@torch.library.custom_op("wbmm::ffn", mutates_args=())
def opaque_ffn(
    x: Tensor,
    gate: Tensor | None,
    shortcut: Tensor,
    w1: Tensor,
    b1: Tensor,
    gamma: Tensor,
    w2: Tensor,
    b2: Tensor,
    eps: float,
) -> Tensor:
    """`reference.gated_ffn` as one node; the result is contiguous. Without a gate, `x` has been gated already."""
    grn = partial(reference.grn, gamma=gamma, beta=None, eps=eps)
    fc1, fc2 = partial(F.linear, weight=w1, bias=b1), partial(F.linear, weight=w2, bias=b2)
    return reference.gated_ffn(x, fc1, grn, fc2, gate, shortcut=shortcut).contiguous()


@opaque_ffn.register_fake
def _(x, gate, shortcut, w1, b1, gamma, w2, b2, eps):
    return torch.empty(shortcut.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("wbmm::windowed_convolution", mutates_args=())
def opaque_convolution(x: Tensor, kernel: Tensor, window: list[int], bias: Tensor | None, padding_mode: str) -> Tensor:
    """`windowed_convolution` as one node, padded to whole windows first; the result is contiguous."""
    padded = pad_to_windows(x, tuple(window), padding_mode)
    return crop(windowed_convolution(padded, kernel, tuple(window), bias), *x.shape[-2:]).contiguous()


@opaque_convolution.register_fake
def _(x, kernel, window, bias, padding_mode):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


class OpaqueMixer(nn.Module):
    """A fused mixer as the node `wbmm::windowed_product`."""

    def __init__(self, mixer: CompactMixer | DenseWBMM2d) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        mixer = self.mixer
        return opaque_product(x, mixer.matrix(), list(mixer.window), mixer.bias, 0, mixer.padding_mode)


class OpaqueFeedForward(nn.Module):
    """A fused feed-forward part as the node `wbmm::ffn`."""

    def __init__(self, ffn: FusedFeedForward) -> None:
        super().__init__()
        self.ffn = ffn

    def forward(self, x: Tensor, gate: Tensor | None, shortcut: Tensor) -> Tensor:
        ffn = self.ffn
        fc1, fc2 = ffn.fc1, ffn.fc2
        return opaque_ffn(x, gate, shortcut, fc1.weight, fc1.bias, ffn.gamma, fc2.weight, fc2.bias, ffn.eps)


class ConvolvedMixer(nn.Module):
    """A fused mixer as nodes `wbmm::windowed_convolution`, one a table."""

    def __init__(self, mixer: CompactMixer) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        mixer = self.mixer
        tables, out, bias = mixer.tables(), None, mixer.bias
        for table, window in zip(tables, scales_of(len(tables), mixer.window), strict=True):
            part = opaque_convolution(x, table_to_kernel(table, window), list(window), bias, mixer.padding_mode)
            out, bias = part if out is None else out + part, None
        return out


def _is_convolvable(mixer: CompactMixer) -> bool:
    tables = mixer.tables()
    return tables[0].ndim == 2 and all(map(is_convolvable, scales_of(len(tables), mixer.window)))


def make_opaque(module: nn.Module, convolutions: bool = False) -> nn.Module:
    """Replaces fused mixers and feed-forward parts, in place; with `convolutions`, large windows of tables by them."""
    for name, child in module.named_children():
        if convolutions and isinstance(child, CompactMixer) and _is_convolvable(child):
            setattr(module, name, ConvolvedMixer(child))
        elif isinstance(child, CompactMixer | DenseWBMM2d):
            setattr(module, name, OpaqueMixer(child))
        elif isinstance(child, FusedFeedForward):
            setattr(module, name, OpaqueFeedForward(child))
        else:
            make_opaque(child, convolutions)
    return module


# Where in the source an operator comes from: no use in a file, and it holds this machine's paths.
_PRIVATE = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node")


@torch.no_grad()
def capture(graph: nn.Module, shapes: Shapes, card: ModelCard) -> torch.export.ExportedProgram:
    """Traces a module; if a dimension cannot be dynamic, it fails and says why."""
    dtype = torch.uint8 if card.input == "uint8" else torch.float32
    example = torch.zeros(shapes.example, dtype=dtype)
    dims = shapes.dims()
    try:
        program = torch.export.export(graph, (example,), dynamic_shapes=(dims,) if dims else None)
    except Exception as error:  # of many kinds: torch._dynamo's, torch.fx's, sympy's
        reason = first_line(error).partition(" For more information")[0]
        raise ValueError(f"{card.model} cannot be exported with {shapes.describe()}: {reason}") from error
    for node in program.graph.nodes:
        for key in _PRIVATE:
            node.meta.pop(key, None)
    program._example_inputs = None  # or the file would hold them, pickled
    return program


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

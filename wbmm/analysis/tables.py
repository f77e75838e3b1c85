"""The effective table of every WBMM layer of a model, whatever form the model is in.

The effective table holds everything that inference folds into the windowed product: the learned weights, shortcuts,
small kernels and batch norm. Training, compact and dense forms of one model give the same tables.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.layers import Block, DenseWBMM2d, FusedBlock, HierarchicalWBMM2d, MultiKernelWBMM2d, WBMM2d
from wbmm.layers.fused import FusedHierarchicalWBMM2d, FusedWBMM2d
from wbmm.ops.tables import Window, expand, num_offsets, relative_index

__all__ = ["LayerTable", "effective_tables", "map_sizes", "table_of_matrix"]

KINDS = {
    WBMM2d: "single-scale",
    FusedWBMM2d: "single-scale",
    MultiKernelWBMM2d: "multi-kernel",
    HierarchicalWBMM2d: "hierarchical",
    FusedHierarchicalWBMM2d: "hierarchical",
    DenseWBMM2d: "dense",
}
MOST_ENTRIES = 1 << 24  # of matrices that are expanded at a time


@dataclass(frozen=True)
class LayerTable:
    """One WBMM layer as the mean of its matrix over all pairs of positions with the same offset.

    Single-scale matrices are constant over such pairs. In a hierarchical one, a pair within a quarter of the window
    differs from a pair across quarters; hence the separate means of |M| and M².

    Attributes:
        name: of the module.
        stage: from 1, None outside of stages.
        kind: single-scale, hierarchical, multi-kernel (as far as the form tells) or dense.
        window: (wh, ww) that the table is over: the layer's own, or less where the map is smaller.
        own_window: the layer's.
        table: `[C, 2wh-1, 2ww-1]`, float64: mean of M at each offset (dh, dw) = input - output.
        magnitude: the same of |M|.
        energy: the same of M².
    """

    name: str
    stage: int | None
    kind: str
    window: Window
    own_window: Window
    table: Tensor
    magnitude: Tensor
    energy: Tensor


def map_sizes(size: tuple[int, int], stages: int = 4) -> list[tuple[int, int]]:
    """(height, width) of each stage's map for an image of `size`: the stem halves it twice, later stages once."""
    halve = lambda side: (side + 1) // 2  # noqa: E731
    height, width = size
    sizes = []
    for _ in range(stages):
        height, width = halve(height), halve(width)
        if not sizes:
            height, width = halve(height), halve(width)
        sizes.append((height, width))
    return sizes


@torch.no_grad()
def effective_tables(model: nn.Module, size: tuple[int, int] | None = None) -> Iterator[LayerTable]:
    """The table of each WBMM layer, in the model's order.

    Args:
        model: anything that contains WBMM layers, in any form.
        size: (height, width) of the images. A table is cut to the offsets that its stage's map has: weights further out
            multiply padding alone, and were never trained. None keeps every offset.
    """
    sizes = map_sizes(size) if size else []
    for name, mixer, norm in _find_mixers(model):
        found = re.search(r"(?:^|\.)stages\.(\d+)\.", f"{name}.")
        stage = int(found[1]) + 1 if found else None
        limit = sizes[stage - 1] if stage and stage <= len(sizes) else mixer.window
        window = (min(mixer.window[0], limit[0]), min(mixer.window[1], limit[1]))
        fused = mixer.fuse(norm) if hasattr(mixer, "fuse") else mixer
        tables = [table.detach().double().cpu() for table in fused.tables()]
        yield LayerTable(name, stage, _kind(mixer), window, mixer.window, *_means(tables, mixer.window, window))


def _find_mixers(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.BatchNorm2d | None]]:
    """(name, layer, batch norm that follows it in its block) of every WBMM layer."""
    norms = {}
    for module in model.modules():
        if isinstance(module, Block | FusedBlock):
            norms[module.mixer] = getattr(module, "norm", None)
    for name, module in model.named_modules():
        if isinstance(module, tuple(KINDS)):
            yield name, module, norms.get(module)


def _kind(mixer: nn.Module) -> str:
    return next(kind for layer, kind in KINDS.items() if isinstance(mixer, layer))


def _means(tables: Sequence[Tensor], own: Window, window: Window) -> tuple[Tensor, Tensor, Tensor]:
    """The means of M, |M| and M² over the pairs of each offset, for positions in the first `window` of a window."""
    if len(tables) == 1 and tables[0].ndim == 2:
        grid = tables[0].view(-1, 2 * own[0] - 1, 2 * own[1] - 1)
        cut_h, cut_w = own[0] - window[0], own[1] - window[1]
        grid = grid[:, cut_h : grid.shape[1] - cut_h, cut_w : grid.shape[2] - cut_w]
        return grid, grid.abs(), grid.square()
    positions = torch.arange(own[0] * own[1]).view(own)[: window[0], : window[1]].reshape(-1)
    step = max(1, MOST_ENTRIES // (own[0] * own[1]) ** 2)
    parts = []
    for start in range(0, tables[0].shape[0], step):
        matrix = expand([table[start : start + step] for table in tables], own)
        matrix = matrix[:, positions][:, :, positions]
        parts.append([table_of_matrix(values, window) for values in (matrix, matrix.abs(), matrix.square())])
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def table_of_matrix(matrix: Tensor, window: Window) -> Tensor:
    """`[C, d, d]` to `[C, 2wh-1, 2ww-1]`: the mean over the pairs of each offset."""
    index = relative_index(window, matrix.device).reshape(-1)
    sums = matrix.new_zeros(matrix.shape[0], num_offsets(window)).index_add_(1, index, matrix.flatten(1))
    pairs = torch.bincount(index, minlength=num_offsets(window))
    return (sums / pairs).view(-1, 2 * window[0] - 1, 2 * window[1] - 1)

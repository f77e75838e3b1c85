"""The effective table of every WBMM layer of a model, whatever form the model is in, and statistics of tables.

The effective table holds everything that inference folds into the windowed product: the learned weights, shortcuts,
small kernels and batch norm. Training, compact and dense forms of one model give the same tables.

The statistics are per channel, of tables `[C, 2wh-1, 2ww-1]` over offsets (dh, dw) = input - output; dh grows
downwards, dw to the right. None changes when a channel is multiplied by a number other than zero. docs/analysis.md
defines them in words.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.layers import Block, DenseWBMM2d, FusedBlock, HierarchicalWBMM2d, MultiKernelWBMM2d, WBMM2d
from wbmm.layers.mixers import FusedHierarchicalWBMM2d, FusedWBMM2d
from wbmm.ops.tables import Window, expand, num_offsets, relative_index

__all__ = [
    "BOUND",
    "CLASSES",
    "ISOTROPIC_BELOW",
    "ORIENTATIONS",
    "LayerTable",
    "Orientation",
    "diagonal_ratio",
    "direction",
    "distances",
    "effective_tables",
    "energy_within",
    "flat_ratio",
    "frequency_class",
    "lost_between",
    "low_frequency_ratio",
    "map_sizes",
    "orientation",
    "pair_counts",
    "profile",
    "spectrum",
    "table_of_matrix",
    "without_centre",
]

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


GRID = 64  # samples of the spectrum in each direction, for tables up to half as wide
LOW = 0.25  # cycles a position: half of the highest frequency, 0.5
BOUND = 2.0  # low-pass: mean power below LOW at least so many times that above it; high-pass: at most 1 / BOUND
CLASSES = ("low-pass", "broad", "high-pass")
ORIENTATIONS = ("horizontal", "diagonal /", "vertical", "diagonal \\", "isotropic")
ISOTROPIC_BELOW = 0.3  # coherence


def distances(window: Window) -> Tensor:
    """Euclidean length of each offset, `[2wh-1, 2ww-1]`."""
    dh = torch.arange(1 - window[0], window[0], dtype=torch.float64)
    dw = torch.arange(1 - window[1], window[1], dtype=torch.float64)
    return torch.hypot(dh[:, None], dw[None])


def pair_counts(window: Window) -> Tensor:
    """How many pairs of positions of a window have each offset, `[2wh-1, 2ww-1]`."""
    dh = window[0] - torch.arange(1 - window[0], window[0], dtype=torch.float64).abs()
    dw = window[1] - torch.arange(1 - window[1], window[1], dtype=torch.float64).abs()
    return dh[:, None] * dw[None]


def without_centre(table: Tensor) -> Tensor:
    """The table with 0 at the zero offset: what does not depend on shortcuts."""
    surround = table.clone()
    surround[:, table.shape[1] // 2, table.shape[2] // 2] = 0
    return surround


def diagonal_ratio(magnitude: Tensor, window: Window) -> Tensor:
    """`[C]`: |M| on the diagonal over its mean off the diagonal; infinite where there is nothing off it."""
    off = pair_counts(window) * (distances(window) > 0)
    centre = magnitude[:, window[0] - 1, window[1] - 1]
    return centre / ((magnitude * off).sum((1, 2)) / off.sum())


def profile(magnitude: Tensor, window: Window) -> Tensor:
    """`[C, R]`: mean |M| over pairs at distance 0, 1, 2, ... (rounded), each channel divided by its sum."""
    counts, rounded = pair_counts(window), distances(window).round().long()
    weights = torch.zeros(int(rounded.max()) + 1, rounded.numel(), dtype=torch.float64)
    weights[rounded.reshape(-1), torch.arange(rounded.numel())] = counts.reshape(-1)
    means = magnitude.flatten(1) @ (weights / weights.sum(1, keepdim=True)).T
    return means / means.sum(1, keepdim=True)


def lost_between(profiles: Tensor, near: int, far: int) -> float:
    """Which share of the mean |M| at distance `near` is lost at distance `far`; of the channels' mean profile."""
    mean = profiles.nanmean(0)
    return float(1 - mean[far] / mean[near]) if far < len(mean) and mean[near] > 0 else math.nan


def energy_within(energy: Tensor, window: Window, distance: float = 2) -> tuple[Tensor, float]:
    """`[C]`: share of the off-diagonal energy of M within a distance; and the share of the pairs that are there."""
    off = pair_counts(window) * (distances(window) > 0)
    near = off * (distances(window) <= distance)
    return (energy * near).sum((1, 2)) / (energy * off).sum((1, 2)), float(near.sum() / off.sum())


def spectrum(table: Tensor) -> Tensor:
    """`[C, N, N]`: power of the table's discrete Fourier transform, zero-padded, frequency 0 at [N/2, N/2]."""
    size = max(GRID, 2 ** math.ceil(math.log2(2 * max(table.shape[1:]))))
    return torch.fft.fftshift(torch.fft.fft2(table.double(), s=(size, size)).abs().square(), dim=(1, 2))


def _frequencies(size: int) -> tuple[Tensor, Tensor]:
    """Vertical and horizontal frequency of each entry of a spectrum, in cycles a position."""
    axis = torch.fft.fftshift(torch.fft.fftfreq(size, dtype=torch.float64))
    return axis[:, None].expand(size, size), axis[None].expand(size, size)


def _low(size: int) -> Tensor:
    return torch.hypot(*_frequencies(size)) <= LOW


def low_frequency_ratio(power: Tensor) -> Tensor:
    """`[C]`: share of the power at frequencies up to `LOW`."""
    return (power * _low(power.shape[-1])).sum((1, 2)) / power.sum((1, 2))


def flat_ratio(size: int = GRID) -> float:
    """The low-frequency ratio of a flat spectrum, as of the identity and, in the mean, of white noise."""
    return float(_low(size).double().mean())


def frequency_class(ratio: Tensor, size: int = GRID) -> Tensor:
    """`[C]`: index into `CLASSES`, by the mean power below `LOW` over that above it."""
    flat = flat_ratio(size)
    gain = (ratio / flat) / ((1 - ratio) / (1 - flat))
    return torch.where(gain >= BOUND, 0, torch.where(gain <= 1 / BOUND, 2, 1))


@dataclass(frozen=True)
class Orientation:
    """The direction of the lines that each channel answers to.

    Attributes:
        coherence: `[C]`, from 0 (all directions alike) to 1 (one direction).
        angle: `[C]`, of the lines in degrees from 0 to 180: 0 is horizontal, 45 rises to the right.
        label: `[C]`, index into `ORIENTATIONS`.
    """

    coherence: Tensor
    angle: Tensor
    label: Tensor


def orientation(power: Tensor) -> Orientation:
    """From a spectrum: the mean of exp(2i * direction of the frequency), weighted with the power.

    Frequencies up to 0.5 in every direction count, 0 does not. Lines are perpendicular to their frequency.
    """
    vertical, horizontal = _frequencies(power.shape[-1])
    radius = torch.hypot(vertical, horizontal)
    weight = power * ((radius > 0) & (radius <= 0.5))
    towards = torch.atan2(-vertical, horizontal)  # rows grow downwards, angles upwards
    total = weight.sum((1, 2))
    even, odd = ((weight * f(2 * towards)).sum((1, 2)) / total for f in (torch.cos, torch.sin))
    coherence = torch.hypot(even, odd)
    angle = (torch.rad2deg(torch.atan2(odd, even)) / 2 + 90) % 180
    return Orientation(coherence, angle, torch.where(coherence < ISOTROPIC_BELOW, 4, direction(angle)))


def direction(angle: Tensor) -> Tensor:
    """The nearest of the four directions, an index into `ORIENTATIONS`."""
    return ((angle + 22.5) // 45).long() % 4

"""Statistics of tables, each per channel. docs/analysis.md defines them in words.

Tables are `[C, 2wh-1, 2ww-1]` over offsets (dh, dw) = input - output; dh grows downwards, dw to the right. No statistic
changes when a channel is multiplied by a number other than zero.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wbmm.ops.tables import Window

__all__ = [
    "BOUND",
    "CLASSES",
    "ISOTROPIC_BELOW",
    "ORIENTATIONS",
    "Orientation",
    "diagonal_ratio",
    "direction",
    "distances",
    "energy_within",
    "flat_ratio",
    "frequency_class",
    "lost_between",
    "low_frequency_ratio",
    "orientation",
    "pair_counts",
    "profile",
    "spectrum",
    "without_centre",
]

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

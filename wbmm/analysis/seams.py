"""Do windows leave seams? Jumps and energy at window borders against the inside of windows, block by block."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.models.wbmm import WBMM

__all__ = ["Seam", "SeamMeter", "measure_seams", "summarise_seams"]

EDGE = 2  # outermost rows and columns of a map, left out: the picture's own edge is padded in every model
POINTS = {
    "W mixer": "after the windowed product",
    "W block": "after its block: before the D block",
    "D mixer": "after the D block's convolution",
    "D block": "after the D block",
}


@dataclass(frozen=True)
class Seam:
    """What windows did to a map.

    Attributes:
        jump: mean squared difference between neighbours on either side of a window border, over that between other
            neighbours; 1 without seams.
        phases: the same for every place in a window: `phases[p]` is for neighbours with p rows (columns) of the window
            before the second one, so `phases[0]` is `jump`. The others say how much pictures alone vary.
        level: mean square of the map beside window borders over that elsewhere; 1 without a trace of windows.
    """

    jump: float
    phases: list[float]
    level: float

    @property
    def visible(self) -> bool:
        """Whether the jump at window borders is larger than at any other place of the window."""
        return self.jump > max(self.phases[1:])


class SeamMeter:
    """Sums over maps `[B, C, H, W]` of one size: `add` each, then `seam(window)`.

    Each channel counts alike: it is divided by its own mean, so that no scale of a channel matters.
    """

    def __init__(self) -> None:
        self.count = 0

    def add(self, x: Tensor) -> None:
        x = x.detach().double().cpu()
        parts = (x.diff(dim=2).square().sum(0), x.diff(dim=3).square().sum(0), x.sum(0), x.square().sum(0))
        if not self.count:
            self.down, self.across, self.sums, self.squares = parts
        else:
            for total, part in zip((self.down, self.across, self.sums, self.squares), parts, strict=True):
                total += part
        self.count += len(x)

    def seam(self, window: tuple[int, int]) -> Seam | None:
        """None where the map has no window border inside, or nothing varies."""
        sides = [(self.down, 1, window[0]), (self.across, 2, window[1])]
        wide = [(jumps, dim, side) for jumps, dim, side in sides if jumps.shape[dim] >= side + EDGE and side > 1]
        phases = [_phases(*part) for part in wide]
        if not phases:
            return None
        longest = max(map(len, phases))
        rows = torch.full((len(phases), longest), math.nan, dtype=torch.float64)
        for row, values in zip(rows, phases, strict=True):
            row[: len(values)] = values
        relative = [_against_others(rows, place) for place in range(longest)]
        return Seam(relative[0], relative, self._level(window))

    def _level(self, window: tuple[int, int]) -> float:
        mean = self.sums.mean((1, 2), keepdim=True) / self.count
        energy = self.squares / self.count - 2 * mean * self.sums / self.count + mean.square()
        beside = torch.zeros(energy.shape[1:], dtype=torch.bool)
        for border in range(window[0], energy.shape[1], window[0]):
            beside[border - 1 : border + 1] = True
        for border in range(window[1], energy.shape[2], window[1]):
            beside[:, border - 1 : border + 1] = True
        inner = torch.zeros_like(beside)
        inner[EDGE:-EDGE, EDGE:-EDGE] = True
        energy = energy / energy.mean((1, 2), keepdim=True)
        near, far = energy[:, beside & inner], energy[:, ~beside & inner]
        return float(near.nanmean() / far.nanmean()) if near.numel() and far.numel() else math.nan


def _phases(jumps: Tensor, dim: int, side: int) -> Tensor:
    """Mean squared jump at each place of a window, `[side]`, NaN for places that the map does not have."""
    per_line = jumps.mean(3 - dim)[:, EDGE:-EDGE]
    per_line = per_line / per_line.mean(1, keepdim=True)
    line = per_line[per_line.isfinite().all(1)].mean(0)
    place = (torch.arange(len(line)) + EDGE + 1) % side
    return torch.stack([line[place == p].mean() for p in range(side)])


def _against_others(rows: Tensor, place: int) -> float:
    others = torch.cat([rows[:, :place], rows[:, place + 1 :]], 1)
    return float((rows[:, place] / others.nanmean(1)).nanmean())


@dataclass
class _Point:
    stage: int
    block: int
    letter: str
    where: str
    meter: SeamMeter = field(default_factory=SeamMeter)


@contextmanager
def _watched(net: WBMM) -> Iterator[list[_Point]]:
    """The meters at every mixer and block of a net, which fill while it runs."""
    points, handles = [], []
    for i, stage in enumerate(net.stages):
        for j, (letter, block) in enumerate(zip(net.patterns[i], stage.blocks, strict=True)):
            for where, module in (("mixer", block.mixer), ("block", block)):
                points.append(_Point(i + 1, j, letter, where))
                handles.append(module.register_forward_hook(_adder(points[-1].meter)))
    try:
        yield points
    finally:
        for handle in handles:
            handle.remove()


def _adder(meter: SeamMeter):
    return lambda module, inputs, output: meter.add(output)


@torch.no_grad()
def measure_seams(net: nn.Module, images: Tensor, batch: int = 8, advance=lambda count: None) -> list[dict]:
    """Seams at the mixer and the output of every block, in order.

    Args:
        net: a WBMM, in any form; its grid of windows is taken for nets with another operator in W blocks too.
        images: `[N, C, H, W]`, as the net takes them.
        batch: images at a time.
        advance: called with the number of images that are done.
    """
    device = next(net.parameters()).device
    with _watched(net) as points:
        for part in images.split(batch):
            net(part.to(device))
            advance(len(part))
    found = []
    for point in points:
        window = net.windows[point.stage - 1]
        seam = point.meter.seam(window.size) if window else None
        place = {"stage": point.stage, "block": point.block, "letter": point.letter, "where": point.where}
        values = {"jump": None, "level": None, "phases": None, "visible": None}
        if seam:
            values = {"jump": seam.jump, "level": seam.level, "phases": seam.phases, "visible": seam.visible}
        found.append({**place, "window": str(window), "map": list(point.meter.sums.shape[1:]), **values})
    return found


def summarise_seams(found: list[dict]) -> dict[int, dict[str, dict]]:
    """Stage -> point (`W mixer`, `W block`, `D mixer`, `D block`) -> means over the stage's blocks.

    Only D blocks after a W block count. Stages without a border inside their map, or without W blocks, are left out.
    """
    stages: dict[int, dict[str, dict]] = {}
    for stage in sorted({item["stage"] for item in found}):
        items = [item for item in found if item["stage"] == stage and item["jump"] is not None]
        windowed = [item["block"] for item in items if item["letter"] in "WM"]
        points: dict[str, list[dict]] = {}
        for item in items:
            if windowed and item["block"] >= min(windowed):
                points.setdefault(f"{'D' if item['letter'] == 'D' else 'W'} {item['where']}", []).append(item)
        if points:
            stages[stage] = {name: _mean(points[name]) for name in POINTS if name in points}
    return stages


def _mean(items: list[dict]) -> dict:
    phases = torch.tensor([item["phases"] for item in items], dtype=torch.float64).mean(0).tolist()
    return {
        "blocks": len(items),
        "jump": sum(item["jump"] for item in items) / len(items),
        "level": sum(item["level"] for item in items) / len(items),
        "others": [min(phases[1:]), max(phases[1:])],
        "phases": phases,
        "visible": sum(item["visible"] for item in items),
    }

"""`wbmm analyze features`: the map of each stage as a picture, and whether windows leave seams in it.

A seam is a jump, or energy, at window borders, measured against the inside of windows, block by block.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from wbmm.io.card import ModelCard
from wbmm.models.wbmm import WBMM
from wbmm.progress import progress_bar
from wbmm.text import render_table

from .effective_tables import map_sizes
from .opening import add_model_arguments, find_pictures, open_subject, spread, with_size
from .output import COLUMN, PALETTE, Output, add_output_arguments, drawing

__all__ = [
    "EXAMPLE",
    "Seam",
    "SeamMeter",
    "add_arguments",
    "measure_seams",
    "run",
    "stage_maps",
    "summarise_seams",
    "to_rgb",
]

EXAMPLE = "wbmm analyze features wbmm_a.tiny50 photos/ --size 224 --out analysis"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="MODEL", help="a checkpoint in any form, a run's folder, or a model's name")
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE_OR_FOLDER", help="folders are searched through")
    parser.add_argument("--size", type=int, metavar="PX", help="of the images (default: the model's)")
    parser.add_argument("--most", type=int, default=64, metavar="N", help="images to measure on (default: 64)")
    parser.add_argument("--shown", type=int, default=3, metavar="N", help="images whose maps are drawn (default: 3)")
    parser.add_argument("--batch", type=int, default=8)
    add_model_arguments(parser)
    add_output_arguments(parser)


@torch.no_grad()
def stage_maps(net: nn.Module, images: Tensor) -> list[Tensor]:
    """The map of each stage, `[B, C, H, W]` on the CPU, of any model of timm's that has stages or blocks."""
    device = next(net.parameters()).device
    if not hasattr(net, "forward_intermediates"):
        raise ValueError(f"a {type(net).__name__} gives no intermediate maps (no forward_intermediates)")
    maps = net.forward_intermediates(images.to(device), intermediates_only=True, output_fmt="NCHW")
    if len(maps) > 4:  # one a block: as many as others have stages
        maps = [maps[round((i + 1) * len(maps) / 4) - 1] for i in range(4)]
    return [values.float().cpu() for values in maps]


def to_rgb(values: Tensor) -> np.ndarray:
    """A map `[C, H, W]` to a picture `[H, W, 3]` in 0..1: its three principal components as red, green and blue.

    Each component is stretched from its 1st to its 99th percentile, and its sign is such that its largest entry is
    positive.
    """
    channels, height, width = values.shape
    rows = values.double().reshape(channels, -1).T
    rows = rows - rows.mean(0)
    _, _, axes = torch.linalg.svd(rows, full_matrices=False)
    scores = torch.zeros(height * width, 3, dtype=torch.float64)
    count = min(3, len(axes))
    scores[:, :count] = rows @ axes[:count].T
    largest = scores.gather(0, scores.abs().argmax(0, keepdim=True))
    scores = scores * torch.where(largest < 0, -1.0, 1.0)
    low, high = (scores.quantile(q, dim=0) for q in (0.01, 0.99))
    spread = (high - low).clamp_min(1e-12)
    return ((scores - low) / spread).clamp(0, 1).reshape(height, width, 3).numpy()


def run(args: argparse.Namespace) -> int:
    for name in ("most", "shown", "batch"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: give 1 or more")
    pictures = find_pictures(args.images, args.most)
    subject = open_subject(args.file, args.device, args.model, args.ema, args.random_weights)
    card = with_size(subject.card, args.size)
    output = Output(args, "features")
    images = pictures.prepared(card)
    windows = _windows(subject.net)
    shown = spread(len(images), args.shown)
    names = [pictures.names[i] for i in shown]
    maps = _draw_maps(output, subject.net, images[shown], names, card, windows)
    facts = {"model": subject.label, "card": card.describe(), "images": len(images), "size": list(images.shape[2:])}
    what = f"{card.describe()}; {len(images)} {pictures.what}"
    lines = [f"# Feature maps of {subject.label}", f"{what}.", f"![maps]({maps})"]
    lines.append("Each map's three principal components as red, green and blue. Ticks mark the borders of windows.")
    print(f"{subject.label}: {what}\n")
    if isinstance(subject.net, WBMM):
        with progress_bar(2 * len(images), "images") as advance:
            found = measure_seams(subject.net, images, args.batch, advance)
            untrained = measure_seams(subject.untrained().to(args.device), images, args.batch, advance)
        stages, before = summarise_seams(found), summarise_seams(untrained)
        facts |= {"stages": stages, "untrained": before, "points": found}
        lines += _seam_lines(output, stages, before, images.shape[2])
        lines += _never_saw_borders(subject.card, windows)
    output.finish(facts, "\n\n".join(lines), args.device)
    return 0


def _windows(net: nn.Module) -> list[tuple[int, int] | None]:
    """The window of each stage that has windows; empty for other nets."""
    if not isinstance(net, WBMM):
        return []
    return [
        window.size if window and set(pattern) & set("WM") else None
        for pattern, window in zip(net.patterns, net.windows, strict=True)
    ]


def _draw_maps(output: Output, net: nn.Module, images: Tensor, names: Sequence[str], card, windows: Sequence) -> str:
    maps = stage_maps(net, images)
    std, mean = (torch.tensor(values).view(-1, 1, 1) for values in (card.std, card.mean))
    with drawing(1.32 * len(images) + 0.25, "the figure of the maps", 2 * COLUMN) as figure:
        axes = figure.subplots(len(images), 1 + len(maps), squeeze=False)
        for row, line in enumerate(axes):
            shown = (images[row] * std + mean).clamp(0, 1).permute(1, 2, 0)
            line[0].imshow(shown.squeeze(-1), cmap="gray", interpolation="lanczos")
            line[0].set_ylabel(names[row][:18])
            for i, axis in enumerate(line[1:]):
                axis.imshow(to_rgb(maps[i][row]), interpolation="nearest")
            for i, axis in enumerate(line):
                axis.set_xticks([])
                axis.set_yticks([])
                axis.spines[:].set_visible(False)
                if i and i <= len(windows) and windows[i - 1]:
                    _mark_borders(axis, maps[i - 1].shape[2:], windows[i - 1])
        for i, axis in enumerate(axes[0]):
            size = "x".join(map(str, maps[i - 1].shape[2:])) if i else "x".join(map(str, images.shape[2:]))
            axis.set_title(f"stage {i}, {size}" if i else f"image, {size}")
        return output.figure(figure)


def _mark_borders(axis, size: tuple[int, int], window: tuple[int, int]) -> None:
    axis.set_yticks([border - 0.5 for border in range(window[0], size[0], window[0])], [])
    axis.set_xticks([border - 0.5 for border in range(window[1], size[1], window[1])], [])


HEADERS = ("stage", "window", "where", "blocks", "jump", "elsewhere in the window", "visible in", "level")


def _never_saw_borders(card: ModelCard, windows: Sequence) -> list[str]:
    """A line for models whose own image size leaves no border inside any map: they were trained without one."""
    size = card.input_size[1:]
    for (height, width), window in zip(map_sizes(size), windows, strict=True):
        if window and (height > window[0] or width > window[1]):
            return []
    text = (
        f"The model's own images are {size[0]}x{size[1]} px, where no map is larger than a window: unless trained on "
        "larger ones, it never saw a border, nor what the outer weights of its tables do."
    )
    print(f"\n{text}")
    return [text]


def _seam_rows(stages: dict[int, dict[str, dict]]) -> list[tuple]:
    return [
        (
            *(f"stage {stage}", len(values["phases"]), name, values["blocks"], f"{values['jump']:.3f}"),
            f"{values['others'][0]:.3f} to {values['others'][1]:.3f}",
            f"{values['visible']} of {values['blocks']}",
            "-" if math.isnan(values["level"]) else f"{values['level']:.3f}",
        )
        for stage, points in stages.items()
        for name, values in points.items()
    ]


def _seam_lines(output: Output, stages: dict, before: dict, side: int) -> list[str]:
    if not stages:
        text = f"At {side} px no map with windows is larger than one: nothing to measure; try a larger --size."
        print(text)
        return ["## Seams", text]
    print(render_table(HEADERS, _seam_rows(stages)))
    print(f"\nuntrained twin:\n{render_table(HEADERS, _seam_rows(before))}")
    picture = _draw_seams(output, stages)
    points = "; ".join(f"{name}: {what}" for name, what in POINTS.items())
    return [
        "## Do windows leave seams?",
        "Jump is the mean squared difference of neighbours across a window border over that of other neighbours: 1 "
        "without seams. It is visible in a block if it is larger than at every other place of the window. Level is the "
        f"mean square beside borders over that elsewhere. {points}.",
        f"![jumps at each place of a window]({picture})",
        render_table(HEADERS, _seam_rows(stages), markdown=True),
        "The same model before training:",
        render_table(HEADERS, _seam_rows(before), markdown=True),
    ]


def _draw_seams(output: Output, stages: dict[int, dict[str, dict]]) -> str:
    with drawing(1.7 * len(stages) + 0.2, "the figure of seams") as figure:
        axes = figure.subplots(len(stages), 1, squeeze=False)[:, 0]
        styles = zip(POINTS, PALETTE, ("o", "s", "^", "D"), ("-", "-", ":", "-"), strict=False)
        for name, colour, marker, line in styles:
            for axis, points in zip(axes, stages.values(), strict=True):
                if name in points:
                    phases = points[name]["phases"]
                    axis.plot(phases, color=colour, marker=marker, markersize=3, linestyle=line, label=name)
        for axis, stage in zip(axes, stages, strict=True):
            axis.axhline(1, color="#767676", linewidth=0.6, linestyle="--")
            axis.set_title(f"stage {stage}: squared jump to the neighbour before", loc="left")
            axis.set_ylabel("relative to elsewhere")
            axis.set_xlabel("row or column of the window (0: across its border)")
            axis.legend()
        return output.figure(figure, "seams")


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

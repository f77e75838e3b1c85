"""Figures of learned tables: the paper's three panels in one column, and a gallery of every stage."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from . import statistics as st
from .output import COLUMN, PALETTE, Output, drawing

if TYPE_CHECKING:
    from .weights import LayerStatistics

__all__ = ["draw_gallery", "draw_panels"]

SIGNED, POWER = "PuOr_r", "cividis"  # colour maps that colour-blind people can read
LEAST = 1e-4  # of the profile's axis
LARGE = 4  # positions a side of a map whose tables are shown as examples
GAP = 1  # pixels between tables of a gallery


def draw_panels(output: Output, stages: Mapping[str, Sequence["LayerStatistics"]], found: dict, control: dict) -> str:
    """Locality, channel specialisation and frequency selectivity, the paper's panels; the name of the PNG."""
    with drawing(6.4, "the figure of the tables") as figure:
        panels = figure.subfigures(5, 1, height_ratios=(1.75, 1.1, 0.55 + 0.17 * len(found), 1.4, 1.1))
        _draw_locality(panels[0].subplots(), found, control)
        _draw_examples(panels[1], stages)
        _draw_orientations(panels[2].subplots(), found)
        _draw_ratios(panels[3].subplots(), stages)
        _draw_spectra(panels[4], stages)
        return output.figure(figure)


def _draw_locality(axis: Any, found: dict, control: dict) -> None:
    for (name, summary), colour in zip(found.items(), PALETTE, strict=False):
        distance = range(len(summary["profile"]))
        before = control.get(name, summary)
        axis.plot(distance, np.clip(summary["profile"], LEAST, None), color=colour, marker="o", markersize=2.5)
        axis.plot(distance, np.clip(before["profile"], LEAST, None), color=colour, linestyle=":", linewidth=0.9)
        label = f"{name}: ratio {summary['ratio']:.0f}x, untrained {before['ratio']:.0f}x"
        axis.plot([], [], color=colour, label=label)
    axis.set_yscale("log")
    axis.set_xlabel("distance between input and output position")
    axis.set_ylabel("mean |M|, centre = 1")
    axis.set_title("(a) locality (dotted: before training)", loc="left")
    axis.legend(loc="upper right")


def _draw_examples(panel: Any, stages: Mapping[str, Sequence["LayerStatistics"]]) -> None:
    """The most coherent channel of each direction, oriented enough to count or not."""
    layers = _large_tables(stages)
    panel.suptitle("(b) channel specialisation: most coherent tables", x=0.02, ha="left", fontsize=7.5)
    for column, (axis, name) in enumerate(zip(panel.subplots(1, 4), st.ORIENTATIONS[:4], strict=True)):
        axis.set_xticks([])
        axis.set_yticks([])
        coherence, layer, channel = _most_coherent(layers, column)
        if layer is not None:
            table = st.without_centre(layer.layer.table)[channel]
            limit = float(table.abs().max())
            axis.imshow(table, cmap=SIGNED, vmin=-limit, vmax=limit, interpolation="nearest")
        axis.set_title(f"{name}\n{coherence:.2f}", fontsize=6.5)
        axis.set_box_aspect(1)
        axis.spines[:].set_visible(layer is None)


def _large_tables(stages: Mapping[str, Sequence["LayerStatistics"]]) -> list["LayerStatistics"]:
    """Examples come from these, if there are any: any weights look like an edge detector on a map of 2x2."""
    layers = [layer for part in stages.values() for layer in part]
    return [layer for layer in layers if min(layer.layer.window) >= LARGE] or layers


def _most_coherent(layers: Sequence["LayerStatistics"], direction: int) -> tuple[float, "LayerStatistics | None", int]:
    """(coherence, layer, channel) of the channel with the most pronounced lines in one of the four directions."""
    best: tuple[float, LayerStatistics | None, int] = (0.0, None, 0)
    for layer in layers:
        chosen = st.direction(layer.orientation.angle) == direction
        coherence = layer.orientation.coherence.where(chosen, 0).nan_to_num(0)
        channel = int(coherence.argmax())
        if coherence[channel] > best[0]:
            best = float(coherence[channel]), layer, channel
    return best


def _draw_orientations(axis: Any, found: dict) -> None:
    colours = (*PALETTE[:4], "#CCCCCC")
    left = np.zeros(len(found))
    for name, colour in zip(st.ORIENTATIONS, colours, strict=True):
        share = np.array([100 * summary["orientations"][name] for summary in found.values()])
        axis.barh(range(len(found)), share, left=left, color=colour, height=0.7, label=name)
        left += share
    axis.set_yticks(range(len(found)), found)
    axis.invert_yaxis()
    axis.set_xlim(0, 100)
    axis.set_xlabel("channels, %", labelpad=1)
    axis.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=5, handlelength=0.8, columnspacing=0.8)


def _draw_ratios(axis: Any, stages: Mapping[str, Sequence["LayerStatistics"]]) -> None:
    bins = np.linspace(0, 100, 26)
    for (name, part), colour in zip(stages.items(), PALETTE, strict=False):
        values = 100 * torch.cat([layer.low for layer in part]).numpy()
        weights = np.full(len(values), 100 / len(values))
        axis.hist(values, bins, weights=weights, histtype="step", color=colour, label=name)
    axis.axvline(100 * st.flat_ratio(), color="#767676", linestyle="--", linewidth=0.8)
    axis.set_xlabel("low-frequency ratio, %")
    axis.set_ylabel("channels, %")
    axis.set_title("(c) frequency selectivity (dashed: a flat spectrum)", loc="left")
    axis.legend(loc="upper right")


def _draw_spectra(panel: Any, stages: Mapping[str, Sequence["LayerStatistics"]]) -> None:
    """Table and amplitude spectrum of the channels with the lowest and the highest low-frequency ratio."""
    layers = _large_tables(stages)
    axes = panel.subplots(1, 4)
    for (name, sign), (left, axis) in zip((("lowest", -1), ("highest", 1)), (axes[:2], axes[2:]), strict=True):
        layer, channel = _extreme(layers, sign)
        power = st.spectrum(layer.layer.table)[channel]
        table = st.without_centre(layer.layer.table)[channel]
        limit = float(table.abs().max())
        left.imshow(table, cmap=SIGNED, vmin=-limit, vmax=limit, interpolation="nearest")
        left.set_title(f"{name} ratio", fontsize=6.5)
        left.set_xticks([])
        left.set_yticks([])
        left.spines[:].set_visible(False)
        axis.imshow(power.sqrt(), cmap=POWER, extent=(-0.5, 0.5, 0.5, -0.5), interpolation="bilinear")
        axis.set_title(f"{100 * float(layer.low[channel]):.0f} %", fontsize=6.5)
        axis.set_xticks([-0.5, 0, 0.5], ["-½", "0", "½"])
        axis.set_yticks([])


def _extreme(layers: Sequence["LayerStatistics"], sign: int) -> tuple["LayerStatistics", int]:
    _, number, channel = max(
        (sign * float(layer.low[channel]), number, channel)
        for number, layer in enumerate(layers)
        for channel in range(len(layer.low))
        if not torch.isnan(layer.low[channel])
    )
    return layers[number], channel


def draw_gallery(output: Output, name: str, layers: Sequence["LayerStatistics"], most: int) -> tuple[str, str]:
    """Tables of each layer of a stage, its channels spread over the low-frequency ratio; (stage, name of the PNG)."""
    columns = 16
    sheets = [_sheet(layer, most, columns) for layer in layers]
    heights = [sheet.shape[0] / sheet.shape[1] for sheet in sheets]
    width = 2 * COLUMN
    with drawing(width * sum(heights) + 0.25 * len(sheets) + 0.1, "the gallery of tables", width) as figure:
        axes = figure.subplots(len(sheets), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axis, sheet, layer in zip(axes, sheets, layers, strict=True):
            axis.imshow(sheet, cmap=SIGNED, vmin=-1, vmax=1, interpolation="nearest")
            shown = min(most, len(layer.ratio))
            window = "x".join(map(str, layer.layer.window))
            axis.set_title(f"{layer.layer.name}, {window}: {shown} of {len(layer.ratio)} channels", loc="left")
            axis.set_axis_off()
        return name, output.figure(figure, name.replace(" ", ""))


def _sheet(layer: "LayerStatistics", most: int, columns: int) -> np.ndarray:
    """Tables without centre beside each other, each divided by its largest weight; between them NaN, drawn white."""
    tables = st.without_centre(layer.layer.table)
    order = layer.low.argsort(descending=True)
    chosen = order[torch.linspace(0, len(order) - 1, min(most, len(order))).round().long()]
    cells = [_pad(tables[channel] / tables[channel].abs().max().clamp_min(1e-30)) for channel in chosen]
    blank = torch.full_like(cells[0], torch.nan)
    cells += [blank] * (-len(cells) % columns)
    rows = [torch.cat(cells[start : start + columns], 1) for start in range(0, len(cells), columns)]
    return torch.cat(rows).numpy()


def _pad(table: Tensor) -> Tensor:
    return torch.nn.functional.pad(table, (0, GAP, 0, GAP), value=torch.nan)

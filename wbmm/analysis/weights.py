"""`wbmm analyze weights`: locality, orientation and frequency of learned tables, beside those of an untrained twin."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wbmm.progress import progress_bar
from wbmm.text import render_table

from . import effective_tables as st
from .effective_tables import LayerTable, effective_tables
from .opening import Subject, add_model_arguments, open_subject
from .output import COLUMN, PALETTE, Output, add_output_arguments, drawing

__all__ = ["EXAMPLE", "PAPER", "LayerStatistics", "add_arguments", "in_words", "measure_layer", "run", "summarise"]

EXAMPLE = "wbmm analyze weights wbmm_a.tiny50 --out analysis"
MARGIN = 1.1  # energy near the diagonal over the twin's, to be called learned
# The paper's appendix "Analysis of Learned Weight Matrices", trained on ImageNet-1K; its definitions are not given.
PAPER = {
    "diagonal to off-diagonal": "41-58x",
    "lost within distance 2": "over 90 %",
    "low-frequency ratio of a low-pass channel": "83 %",
    "low-frequency ratio of a high-pass channel": "9 %",
    "stages": "stage 2 leans to high-pass, stages 3 and 4 are more balanced",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a checkpoint in any form, a run's folder, or a model's name")
    parser.add_argument(
        "--size", type=int, metavar="PX", help="image size whose maps the tables act on (default: the file's)"
    )
    parser.add_argument("--channels", type=int, default=48, help="tables of each layer in the gallery (default: 48)")
    add_model_arguments(parser)
    add_output_arguments(parser)


@dataclass(frozen=True)
class LayerStatistics:
    """The statistics of one layer, a value a channel unless said.

    Attributes:
        layer: whose.
        ratio: diagonal over mean off-diagonal magnitude.
        profile: `[C, R]`, mean magnitude by distance.
        near_energy: share of the off-diagonal energy within distance 2.
        near_pairs: share of the pairs that are there (one number): `near_energy` of a table without locality.
        low: low-frequency ratio of the table.
        low_around: the same without its centre.
        frequency: index into `statistics.CLASSES`.
        orientation: of the table without its centre, on which shortcuts have no influence.
    """

    layer: LayerTable
    ratio: Tensor
    profile: Tensor
    near_energy: Tensor
    near_pairs: float
    low: Tensor
    low_around: Tensor
    frequency: Tensor
    orientation: st.Orientation


def measure_layer(layer: LayerTable) -> LayerStatistics:
    power = st.spectrum(layer.table)
    around = st.spectrum(st.without_centre(layer.table))
    low = st.low_frequency_ratio(power)
    near_energy, near_pairs = st.energy_within(layer.energy, layer.window)
    return LayerStatistics(
        layer,
        st.diagonal_ratio(layer.magnitude, layer.window),
        st.profile(layer.magnitude, layer.window),
        near_energy,
        near_pairs,
        low,
        st.low_frequency_ratio(around),
        st.frequency_class(low, power.shape[-1]),
        st.orientation(around),
    )


def summarise(layers: Sequence[LayerStatistics]) -> dict:
    """The figures of some layers together, each channel counted once; their order does not matter."""
    labels = torch.cat([layer.orientation.label for layer in layers])
    classes = torch.cat([layer.frequency for layer in layers])
    channels = len(labels)
    longest = max(layer.profile.shape[1] for layer in layers)
    profiles = torch.full((channels, longest), math.nan, dtype=torch.float64)
    for layer, rows in zip(layers, profiles.split([len(layer.ratio) for layer in layers]), strict=True):
        rows[:, : layer.profile.shape[1]] = layer.profile
    return {
        "layers": len(layers),
        "channels": channels,
        "windows": sorted({"x".join(map(str, layer.layer.window)) for layer in layers}),
        "ratio": _median(layer.ratio for layer in layers),
        "lost_0_to_2": st.lost_between(profiles, 0, 2),
        "lost_1_to_2": st.lost_between(profiles, 1, 2),
        "near_energy": _mean(layer.near_energy for layer in layers),
        "near_pairs": _mean(torch.full_like(layer.near_energy, layer.near_pairs) for layer in layers),
        "profile": (profiles.nanmean(0) / profiles.nanmean(0)[0]).tolist(),
        "orientations": {name: float((labels == i).double().mean()) for i, name in enumerate(st.ORIENTATIONS)},
        "coherence": _median(layer.orientation.coherence for layer in layers),
        "low": _median(layer.low for layer in layers),
        "low_range": _range(layer.low for layer in layers),
        "low_around": _median(layer.low_around for layer in layers),
        "frequencies": {name: float((classes == i).double().mean()) for i, name in enumerate(st.CLASSES)},
    }


def _median(values) -> float:
    return float(torch.cat(list(values)).median())


def _mean(values) -> float:
    return float(torch.cat(list(values)).nanmean())


def _range(values) -> list[float]:
    every = torch.cat(list(values))
    return [float(every.min()), float(every.max())]


def measure(net, size: tuple[int, int], label: str) -> list[LayerStatistics]:
    """The statistics of every WBMM layer of a model, in its order."""
    with progress_bar(None, label) as advance:
        found = []
        for layer in effective_tables(net, size):
            found.append(measure_layer(layer))
            advance(1)
    return found


def by_stage(layers: Sequence[LayerStatistics]) -> dict[str, list[LayerStatistics]]:
    """`stage 2` and so on to its layers; those outside of stages come under `layers`."""
    stages: dict[str, list[LayerStatistics]] = {}
    for layer in layers:
        stages.setdefault(f"stage {layer.layer.stage}" if layer.layer.stage else "layers", []).append(layer)
    return stages


def run(args: argparse.Namespace) -> int:
    if args.channels < 1:
        raise ValueError(f"--channels {args.channels}: give 1 or more")
    if args.size is not None and args.size < 1:
        raise ValueError(f"--size {args.size}: give 1 or more")
    subject = open_subject(args.file, args.device, args.model, args.ema, args.random_weights)
    output = Output(args, "weights")
    size = (args.size, args.size) if args.size else subject.card.input_size[1:]
    layers = measure(subject.net, size, "layers")
    if not layers:
        raise ValueError(f"{subject.label} has no WBMM layer: {_what_else(subject)}")
    untrained = measure(subject.untrained(), size, "layers of the untrained twin")
    stages, before = by_stage(layers), by_stage(untrained)
    found = {name: summarise(part) for name, part in stages.items()}
    control = {name: summarise(part) for name, part in before.items()}
    print(f"{subject.label}: {subject.card.describe()}; maps of {size[0]}x{size[1]} px\n")
    print(_table(found))
    print(f"\nuntrained twin:\n{_table(control)}")
    panels = draw_panels(output, stages, found, control)
    galleries = [draw_gallery(output, name, part, args.channels) for name, part in stages.items()]
    facts = {
        "model": subject.label,
        "card": subject.card.describe(),
        "size": list(size),
        "flat_low_frequency_ratio": st.flat_ratio(),
        "stages": found,
        "untrained": control,
        "layers": [{**_describe(layer), **summarise([layer])} for layer in layers],
        "paper": PAPER,
    }
    output.finish(facts, _page(subject, size, found, control, panels, galleries), args.device)
    return 0


def _what_else(subject: Subject) -> str:
    mixer = getattr(subject.net, "mixer", None)
    return f"its W blocks hold {mixer}" if mixer else f"it is a {subject.card.model}"


def _describe(layer: LayerStatistics) -> dict:
    table = layer.layer
    own_window = "x".join(map(str, table.own_window))
    return {"name": table.name, "stage": table.stage, "kind": table.kind, "own_window": own_window}


HEADERS = (
    *("stage", "layers", "channels", "window", "diagonal ratio", "lost 0 to 2 %", "lost 1 to 2 %"),
    *("energy within 2 %", "pairs there %", "oriented %", "low-frequency %", "low-pass %", "high-pass %"),
)


def _table(summaries: dict[str, dict], markdown: bool = False) -> str:
    rows = []
    for name, s in summaries.items():
        low_pass, _, high_pass = s["frequencies"].values()
        shares = (
            *(s["lost_0_to_2"], s["lost_1_to_2"], s["near_energy"], s["near_pairs"]),
            *(1 - s["orientations"]["isotropic"], s["low"], low_pass, high_pass),
        )
        cells = ["-" if math.isnan(share) else f"{100 * share:.1f}" for share in shares]
        ratio = f"{s['ratio']:.1f}x" if math.isfinite(s["ratio"]) else "-"
        rows.append((name, s["layers"], s["channels"], ", ".join(s["windows"]), ratio, *cells))
    return render_table(HEADERS, rows, markdown=markdown)


def _page(subject: Subject, size, found: dict, control: dict, panels: str, galleries: Sequence[tuple[str, str]]) -> str:
    paper = render_table(("the paper says", "of models trained on ImageNet-1K"), list(PAPER.items()), markdown=True)
    kinds = ", ".join(f"{100 * share:.0f} % {name}" for name, share in _overall(found).items())
    lines = [
        f"# Learned tables of {subject.label}",
        f"{subject.card.describe()}. Tables are cut to the offsets that occur with images of {size[0]}x{size[1]} px.",
        f"![locality, orientation and frequency]({panels})",
        "## Trained",
        _table(found, markdown=True),
        f"Orientations over all channels: {kinds}. "
        f"The low-frequency ratio of a flat spectrum is {100 * st.flat_ratio():.1f} %.",
        "## The same model before training",
        "What shortcut and initialisation give by themselves: only differences from this were learned.",
        _table(control, markdown=True),
        "## In words",
        "\n".join(in_words(name, summary, control[name]) for name, summary in found.items()),
        "## The paper",
        paper,
        "## Tables, stage by stage",
        "Each square is a channel's table without its centre: the weight of every offset, orange where positive and "
        "purple where negative, each on its own scale. Channels are ordered by low-frequency ratio.",
        *(f"### {name[0].upper()}{name[1:]}\n\n![tables of {name}]({picture})" for name, picture in galleries),
    ]
    return "\n\n".join(lines)


def in_words(name: str, trained: dict, untrained: dict) -> str:
    """What training changed in a stage, as one line of a list."""
    if not trained["near_pairs"] < 1:
        return f"- {name[0].upper()}{name[1:]}: its maps are too small to say anything about locality."
    more = trained["near_energy"] > MARGIN * max(untrained["near_energy"], trained["near_pairs"])
    low, _, high = trained["frequencies"].values()
    low_before, _, high_before = untrained["frequencies"].values()
    selective = low + high > low_before + high_before + 0.1
    return (
        f"- {name[0].upper()}{name[1:]}: {'locality was learned' if more else 'no locality was learned'}: "
        f"{100 * trained['near_energy']:.0f} % of the off-diagonal energy lies within distance 2, untrained "
        f"{100 * untrained['near_energy']:.0f} %. The diagonal ratio went from {untrained['ratio']:.0f}x to "
        f"{trained['ratio']:.0f}x. Frequency selectivity {'emerged' if selective else 'did not emerge'}: "
        f"{100 * low:.0f} % low-pass and {100 * high:.0f} % high-pass channels, untrained {100 * low_before:.0f} % and "
        f"{100 * high_before:.0f} %."
    )


def _overall(found: dict[str, dict]) -> dict[str, float]:
    total = sum(s["channels"] for s in found.values())
    return {n: sum(s["orientations"][n] * s["channels"] for s in found.values()) / total for n in st.ORIENTATIONS}


SIGNED, POWER = "PuOr_r", "cividis"  # colour maps that colour-blind people can read
LEAST = 1e-4  # of the profile's axis
LARGE = 4  # positions a side of a map whose tables are shown as examples
GAP = 1  # pixels between tables of a gallery


def draw_panels(output: Output, stages: Mapping[str, Sequence[LayerStatistics]], found: dict, control: dict) -> str:
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


def _draw_examples(panel: Any, stages: Mapping[str, Sequence[LayerStatistics]]) -> None:
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


def _large_tables(stages: Mapping[str, Sequence[LayerStatistics]]) -> list[LayerStatistics]:
    """Examples come from these, if there are any: any weights look like an edge detector on a map of 2x2."""
    layers = [layer for part in stages.values() for layer in part]
    return [layer for layer in layers if min(layer.layer.window) >= LARGE] or layers


def _most_coherent(layers: Sequence[LayerStatistics], direction: int) -> tuple[float, "LayerStatistics | None", int]:
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


def _draw_ratios(axis: Any, stages: Mapping[str, Sequence[LayerStatistics]]) -> None:
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


def _draw_spectra(panel: Any, stages: Mapping[str, Sequence[LayerStatistics]]) -> None:
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


def _extreme(layers: Sequence[LayerStatistics], sign: int) -> tuple[LayerStatistics, int]:
    _, number, channel = max(
        (sign * float(layer.low[channel]), number, channel)
        for number, layer in enumerate(layers)
        for channel in range(len(layer.low))
        if not torch.isnan(layer.low[channel])
    )
    return layers[number], channel


def draw_gallery(output: Output, name: str, layers: Sequence[LayerStatistics], most: int) -> tuple[str, str]:
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


def _sheet(layer: LayerStatistics, most: int, columns: int) -> np.ndarray:
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

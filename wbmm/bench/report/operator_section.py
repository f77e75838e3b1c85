"""The operator in a report: the paper's curves beside ours, a roofline, and the table with ratios and spread."""

from collections.abc import Sequence

from wbmm.bench.operators import BASELINE, MODES
from wbmm.bench.results import Entry

from .chart import Axis, Chart, Point, Series, short
from .measured import OpSpeeds, op_groups, op_speeds, paper_operators, ratio_range, split_name
from .page import Block, Figures, Heading, Paragraph, TableBlock

__all__ = ["operator_blocks"]

COLOURS = {
    ("DW-Std", 3): "sky",
    ("DW-Std", 5): "blue",
    ("DW-Std", 13): "teal",
    ("DW-Std", 27): "grey",
    ("DW-LKA", 13): "green",
    ("WBMM-C", 7): "amber",
    ("WBMM-C", 14): "red",
}
OWN = ("purple", "orange")  # our backends, at 7x7 and 14x14
METHODS = {"DW-Std": "blue", "DW-LKA": "green", "WBMM-C": "red", "WBMM-NC": "amber"}
MAPS = ("sky", "blue", "teal", "green", "purple", "grey")


def operator_blocks(entries: Sequence[Entry]) -> list[Block]:
    """Everything about the operator on one machine."""
    limits = {entry.cell.get("dtype"): entry for entry in entries if entry.cell.get("limits")}
    blocks: list[Block] = [Heading("The operator")]
    for number, (group, cells) in enumerate(op_groups(entries).items()):
        dtype, layout, mode, precision, channels = group
        on_gpu = str(cells[0].cell.get("device", "cpu")).startswith("cuda")
        what = f"{dtype}{f' ({precision})' if on_gpu and dtype == 'float32' else ''}, {layout}, {MODES[mode]}"
        if number or len(op_groups(entries)) > 1:
            blocks.append(Heading(what, 3))
        blocks.append(Paragraph(_intro(cells, channels, what)))
        theirs = paper_operators() if mode == "forward" and dtype == "float32" and channels == 256 else {}
        blocks += _curves(cells, theirs, f"op{number or ''}")
        if mode == "forward" and dtype in limits:
            blocks += _roofline(cells, limits[dtype], f"op{number or ''}")
        blocks += _tables(cells, theirs)
    return blocks


def _intro(cells: Sequence[Entry], channels: int, what: str) -> str:
    runs = max(len(result.get("seconds", ())) for cell in cells for result in cell.results.values())
    return (
        f"One layer of {channels} channels, {what}. All operators of a cell take turns; a figure is the median of "
        f"{runs} runs, its spread the lowest and the highest of them. `WBMM-C` and `WBMM-NC` are the paper's operator, "
        "a batched product, with its matrix kept and made in every call. `WBMM (name)` is the same operator as a "
        "backend of this package computes it; on a CPU, `onednn` convolves each window."
    )


def _points(cells: Sequence[Entry], name: str, x: str, scale: float = 1.0) -> list[Point]:
    found = []
    for cell in cells:
        timing = cell.timing(name)
        if timing is not None:
            batch = cell.cell["batch"]
            speeds = batch / timing.median, batch / max(timing.seconds), batch / min(timing.seconds)
            note = f"batch {batch}, {cell.cell['map']}x{cell.cell['map']}: {short(speeds[0])} images/s"
            found.append(Point(cell.cell[x], *(speed / scale for speed in speeds), note))
    return sorted(found, key=lambda point: point.x)


def _drawn(cells: Sequence[Entry]) -> dict[str, tuple[tuple[str, int], str]]:
    """The operators that curves are drawn of: name to method and size, and colour."""
    names = list(dict.fromkeys(name for cell in cells for name in cell.results if cell.timing(name) is not None))
    chosen = {name: (split_name(name), COLOURS[split_name(name)]) for name in names if split_name(name) in COLOURS}
    own = _own_backend(cells)
    for size, colour in zip((7, 14), OWN, strict=True):
        name = f"WBMM {size}x{size} ({own})"
        if own and name in names:
            chosen[name] = split_name(name), colour
    return chosen


def _own_backend(cells: Sequence[Entry]) -> str | None:
    """The backend of ours that is fastest at 7x7 on the largest cell."""
    largest = max(cells, key=lambda cell: cell.cell["batch"] * cell.cell["map"] ** 2)
    found = {}
    for name in largest.results:
        method, size = split_name(name)
        timing = largest.timing(name)
        if method.startswith("WBMM (") and method.endswith(")") and size == 7 and timing is not None:
            found[method[6:-1]] = timing.median
    return min(found, key=found.get) if found else None


def _curves(cells: Sequence[Entry], theirs: OpSpeeds, prefix: str) -> list[Block]:
    batches = sorted({cell.cell["batch"] for cell in cells})
    sides = sorted({cell.cell["map"] for cell in cells})
    blocks: list[Block] = []
    if len(sides) > 1:
        charts = [_throughput(cells, batch, theirs, f"{prefix}-throughput-b{batch}") for batch in batches]
        beside = " Dashed, with hollow marks: the paper's A800." if theirs else ""
        blocks.append(
            Figures(
                charts,
                f"Images a second of one layer against the side of the map. Solid: this machine.{beside}",
            )
        )
    ratios = [
        _degradation(cells, batches[-1], side, theirs, f"{prefix}-kernel-m{side}") for side in sides if side >= 14
    ]
    if ratios:
        blocks.append(
            Figures(
                ratios,
                "What a larger kernel or window costs: speed over that of a 5x5 depthwise convolution (the line at 1) "
                "against the side of the kernel or window. Solid: here. Dashed: the paper's A800.",
            )
        )
    if len(batches) > 1:
        charts = [_against_batch(cells, sides, theirs, f"{prefix}-batch")]
        charts = [chart for chart in charts if chart.series]  # none in training, where no matrix is cached
    else:
        charts = []
    if charts:
        blocks.append(
            Figures(
                charts,
                "Speed-up of WBMM-C 14x14 over a 5x5 depthwise convolution against the batch, a curve for each map. "
                "Solid: here. Dashed: the paper's A800.",
            )
        )
    return blocks


def _throughput(cells: Sequence[Entry], batch: int, theirs: OpSpeeds, name: str) -> Chart:
    own = [cell for cell in cells if cell.cell["batch"] == batch]
    sides = sorted({cell.cell["map"] for cell in own})
    series = []
    for operator, ((method, size), colour) in _drawn(cells).items():
        series.append(Series(operator, _points(own, operator, "map"), colour))
        paper = [
            Point(s, theirs[method, size, batch, s], note=f"{s}x{s}: {short(theirs[method, size, batch, s])} images/s")
            for s in sides
            if (method, size, batch, s) in theirs
        ]
        if paper:
            series.append(Series(f"{operator}, paper", paper, colour, theirs=True))
    series = sorted(series, key=lambda one: one.theirs)
    return Chart(name, f"Batch {batch}", Axis("side of the map", ticks=sides), Axis("images/s"), series, height=280)


def _degradation(cells: Sequence[Entry], batch: int, side: int, theirs: OpSpeeds, name: str) -> Chart:
    cell = next((c for c in cells if (c.cell["batch"], c.cell["map"]) == (batch, side)), None)
    series, sizes = [], set()
    own = _own_backend(cells)
    methods = {**METHODS, **({f"WBMM ({own})": "purple"} if own else {})}
    for method, colour in methods.items():
        points = [] if cell is None else _relative(cell, method)
        if points:
            series.append(Series(method, points, colour))
        base = theirs.get(("DW-Std", 5, batch, side))
        paper = sorted(
            (size, speed / base)
            for (m, size, b, s), speed in theirs.items()
            if base and (m, b, s) == (method, batch, side)
        )
        if paper:
            series.append(
                Series(
                    f"{method}, paper", [Point(x, y, note=f"{x}x{x}: {y:.2f}x") for x, y in paper], colour, theirs=True
                )
            )
    sizes = sorted({point.x for one in series for point in one.points})
    series = sorted(series, key=lambda one: one.theirs)
    ticks = [size for size in sizes if size != 14 or 13 not in sizes]
    return Chart(
        name,
        f"{side}x{side} map, batch {batch}",
        Axis("side of the kernel or window", ticks=ticks),
        Axis(f"over {BASELINE}"),
        series,
        one=True,
    )


def _relative(cell: Entry, method: str) -> list[Point]:
    """A method's speed over the baseline's, by size."""
    base, found = cell.timing(BASELINE), []
    for name in cell.results:
        timing = cell.timing(name)
        if timing is not None and base is not None and split_name(name)[0] == method:
            value, (low, high) = base.median / timing.median, ratio_range(timing, base)
            size = split_name(name)[1]
            found.append(Point(size, value, low, high, f"{size}x{size}: {value:.2f}x"))
    return sorted(found, key=lambda point: point.x)


def _against_batch(cells: Sequence[Entry], sides: Sequence[int], theirs: OpSpeeds, name: str) -> Chart:
    ours, series, batches = op_speeds(cells), [], sorted({cell.cell["batch"] for cell in cells})
    shown = [side for side in sides if side >= 14]
    paper_batches = sorted({key[2] for key in theirs}) or batches
    for side, colour in zip(shown, MAPS, strict=False):
        for speeds, at, label in ((ours, batches, ""), (theirs, paper_batches, ", paper")):
            points = [
                Point(
                    b,
                    speeds["WBMM-C", 14, b, side] / speeds["DW-Std", 5, b, side],
                    note=f"batch {b}: {speeds['WBMM-C', 14, b, side] / speeds['DW-Std', 5, b, side]:.2f}x",
                )
                for b in at
                if ("WBMM-C", 14, b, side) in speeds and ("DW-Std", 5, b, side) in speeds
            ]
            if points:
                series.append(Series(f"{side}x{side}{label}", points, colour, theirs=bool(label)))
    series = sorted(series, key=lambda one: one.theirs)
    ticks = sorted({point.x for one in series for point in one.points})
    return Chart(
        name, "WBMM-C 14x14 over DW-Std 5x5", Axis("batch", ticks=ticks), Axis("speed-up"), series, one=True, height=260
    )


def _roofline(cells: Sequence[Entry], limits: Entry, prefix: str) -> list[Block]:
    """Achieved GFLOP/s against FLOPs a byte, under the limits of the same run."""
    products = {
        name: result["macs"] / limits.timing(name).median for name, result in limits.results.items() if "macs" in result
    }
    peak, bandwidth = (
        2 * max(products.values()) / 1e9,
        limits.results["copy"]["bytes"] / limits.timing("copy").median / 1e9,
    )
    batch = max(cell.cell["batch"] for cell in cells)
    chosen = _drawn(cells)
    series, rows = [], []
    for cell in sorted((c for c in cells if c.cell["batch"] == batch), key=lambda c: c.cell["map"]):
        for name in chosen:
            timing = cell.timing(name)
            if timing is None:
                continue
            result, side = cell.results[name], cell.cell["map"]
            flops, moved = 2 * result["macs"], result["bytes"]
            x, y, speed = flops / moved, flops / timing.median / 1e9, moved / timing.median / 1e9
            rows.append((name, side, x, y, speed, y / min(peak, x * bandwidth)))
    for name, (_, colour) in chosen.items():
        points = [
            Point(x, y, note=f"{side}x{side}: {y:.3g} GFLOP/s, {speed:.3g} GB/s, {part:.0%} of the roof")
            for n, side, x, y, speed, part in rows
            if n == name
        ]
        series.append(Series(name, points, colour, line=False))
    intensities = [row[2] for row in rows]
    ridge = peak / bandwidth
    left, right = min(*intensities, ridge) / 1.6, max(*intensities, ridge) * 1.6
    roof = Series("roof", [Point(left, left * bandwidth), Point(ridge, peak), Point(right, peak)], "grey", marks=False)
    chart = Chart(
        f"{prefix}-roofline",
        f"Roofline, batch {batch}",
        Axis("FLOPs a byte"),
        Axis("GFLOP/s"),
        [roof, *series],
        height=280,
    )
    table = TableBlock(
        ("operator", "map", "FLOPs a byte", "GFLOP/s", "GB/s", "share of the roof"),
        [[n, f"{s}x{s}", f"{x:.1f}", f"{y:.1f}", f"{g:.1f}", f"{part:.0%}"] for n, s, x, y, g, part in rows],
        folded="Arithmetic intensity and rates of each operator",
    )
    caption = (
        f"The roof is what this machine reached in the same run: {peak:.0f} GFLOP/s in a matrix product and "
        f"{bandwidth:.1f} GB/s in a copy. FLOPs are those of the definition (each window as a product, each kernel at "
        "every position), bytes the least that must move: the map in, the result out, the weights once. Small maps can "
        "lie above the slope because they stay in the cache. `WBMM (onednn)` is drawn with the FLOPs of the product, "
        "although it computes a convolution."
    )
    return [Figures([chart], caption), table]


def _tables(cells: Sequence[Entry], theirs: OpSpeeds) -> list[Block]:
    blocks: list[Block] = []
    for batch in sorted({cell.cell["batch"] for cell in cells}):
        own = sorted((c for c in cells if c.cell["batch"] == batch), key=lambda c: c.cell["map"])
        names = list(dict.fromkeys(name for cell in own for name in cell.results))
        names = [name for name in names if any(cell.timing(name) for cell in own)]
        heads, paper_columns = ["operator"], []
        for cell in own:
            side = cell.cell["map"]
            heads.append(f"{side}x{side}: images/s, ratio, spread")
            if ("DW-Std", 5, batch, side) in theirs:
                paper_columns.append(len(heads))
                heads.append("paper's ratio")
        rows = [[name, *(text for cell in own for text in _figures(cell, name, theirs))] for name in names]
        blocks.append(
            TableBlock(
                heads, rows, theirs=paper_columns, folded=f"All operators at batch {batch}: ratios are to {BASELINE}"
            )
        )
    missing = _missing(cells)
    if missing:
        blocks.append(Paragraph(f"Not run: {missing}."))
    return blocks


def _figures(cell: Entry, name: str, theirs: OpSpeeds) -> list[str]:
    timing, base = cell.timing(name), cell.timing(BASELINE)
    batch, side = cell.cell["batch"], cell.cell["map"]
    if timing is None:
        text = "--"
    else:
        spread = (max(timing.seconds) - min(timing.seconds)) / 2 / timing.median
        over = f", {base.median / timing.median:.2f}x" if base else ""
        text = f"{short(batch / timing.median)}{over}, ±{spread:.0%}"
    key, base_key = (*split_name(name), batch, side), ("DW-Std", 5, batch, side)
    if base_key not in theirs:
        return [text]
    return [text, f"{theirs[key] / theirs[base_key]:.2f}x" if key in theirs else "--"]


def _missing(cells: Sequence[Entry]) -> str:
    ran = {name for cell in cells for name in cell.results if cell.timing(name) is not None}
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        for name, result in cell.results.items():
            if name not in ran and name not in reasons.get(str(result.get("why_not")), ()):
                reasons.setdefault(str(result.get("why_not")), []).append(name)
    return "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())

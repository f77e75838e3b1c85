"""Whole nets in a report: inference, edge runtimes, training steps, segmentors and detectors."""

from collections.abc import Sequence

from wbmm.bench.dense import BACKBONES
from wbmm.bench.results import Entry
from wbmm.bench.segmentors import paper_speeds
from wbmm.bench.speed import paper_model_speeds
from wbmm.bench.training import IMAGES, epoch_text
from wbmm.timing import Timing

from .chart import Axis, Chart, Point, Series, short
from .measured import as_in_the_paper, numbers_of, paper_training, ratio, ratio_range
from .page import Block, Figures, Heading, Paragraph, TableBlock

__all__ = ["SECTIONS", "by_net", "cell_title", "contests_of", "in_order"]

# layouts of a contest: heading, and the forms of `bench model` and `bench train`
LAYOUTS = {"reference": ("plain", "plain-training"), "ours": ("compact", "training")}
LOOKS = {"reference": ("blue", "circle", -0.16), "ours": ("orange", "square", 0.16)}  # and where in its row
ROW = 19  # height of a category in a chart


def by_net(entry: Entry, layout: str) -> dict[str, str]:
    """Names of W, UN and UA in a cell, in one layout."""
    size, form = entry.cell["size"], LAYOUTS[layout][entry.bench == "train"]
    other = f"unireplknet_{size}:{form}"
    return {"W": f"wbmm_{size}:{form}", "UN": other, "UA": f"{other}+lka"}


def in_order(entry: Entry) -> tuple:
    cell = entry.cell
    at = "pntsb".find(cell["size"]), cell["height"], cell["width"], cell["batch"]
    return *at, cell.get("runtime", ""), numbers_of(entry)


def contests_of(entries: Sequence[Entry]) -> list[Entry]:
    return sorted((entry for entry in entries if entry.cell.get("size")), key=in_order)


def cell_title(entry: Entry) -> str:
    cell = entry.cell
    px = cell["height"] if cell["height"] == cell["width"] else f"{cell['height']}x{cell['width']}"
    numbers = numbers_of(entry)
    return f"{cell['size'].upper()}, {px} px, batch {cell['batch']}{f', {numbers}' if numbers else ''}"


def _ratio_text(timing: Timing | None, over: Timing | None) -> str:
    if timing is None or over is None:
        return "--"
    low, high = ratio_range(timing, over)
    return f"{over.median / timing.median:.2f}x ({low:.2f} to {high:.2f})"


def _speed_text(timing: Timing | None, batch: int) -> str:
    return "--" if timing is None else short(batch / timing.median)


def _dots(name: str, title: str, labels: Sequence[str], series: Sequence[Series], label: str, left: int = 118) -> Chart:
    """A row for each label, with the line at 1."""
    height = ROW * len(labels) + 8
    return Chart(name, title, Axis(label), Axis("", names=labels), series, one=True, height=height, left=left)


def _ratio_points(entries: Sequence[Entry], layout: str, over: str) -> list[Point]:
    points = []
    for row, entry in enumerate(entries):
        names = by_net(entry, layout)
        timing, base = entry.timing(names["W"]), entry.timing(names[over])
        value = ratio(timing, base)
        if value is not None:
            points.append(
                Point(value, row + LOOKS[layout][2], *ratio_range(timing, base), f"{cell_title(entry)}: {value:.2f}x")
            )
    return points


def _contest_chart(name: str, title: str, entries: Sequence[Entry], paper: Sequence[float | None], what: str) -> Chart:
    series = [
        Series(f"{layout} on both sides", points, LOOKS[layout][0], line=False, mark=LOOKS[layout][1])
        for layout in LAYOUTS
        if (points := _ratio_points(entries, layout, "UN"))
    ]
    theirs = [Point(value, row, note=f"{value:.2f}x") for row, value in enumerate(paper) if value]
    if theirs:
        series.append(Series("the paper", theirs, "grey", theirs=True, line=False, mark="diamond"))
    return _dots(name, title, [cell_title(entry) for entry in entries], series, what)


def _machine_of(entry: Entry) -> str:
    return "A800" if str(entry.cell.get("device", "cpu")).startswith("cuda") else "i7-13700K"


def _paper_ratio(entry: Entry, over: str = "UN") -> float | None:
    if not as_in_the_paper(entry):
        return None
    paper, cell = paper_model_speeds("desktop"), entry.cell
    at = (cell["height"], cell["batch"]) if cell["height"] == cell["width"] else (0, 0)
    own, other = (paper.get((_machine_of(entry), cell["size"], net, *at)) for net in ("W", over))
    return own / other if own and other else None


def model_blocks(entries: Sequence[Entry]) -> list[Block]:
    blocks: list[Block] = [Heading("Inference of whole models")]
    contests = contests_of(entries)
    if contests:
        machine = _machine_of(contests[0])
        lka = any(entry.timing(by_net(entry, layout)["UA"]) for entry in contests for layout in LAYOUTS)
        heads = ["net", "reference: W, images/s", "reference: W over UN", "ours: W, images/s", "ours: W over UN"]
        heads += ["reference: W over UA", "ours: W over UA"] * lka
        rows = []
        for entry in contests:
            row = [cell_title(entry)]
            for layout in LAYOUTS:
                names = by_net(entry, layout)
                own, other = entry.timing(names["W"]), entry.timing(names["UN"])
                row += [_speed_text(own, entry.cell["batch"]), _ratio_text(own, other)]
            for layout in LAYOUTS if lka else ():
                names = by_net(entry, layout)
                row.append(_ratio_text(entry.timing(names["W"]), entry.timing(names["UA"])))
            paper = _paper_ratio(entry)
            rows.append([*row, f"{paper:.2f}x" if paper else "--"])
        heads.append(f"paper ({machine}): W over UN")
        chart = _contest_chart(
            "model-ratio", "WBMM over UniRepLKNet, inference", contests, [_paper_ratio(e) for e in contests], "speed-up"
        )
        blocks += [
            Paragraph(
                "W is WBMM, UN UniRepLKNet without its large-kernel CUDA package, UA with it; all fused. Two "
                "questions: *reference* has both nets as one would write them first (NCHW, windows as a batched "
                "product), which is what the paper compares; *ours* has both with every fast path of this package, "
                "where windows run as convolutions on a CPU. In brackets: the ratio at the quartiles."
            ),
            Figures([chart], "Right of the line WBMM is faster. Bars: the quartiles of both nets."),
            TableBlock(heads, rows, theirs=(len(heads) - 1,)),
        ]
    blocks += _other_models(entries)
    return blocks


def _other_models(entries: Sequence[Entry]) -> list[Block]:
    """Models by name, alone or beside a contest: images a second, and the ratio to the first of their cell."""
    rows = []
    for entry in entries:
        base = next((entry.timing(name) for name in entry.results if entry.timing(name)), None)
        known = {name for layout in LAYOUTS for name in by_net(entry, layout).values()}
        beside = entry.cell.get("size") and not set(entry.results) <= {*known, "limit"}
        for name in entry.results if beside or not entry.cell.get("size") else ():
            timing = entry.timing(name)
            if timing is not None:
                where = f"{entry.cell['height']}x{entry.cell['width']}"
                speed = _speed_text(timing, entry.cell["batch"])
                numbers = numbers_of(entry) or "float32"
                rows.append([name, numbers, where, str(entry.cell["batch"]), speed, _ratio_text(timing, base)])
    return [TableBlock(("model", "numbers", "image", "batch", "images/s", "ratio to the first"), rows)] if rows else []


def edge_blocks(entries: Sequence[Entry]) -> list[Block]:
    rows = []
    for entry in contests_of(entries):
        cell, paper = entry.cell, paper_model_speeds("edge")
        own, other = (entry.timing(f"{family}_{cell['size']}") for family in ("wbmm", "unireplknet"))
        where = "Orin Nano CPU" if cell["runtime"].endswith("int8") else "Orin Nano GPU"
        theirs = [paper.get((where, cell["size"], net, cell["height"], cell["batch"])) for net in ("W", "UN")]
        figures = [_speed_text(timing, cell["batch"]) for timing in (own, other)]
        printed = f"{theirs[0] / theirs[1]:.2f}x" if all(theirs) else "--"
        rows.append([cell_title(entry), cell["runtime"], *figures, _ratio_text(own, other), printed])
    heads = ("net", "runtime", "W, images/s", "UN, images/s", "W over UN", "paper (Orin Nano): W over UN")
    return [Heading("Edge runtimes"), TableBlock(heads, rows, theirs=(5,))]


def train_blocks(entries: Sequence[Entry]) -> list[Block]:
    blocks: list[Block] = [Heading("Training steps")]
    contests, paper = contests_of(entries), paper_training()
    if contests:
        rows = []
        for entry in contests:
            for layout in LAYOUTS:
                rows.append(_training_row(entry, layout, paper))
        printed = [_paper_training_ratio(entry, paper) for entry in contests]
        chart = _contest_chart("train-ratio", "WBMM over UniRepLKNet, training", contests, printed, "speed-up")
        heads = (
            *("net", "layout", "W: step", "UN: step", "W over UN", "W: peak MB", "UN: peak MB"),
            *("W: ImageNet epoch here", "paper, 8 A800: W", "UN", "W over UN", "W: GB", "UN: GB"),
        )
        blocks += [
            Paragraph(
                "A step is forward, cross entropy, backward and AdamW, in the training form. The epoch is extrapolated "
                f"from it: {IMAGES:,} images, without reading or augmenting them."
            ),
            Figures(
                [chart], "Right of the line WBMM is faster. The paper's are from its time of an epoch on eight A800."
            ),
            TableBlock(heads, rows, theirs=(8, 9, 10, 11, 12)),
        ]
    return [*blocks, *_other_models(entries)]


def _paper_training_ratio(entry: Entry, paper: dict) -> float | None:
    own, other = (paper.get((entry.cell["size"], net)) for net in ("W", "UN"))
    same = (entry.cell["height"], entry.cell["width"]) == (224, 224)
    return other[0] / own[0] if own and other and same else None


def _training_row(entry: Entry, layout: str, paper: dict) -> list[str]:
    names = by_net(entry, layout)
    own, other = entry.timing(names["W"]), entry.timing(names["UN"])
    peaks = [entry.results.get(names[net], {}).get("peak_mb") for net in ("W", "UN")]
    steps = [f"{timing.median:.2f} s" if timing else "--" for timing in (own, other)]
    epoch = epoch_text(IMAGES / entry.cell["batch"] * own.median) if own else "--"
    printed = [paper.get((entry.cell["size"], net)) for net in ("W", "UN")]
    value = _paper_training_ratio(entry, paper)
    return [
        *(cell_title(entry), layout, *steps, _ratio_text(own, other)),
        *(f"{peak:.0f}" if peak else "--" for peak in peaks),
        epoch,
        *(epoch_text(figure[0]) if figure else "--" for figure in printed),
        f"{value:.2f}x" if value else "--",
        *(f"{figure[1]:g}" if figure else "--" for figure in printed),
    ]


def _backbone_blocks(entries: Sequence[Entry], title: str, baseline: str, paper: dict, text: str) -> list[Block]:
    charts, rows = [], []
    for entry in sorted(entries, key=in_order):
        cell, base = entry.cell, entry.timing(baseline)
        at = cell["height"], cell["width"], cell["batch"]
        names = [name for name in BACKBONES if entry.timing(name) and base]
        printed = {name: paper.get((cell["size"], name, *at)) for name in BACKBONES}
        mine = []
        for row, name in enumerate(names):
            timing, theirs = entry.timing(name), printed[name]
            value = base.median / timing.median
            mine.append(Point(value, row, *ratio_range(timing, base), f"{name}: {value:.2f}x"))
            over = f"{theirs / printed[baseline]:.2f}x" if theirs and printed[baseline] else "--"
            speed = _speed_text(timing, cell["batch"])
            rows.append(
                [name, cell_title(entry), speed, _ratio_text(timing, base), f"{theirs:g}" if theirs else "--", over]
            )
        series = [Series("here", mine, "orange", line=False, mark="square")]
        theirs = [
            Point(printed[name] / printed[baseline], row, note=f"{printed[name]:g} images/s")
            for row, name in enumerate(names)
            if printed[name] and printed[baseline]
        ]
        if theirs:
            series.append(Series("the paper, A800", theirs, "grey", theirs=True, line=False, mark="diamond"))
        if names:
            label = f"{entry.bench}-{cell['size']}-{cell['height']}x{cell['width']}-b{cell['batch']}"
            charts.append(_dots(label, cell_title(entry), names, series, f"speed over {baseline}", left=96))
    heads = ("backbone", "net", "images/s", f"over {baseline}", "paper: images/s", f"paper: over {baseline}")
    caption = f"Right of the line a backbone is faster than {baseline}. Bars: quartiles."
    return [Heading(title), Paragraph(text), Figures(charts, caption), TableBlock(heads, rows, theirs=(4, 5))]


def seg_blocks(entries: Sequence[Entry]) -> list[Block]:
    text = (
        "UPerNet with 150 classes, fused. Conv 3x3 and 5x5 are the same net with depthwise convolutions in every block."
    )
    return _backbone_blocks(entries, "Segmentors", "conv3x3", paper_speeds(), text)


def det_blocks(entries: Sequence[Entry]) -> list[Block]:
    text = (
        "Cascade Mask R-CNN, fused: backbone, FPN, RPN, RoIAlign and all heads on a fixed number of boxes, without "
        "suppression. The paper has no table of it."
    )
    return _backbone_blocks(entries, "Detectors", "unireplknet", {}, text)


SECTIONS = {"model": model_blocks, "edge": edge_blocks, "train": train_blocks, "seg": seg_blocks, "det": det_blocks}

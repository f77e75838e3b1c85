"""The paper's findings on whole nets: inference, training, segmentors, and INT8 on an edge device."""

from collections.abc import Sequence

from wbmm.bench.log import Entry
from wbmm.bench.seg import paper_speeds
from wbmm.bench.speed import paper_model_speeds

from .findings import Finding, Values, percent, times
from .net_sections import by_net, cell_title, contests_of, in_order
from .runs import paper_training, ratio

__all__ = ["net_findings"]


def _ratios(entries: Sequence[Entry], layout: str, over: str, device: str) -> Values:
    return [
        (cell_title(entry), value)
        for entry in contests_of(entries)
        if str(entry.cell.get("device", "cpu")).startswith(device)
        and (value := ratio(entry.timing(by_net(entry, layout)["W"]), entry.timing(by_net(entry, layout)[over])))
    ]


def _printed(table: str, machine: str, over: str) -> Values:
    paper = paper_model_speeds(table)
    return [
        (f"{size.upper()}, {px} px, batch {batch}", speed / paper[m, size, over, px, batch])
        for (m, size, net, px, batch), speed in paper.items()
        if (m, net) == (machine, "W") and (m, size, over, px, batch) in paper
    ]


def _saved(entries: Sequence[Entry], layout: str) -> Values:
    found = []
    for entry in contests_of(entries):
        peaks = [entry.results.get(by_net(entry, layout)[net], {}).get("peak_mb") for net in ("W", "UN")]
        if all(peaks):
            found.append((cell_title(entry), 1 - peaks[0] / peaks[1]))
    return found


def _backbones(entries: Sequence[Entry], one: str, other: str, least: tuple[int, int] = (0, 0)) -> Values:
    return [
        (cell_title(entry), value)
        for entry in sorted(entries, key=in_order)
        if (entry.cell["height"], entry.cell["width"]) >= least
        and (value := ratio(entry.timing(one), entry.timing(other)))
    ]


def _printed_backbones(one: str, other: str, least: tuple[int, int] = (0, 0)) -> Values:
    paper = paper_speeds()
    return [
        (f"{size.upper()}, {height}x{width} px, batch {batch}", speed / paper[size, other, height, width, batch])
        for (size, name, height, width, batch), speed in paper.items()
        if name == one and (height, width) >= least
    ]


def _faster(claim: str, ours: Values, theirs: Values, rule: str = "the ratio is above 1") -> Finding:
    return Finding(claim, rule, lambda value: value > 1, times, ours, theirs)


def net_findings(benches: dict[str, list[Entry]]) -> list[Finding]:
    """What the paper says of whole nets."""
    return [
        *_inference(benches.get("model", []), benches.get("edge", [])),
        *_training(benches.get("train", [])),
        *_segmentors(benches.get("seg", [])),
    ]


def _inference(model: Sequence[Entry], edge: Sequence[Entry]) -> list[Finding]:
    cpu = "On a CPU WBMM is 1.03 to 1.48 times as fast as UniRepLKNet"
    desktop = _printed("desktop", "i7-13700K", "UN")
    int8 = [
        (f"{cell_title(entry)}, {entry.cell['runtime']}", value)
        for entry in contests_of(edge)
        if entry.cell["runtime"].endswith("int8")
        and (value := ratio(*(entry.timing(f"{name}_{entry.cell['size']}") for name in ("wbmm", "unireplknet"))))
    ]
    reference = "the ratio is above 1, both in the reference implementation"
    return [
        _faster(cpu, _ratios(model, "reference", "UN", "cpu"), desktop, reference),
        _faster(f"{cpu} (asked of this package's fast paths)", _ratios(model, "ours", "UN", "cpu"), desktop),
        _faster(
            "On a GPU WBMM is 1.23 to 1.41 times as fast as UniRepLKNet without LKA",
            _ratios(model, "reference", "UN", "cuda"),
            _printed("desktop", "A800", "UN"),
        ),
        _faster(
            "On a GPU it is 1.01 to 1.28 times as fast as UniRepLKNet with LKA",
            _ratios(model, "reference", "UA", "cuda"),
            _printed("desktop", "A800", "UA"),
        ),
        _faster("In INT8 on a CPU it is 1.33 to 2.44 times as fast", int8, _printed("edge", "Orin Nano CPU", "UN")),
    ]


def _training(train: Sequence[Entry]) -> list[Finding]:
    paper = paper_training()  # without B, of which the paper does not say whether UniRepLKNet had LKA
    sizes = [size for size, net in paper if net == "W" and (size, "UN") in paper and size != "b"]
    return [
        Finding(
            "Training is 1.56 to 1.88 times as fast as UniRepLKNet's without LKA (P to S)",
            "the ratio is at least 1.31, the abstract's least; both in the reference implementation",
            lambda value: value >= 1.305,
            times,
            [*_ratios(train, "reference", "UN", "cpu"), *_ratios(train, "reference", "UN", "cuda")],
            [(size.upper(), paper[size, "UN"][0] / paper[size, "W"][0]) for size in sizes],
        ),
        Finding(
            "Training takes 8 to 12 % less memory",
            "at least 8 % less, both in the reference implementation",
            lambda value: value >= 0.08,
            percent,
            _saved(train, "reference"),
            [(size.upper(), 1 - paper[size, "W"][1] / paper[size, "UN"][1]) for size in sizes],
        ),
    ]


def _segmentors(seg: Sequence[Entry]) -> list[Finding]:
    large = (1024, 1024)
    return [
        Finding(
            "Segmentors with 7x7 windows come near those with 3x3 depthwise convolutions",
            "at least 0.95 of their speed",
            lambda value: value >= 0.945,
            times,
            _backbones(seg, "7x7", "conv3x3"),
            _printed_backbones("7x7", "conv3x3"),
        ),
        _faster(
            "Segmentors with 7x7 windows are consistently faster than with UniRepLKNet",
            _backbones(seg, "7x7", "unireplknet"),
            _printed_backbones("7x7", "unireplknet"),
        ),
        _faster(
            "Segmentors with hierarchical windows are consistently faster than with UniRepLKNet",
            _backbones(seg, "hier", "unireplknet"),
            _printed_backbones("hier", "unireplknet"),
        ),
        _faster(
            "At 1024x1024 hierarchical windows are faster than 5x5 depthwise convolutions",
            _backbones(seg, "hier", "conv5x5", large),
            _printed_backbones("hier", "conv5x5", large),
        ),
    ]

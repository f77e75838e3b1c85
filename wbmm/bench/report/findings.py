"""The paper's findings, one by one: what each says, on how many cells it is so here, and on how many in the paper."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wbmm.bench.results import Entry
from wbmm.bench.segmentors import paper_speeds
from wbmm.bench.speed import paper_model_speeds

from .measured import OpSpeeds, paper_training, ratio
from .net_sections import by_net, cell_title, contests_of, in_order
from .page import VERDICTS, TableBlock

__all__ = ["Finding", "findings_table", "net_findings", "operator_findings"]

Method = tuple[str, int]  # and the side of its kernel or window
Values = Sequence[tuple[str, float]]  # where, and what was found there


@dataclass(frozen=True)
class Finding:
    """A claim as a test of single values.

    Attributes:
        claim: as the paper says it.
        rule: what a value must be for the claim to be so.
        passes: the rule.
        show: a value as text.
        ours: measured values.
        theirs: the paper's own, read by the same rule.
    """

    claim: str
    rule: str
    passes: Callable[[float], bool]
    show: Callable[[float], str]
    ours: Values
    theirs: Values

    @property
    def verdict(self) -> str:
        if not self.ours:
            return "unknown"
        good = sum(self.passes(value) for _, value in self.ours)
        return "holds" if good == len(self.ours) else "partly" if good else "fails"

    def summary(self, values: Values) -> str:
        """How many pass, and the least and the most of them."""
        if not values:
            return "--"
        good = sum(self.passes(value) for _, value in values)
        low, high = min(values, key=lambda item: item[1]), max(values, key=lambda item: item[1])
        if len(values) == 1:
            return f"{self.show(low[1])} ({low[0]})"
        return f"{good} of {len(values)}; {self.show(low[1])} ({low[0]}) to {self.show(high[1])} ({high[0]})"


def findings_table(findings: Sequence[Finding]) -> TableBlock:
    rows = [
        [
            finding.claim,
            VERDICTS[finding.verdict],
            finding.summary(finding.ours),
            finding.summary(finding.theirs),
            finding.rule,
        ]
        for finding in findings
    ]
    marks = tuple((i, 1, finding.verdict) for i, finding in enumerate(findings))
    heads = ("the paper says", "verdict", "measured here", "the paper's own figures", "counted as true if")
    return TableBlock(heads, rows, theirs=(3,), marks=marks, stacked=True)


def percent(value: float) -> str:
    return f"{value:.0%}"


def times(value: float) -> str:
    return f"{value:.2f}x"


def _cells(speeds: OpSpeeds) -> list[tuple[int, int]]:
    return sorted({(batch, side) for _, _, batch, side in speeds})


def _where(batch: int, side: int) -> str:
    return f"batch {batch}, {side}x{side}"


def _over(speeds: OpSpeeds, one: Method, other: Method, keep: Callable[[int, int], bool]) -> Values:
    """Speed of one operator over another's in the cells to keep that have both."""
    return [
        (_where(*cell), speeds[(*one, *cell)] / speeds[(*other, *cell)])
        for cell in _cells(speeds)
        if keep(*cell) and (*one, *cell) in speeds and (*other, *cell) in speeds
    ]


def _lost(speeds: OpSpeeds, one: Method, other: Method, keep: Callable[[int, int], bool]) -> Values:
    return [(where, 1 - value) for where, value in _over(speeds, one, other, keep)]


def _growth(speeds: OpSpeeds) -> Values:
    """The speed-up at the largest batch over that at the smallest, for each map."""
    found = []
    for side in sorted({side for _, side in _cells(speeds)}):
        rows = _over(speeds, ("WBMM-C", 14), ("DW-Std", 5), lambda batch, at, side=side: at == side)
        if len(rows) > 1:
            found.append(
                (
                    f"{side}x{side}, {rows[-1][0].split(',')[0]} over {rows[0][0].split(',')[0]}",
                    rows[-1][1] / rows[0][1],
                )
            )
    return found


def _large(batch: int, side: int) -> bool:
    return side >= 28


def operator_findings(ours: OpSpeeds, theirs: OpSpeeds) -> list[Finding]:
    """Findings 1 to 4 of the paper's operator benchmark, and what it says of the cache and of LKA."""
    base, window, seven = ("DW-Std", 5), ("WBMM-C", 14), ("WBMM-C", 7)

    def lost(claim: str, least: float, kernel: int) -> Finding:
        values = [_lost(speeds, ("DW-Std", kernel), base, _large) for speeds in (ours, theirs)]
        rule = f"the loss is at least {least:.0%}, rounded"
        return Finding(claim, rule, lambda value: value >= least - 0.005, percent, *values)

    def faster(claim: str, rule: str, one: Method, other: Method, keep: Callable[[int, int], bool]) -> Finding:
        values = [_over(speeds, one, other, keep) for speeds in (ours, theirs)]
        return Finding(claim, f"{rule} is above 1", lambda value: value > 1, times, *values)

    slower = [_over(speeds, ("DW-LKA", 13), base, lambda batch, side: side >= 112) for speeds in (ours, theirs)]
    return [
        lost("Depthwise convolutions lose 71 to 78 % from 5x5 to 13x13 (maps from 28x28)", 0.71, 13),
        lost("Depthwise convolutions lose 92 to 94 % from 5x5 to 27x27", 0.92, 27),
        Finding(
            "LKA is slower than a 5x5 depthwise convolution on maps from 112x112 (13x13: 78 to 99 %)",
            "LKA 13x13 over DW-Std 5x5 is below 1",
            lambda value: value < 1,
            times,
            *slower,
        ),
        faster(
            "The product gets faster with larger windows",
            "WBMM-C 14x14 over WBMM-C 7x7",
            window,
            seven,
            lambda batch, side: side >= 14,
        ),
        faster(
            "WBMM-C 14x14 is faster than a 5x5 depthwise convolution on maps from 28x28 at batch 16 and more",
            "WBMM-C 14x14 over DW-Std 5x5",
            window,
            base,
            lambda batch, side: side >= 28 and batch >= 16,
        ),
        Finding(
            "Its advantage over a 5x5 depthwise convolution grows with the batch",
            "the ratio at the largest batch over that at the smallest is above 1",
            lambda value: value > 1,
            times,
            _growth(ours),
            _growth(theirs),
        ),
        faster(
            "Keeping the matrix is faster than making it in every call (up to about 3x on the smallest maps)",
            "WBMM-C over WBMM-NC, 14x14 windows on a 14x14 map,",
            window,
            ("WBMM-NC", 14),
            lambda batch, side: side == 14,
        ),
    ]


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

"""The paper's findings, one by one: what each says, on how many cells it is so here, and on how many in the paper."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .page import VERDICTS, Table
from .runs import OpSpeeds

__all__ = ["Finding", "findings_table", "operator_findings"]

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


def findings_table(findings: Sequence[Finding]) -> Table:
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
    return Table(heads, rows, theirs=(3,), marks=marks, stacked=True)


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

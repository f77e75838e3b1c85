"""Curves and points as SVG. Colours are CSS variables, so that a picture follows the reader's light or dark theme."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

__all__ = ["COLOURS", "STYLE", "Axis", "Chart", "Point", "Series", "short"]

WIDTH, LEFT, RIGHT, TOP, GAP = 460, 58, 14, 34, 40
PLOT = 230  # height of the plotted area
SHOWN = 560  # width of a picture in a file
LINE, LETTER = 17, 6.8  # a line of the legend, and about the width of a letter in it
COLOURS = ("blue", "sky", "teal", "green", "amber", "orange", "red", "purple", "grey")
_LIGHT = ("#1f5fbf", "#5aa2e0", "#0f8f8f", "#2e8b3d", "#b98900", "#d9620f", "#c22f3d", "#7d4fc4", "#6b7280")
_DARK = ("#7db0ff", "#4f93d6", "#4ecdc4", "#7ccf7c", "#f0c24b", "#ff9a4d", "#ff7b86", "#bd9bff", "#9aa4b2")


def _variables(colours: Iterable[str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in zip(COLOURS, colours, strict=True))


STYLE = f"""
.chart{{--ink:#1c2430;--faint:#5b6675;--rule:#d8dee6;--paper:#ffffff;{_variables(_LIGHT)}}}
@media(prefers-color-scheme:dark){{
.chart{{--ink:#e6ebf2;--faint:#9aa6b5;--rule:#333d4a;--paper:#171d25;{_variables(_DARK)}}}}}
.chart{{font:11px system-ui,"Segoe UI",Roboto,sans-serif}}
.chart text{{fill:var(--ink)}} .chart .faint{{fill:var(--faint)}} .chart .head{{font-size:12.5px;font-weight:600}}
.chart .grid{{stroke:var(--rule);stroke-width:1}} .chart .one{{stroke:var(--faint);stroke-width:1.2}}
.chart .curve{{fill:none;stroke-width:1.9;stroke-linejoin:round}}
.chart .theirs{{stroke-dasharray:5 4;stroke-width:1.5}}
.chart .bar{{stroke-width:1.2;opacity:.75}} .chart .hollow{{fill:var(--paper);stroke-width:1.5}}
""".strip()


@dataclass(frozen=True)
class Point:
    """A measured value; `low` and `high` are its spread, `note` is shown under the pointer, `label` beside the mark."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    note: str = ""
    label: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one name.

    Attributes:
        name: in the legend.
        points: in order of x.
        colour: one of `COLOURS`.
        theirs: the paper's: dashed, with hollow marks.
        line: whether points are joined; `marks`, whether they are drawn.
        mark: circle, square or diamond.
    """

    name: str
    points: Sequence[Point]
    colour: str = "blue"
    theirs: bool = False
    line: bool = True
    marks: bool = True
    mark: str = "circle"


@dataclass(frozen=True)
class Axis:
    """A logarithmic or linear axis.

    Attributes:
        label: what it counts.
        ticks: where to put a mark; by default round numbers.
        names: of categories at 0, 1, 2, ...; the axis is linear then.
    """

    label: str
    log: bool = True
    ticks: Sequence[float] = ()
    names: Sequence[str] = ()
    show: Callable[[float], str] | None = None


def short(value: float) -> str:
    """1500 as 1.5k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


@dataclass
class Chart:
    """A picture with its axes and a legend.

    Attributes:
        name: of its file, and part of the ids in it.
        title: above the plot.
        one: a line at y = 1 (x = 1 for categories), where two things are equally fast.
    """

    name: str
    title: str
    x: Axis
    y: Axis
    series: Sequence[Series] = ()
    one: bool = False
    height: int = PLOT
    left: int = LEFT
    _spans: dict[str, tuple[float, float]] = field(default_factory=dict)

    def svg(self, standalone: bool = False) -> str:
        """The picture; `standalone` with its own style, for a file."""
        self._spans = {axis: self._span(axis) for axis in "xy"}
        legend, lines = self._legend()
        tall = TOP + self.height + GAP + LINE * lines + 8
        style = f"<style>{STYLE}</style>" if standalone else ""
        back = f'<rect width="{WIDTH}" height="{tall}" fill="var(--paper)"/>' if standalone else ""
        # An image in a page has the size that it says of itself; inside a page it fills its box.
        size = f'width="{SHOWN}" height="{SHOWN * tall / WIDTH:.0f}"'
        space = f' xmlns="http://www.w3.org/2000/svg" {size}' if standalone else ""
        body = "".join((*self._frame(), *(part for one in self.series for part in self._draw(one)), *legend))
        return (
            f'<svg{space} class="chart" viewBox="0 0 {WIDTH} {tall}" role="img" aria-label="{escape(self.title)}">'
            f'{style}{back}<text class="head" x="{LEFT - 44}" y="18">{escape(self.title)}</text>{body}</svg>'
        )

    def _span(self, axis: str) -> tuple[float, float]:
        chosen: Axis = getattr(self, axis)
        if chosen.names:
            return -0.5, len(chosen.names) - 0.5
        values = [getattr(point, axis) for one in self.series for point in one.points] + list(chosen.ticks)
        if axis == ("x" if self.y.names else "y"):
            values += [v for one in self.series for p in one.points for v in (p.low, p.high) if v is not None]
        if self.one and axis == ("x" if self.y.names else "y"):
            values.append(1.0)
        low, high = min(values), max(values)
        if chosen.log:
            room = (high / low) ** 0.06 if high > low else 1.3
            return low / room, high * room
        room = (high - low) * 0.06 or 0.5
        return (0.0 if low >= 0 else low - room), high + room

    def _at(self, axis: str, value: float) -> float:
        low, high = self._spans[axis]
        if getattr(self, axis).log and not getattr(self, axis).names:
            low, high, value = math.log(low), math.log(high), math.log(value)
        part = (value - low) / (high - low)
        if axis == "x":
            return self.left + part * (WIDTH - self.left - RIGHT)
        return TOP + (part if self.y.names else 1 - part) * self.height

    def _ticks(self, axis: str) -> list[tuple[float, str]]:
        chosen: Axis = getattr(self, axis)
        if chosen.names:
            return list(enumerate(chosen.names))
        low, high = self._spans[axis]
        show = chosen.show or short
        if chosen.ticks:
            return [(value, show(value)) for value in chosen.ticks if low <= value <= high]
        return [(value, show(value)) for value in (_log_ticks if chosen.log else _even_ticks)(low, high)]

    def _frame(self) -> Iterable[str]:
        bottom, right = TOP + self.height, WIDTH - RIGHT
        for value, text in self._ticks("y"):
            y = self._at("y", value)
            yield f'<line class="grid" x1="{self.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text class="faint" x="{self.left - 6}" y="{y + 3.5:.1f}" text-anchor="end">{escape(text)}</text>'
        for value, text in self._ticks("x"):
            x = self._at("x", value)
            yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>'
            yield f'<text class="faint" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{escape(text)}</text>'
        if self.one and self.y.names:
            x = self._at("x", 1)
            yield f'<line class="one" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>'
        elif self.one:
            y = self._at("y", 1)
            yield f'<line class="one" x1="{self.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        middle = (self.left + right) / 2
        yield f'<text class="faint" x="{middle}" y="{bottom + 29}" text-anchor="middle">{escape(self.x.label)}</text>'
        if self.y.label:
            y = TOP + self.height / 2
            turn = f'transform="rotate(-90 12 {y})"'
            yield f'<text class="faint" x="12" y="{y}" text-anchor="middle" {turn}>{escape(self.y.label)}</text>'

    def _draw(self, one: Series) -> Iterable[str]:
        colour, points = f"var(--{one.colour})", [(self._at("x", p.x), self._at("y", p.y), p) for p in one.points]
        dashed = " theirs" if one.theirs else ""
        if one.line and len(points) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
            yield f'<polyline class="curve{dashed}" stroke="{colour}" points="{path}"/>'
        for x, y, point in points:
            if point.low is not None and point.high is not None:
                yield self._bar(x, y, point, colour)
            if one.marks:
                yield _mark(one, x, y, colour, f"{one.name}: {point.note}" if point.note else one.name)
            if point.label:
                side, anchor = (-7, "end") if x > WIDTH - RIGHT - LETTER * len(point.label) - 7 else (7, "start")
                yield f'<text x="{x + side:.1f}" y="{y + 3.5:.1f}" text-anchor="{anchor}">{escape(point.label)}</text>'

    def _bar(self, x: float, y: float, point: Point, colour: str) -> str:
        """The spread: upright, or along x where y are categories."""
        if self.y.names:
            ends = f'x1="{self._at("x", point.low):.1f}" x2="{self._at("x", point.high):.1f}" y1="{y:.1f}" y2="{y:.1f}"'
        else:
            ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{self._at("y", point.low):.1f}" y2="{self._at("y", point.high):.1f}"'
        return f'<line class="bar" stroke="{colour}" {ends}/>'

    def _legend(self) -> tuple[list[str], int]:
        """Its parts, and how many lines it has."""
        parts, x, line = [], 14.0, 0
        top = TOP + self.height + GAP + 8
        for one in self.series:
            wide = 30 + LETTER * len(one.name) + 10
            if x + wide > WIDTH and x > 14:
                x, line = 14.0, line + 1
            y, colour = top + line * LINE, f"var(--{one.colour})"
            if one.line:
                kind = "curve theirs" if one.theirs else "curve"
                parts.append(
                    f'<line class="{kind}" stroke="{colour}" x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}"/>'
                )
            if one.marks:
                parts.append(_mark(one, x + 11, y - 4, colour, ""))
            parts.append(f'<text x="{x + 27:.0f}" y="{y}">{escape(one.name)}</text>')
            x += wide
        return parts, line + 1


def _mark(one: Series, x: float, y: float, colour: str, note: str) -> str:
    look = f'class="hollow" stroke="{colour}"' if one.theirs else f'fill="{colour}"'
    title = f"<title>{escape(note)}</title>" if note else ""
    if one.mark == "square":
        return f'<rect x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4" {look}>{title}</rect>'
    if one.mark == "diamond":
        corners = f"{x:.1f},{y - 4.4:.1f} {x + 4.4:.1f},{y:.1f} {x:.1f},{y + 4.4:.1f} {x - 4.4:.1f},{y:.1f}"
        return f'<polygon points="{corners}" {look}>{title}</polygon>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" {look}>{title}</circle>'


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten over a wide range, with 2 and 5 between them over a narrow one."""
    decades = math.log10(high / low)
    steps = (1,) if decades > 3 else (1, 2, 5) if decades > 0.7 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    return [value for value in found if low <= value <= high]


def _even_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough)
    first = math.ceil(low / step)
    return [i * step for i in range(first, math.floor(high / step) + 1)]

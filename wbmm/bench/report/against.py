"""A run beside an older one: which candidates became slower."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from wbmm.bench.log import Entry
from wbmm.timing import Timing

from .page import Block, Heading, Table, Text
from .runs import Machine

__all__ = ["Change", "against_blocks", "changes"]

LEAST = 0.05  # a change below it is noise
LEFT_OUT = {"layout", "compiled", "autocast", "precision", "device"}  # of a cell's name on the page


@dataclass(frozen=True)
class Change:
    """One candidate of one cell in both runs; `speed` is its new speed over its old one."""

    bench: str
    cell: str
    name: str
    speed: float
    mark: str


def _key(entry: Entry) -> tuple:
    return entry.bench, tuple(sorted((key, str(value)) for key, value in entry.cell.items()))


def _scale(entry: Entry) -> float:
    """The geometric mean of the cell's times: what a cell of another machine is divided by."""
    medians = [timing.median for name in entry.results if (timing := entry.timing(name))]
    return math.exp(sum(map(math.log, medians)) / len(medians)) if medians else 1.0


def _mark(new: Timing, old: Timing, speed: float, scale: float) -> str:
    """Worse or better if the change is beyond noise: more than 5 %, and the quartiles apart."""
    if speed < 1 - LEAST and new.low * scale > old.high:
        return "worse"
    return "better" if speed > 1 + LEAST and new.high * scale < old.low else ""


def changes(new: Sequence[Machine], old: Sequence[Machine]) -> tuple[list[Change], bool]:
    """Every candidate that both runs have, and whether times of the same machine were compared."""
    before = {_key(entry): entry for machine in old for cells in machine.benches.values() for entry in cells}
    same = {machine.name for machine in new} == {machine.name for machine in old}
    found = []
    for entry in (entry for machine in new for cells in machine.benches.values() for entry in cells):
        past = before.get(_key(entry))
        if past is None:
            continue
        scale = 1.0 if same else _scale(past) / _scale(entry)
        text = ", ".join(f"{k} {v}" for k, v in entry.cell.items() if v not in (None, False, "") and k not in LEFT_OUT)
        for name in entry.results:
            one, other = entry.timing(name), past.timing(name)
            if one is not None and other is not None:
                speed = other.median / (one.median * scale)
                found.append(Change(entry.bench, text, name, speed, _mark(one, other, speed, scale)))
    return found, same


def against_blocks(new: Sequence[Machine], old: Sequence[Machine], name: str) -> list[Block]:
    found, same = changes(new, old)
    if not found:
        raise ValueError(f"--against {name}: it has no cell in common with the new run")
    worse, better = (sum(change.mark == mark for change in found) for mark in ("worse", "better"))
    how = "times of the same machine" if same else "another machine: each time over the mean of its cell"
    text = (
        f"{len(found)} figures are in both runs ({how}). {worse} became slower and {better} faster by more than "
        f"{LEAST:.0%} with their quartiles apart."
    )
    shown = sorted((change for change in found if change.mark), key=lambda change: change.speed)
    rows = [[change.bench, change.cell, change.name, f"{change.speed:.2f}x"] for change in shown]
    marks = tuple((i, 3, change.mark) for i, change in enumerate(shown))
    table = [Table(("bench", "cell", "candidate", "new speed over old"), rows, marks=marks)] if rows else []
    return [Heading(f"Against {name}"), Text(text), *table]

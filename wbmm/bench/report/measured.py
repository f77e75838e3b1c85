"""What a report is about: logs by machine and benchmark, the paper's figures under the same keys, and an older run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wbmm.bench.operators import paper_figures
from wbmm.bench.results import Entry, read_log
from wbmm.bench.training import epoch_seconds, paper_epochs
from wbmm.timing import Timing

from .page import Block, Heading, Paragraph, TableBlock

__all__ = [
    "LOGGED",
    "Change",
    "Machine",
    "OpKey",
    "OpSpeeds",
    "against_blocks",
    "as_in_the_paper",
    "changes",
    "load_runs",
    "numbers_of",
    "op_groups",
    "op_speeds",
    "paper_operators",
    "paper_training",
    "ratio",
    "ratio_range",
]

LOGGED = ("op", "model", "edge", "train", "seg", "det")
SAME = ("machine", "threads", "device", "torch")

OpKey = tuple[str, int, int, int]  # method, side of the kernel or window, batch, side of the map
OpSpeeds = dict[OpKey, float]


@dataclass
class Machine:
    """What was measured on one machine with one set of versions.

    Attributes:
        facts: of `wbmm.machine.machine_facts`.
        benches: name to cells.
    """

    facts: dict[str, str]
    benches: dict[str, list[Entry]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        if self.facts.get("device", "cpu").startswith("cuda"):
            return self.facts["machine"]
        return f"{self.facts.get('threads', '?')} threads of {self.facts.get('machine', 'an unknown machine')}"

    def commands(self) -> list[str]:
        return list(dict.fromkeys(entry.command for entries in self.benches.values() for entry in entries))

    def dates(self) -> str:
        found = sorted({entry.facts.get("date", "") for entries in self.benches.values() for entry in entries} - {""})
        return "" if not found else found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def load_runs(paths: Sequence[Path]) -> list[Machine]:
    """The logs in files or folders, one `Machine` for each that they were measured on."""
    found: dict[tuple, Machine] = {}
    for path in paths:
        files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        entries = [entry for file in files if file.is_file() for entry in read_log(file) if entry.bench in LOGGED]
        if not entries:
            raise ValueError(
                f"{path}: there is no log of a benchmark; expected a folder that `wbmm bench op --out` wrote, or a "
                ".jsonl file in one"
            )
        for entry in entries:
            machine = found.setdefault(tuple(entry.facts.get(key) for key in SAME), Machine(entry.facts))
            machine.benches.setdefault(entry.bench, []).append(entry)
    return list(found.values())


def numbers_of(entry: Entry) -> str:
    """In which numbers a cell was computed, and whether compiled; empty for float32 in eager PyTorch."""
    dtype = entry.cell.get("dtype", "float32")
    words = [] if dtype == "float32" else [f"{dtype} autocast" if entry.cell.get("autocast") else str(dtype)]
    return ", ".join([*words, *["compiled"] * bool(entry.cell.get("compiled"))])


def as_in_the_paper(entry: Entry) -> bool:
    """Whether its findings can be put to a cell: float32, eager, and of an operator the forward pass."""
    return not numbers_of(entry) and entry.cell.get("mode", "forward") == "forward"


def op_groups(entries: Sequence[Entry]) -> dict[tuple, list[Entry]]:
    """Cells of the operator by (type, layout, mode, precision, channels); what the paper measured comes first."""
    keys = ("dtype", "layout", "mode", "precision", "channels")
    groups: dict[tuple, list[Entry]] = {}
    for entry in entries:
        if "map" in entry.cell:
            groups.setdefault(tuple(entry.cell[key] for key in keys), []).append(entry)
    return dict(sorted(groups.items(), key=lambda item: item[0][:3] != ("float32", "nchw", "forward")))


def op_speeds(entries: Sequence[Entry]) -> OpSpeeds:
    """Images a second; a backend's method is `WBMM (name)`, a compiled one's ends in `, compiled`."""
    found: OpSpeeds = {}
    for entry in entries:
        for name in entry.results if "map" in entry.cell else ():
            timing = entry.timing(name)
            if timing is not None:
                found[(*split_name(name), entry.cell["batch"], entry.cell["map"])] = entry.cell["batch"] / timing.median
    return found


def split_name(name: str) -> tuple[str, int]:
    """`WBMM 7x7 (onednn)` as `WBMM (onednn)` and 7."""
    method, _, rest = name.partition(" ")
    size, _, more = rest.partition("x")
    tail = more[len(size) :]
    return f"{method}{tail}", int(size)


def paper_operators() -> OpSpeeds:
    return paper_figures()


def paper_training() -> dict[tuple[str, str], tuple[int, float]]:
    """Seconds of an ImageNet epoch on 8 A800 and GB of each of them, by (size, net)."""
    return {key: (epoch_seconds(time), gb) for key, (time, gb) in paper_epochs().items()}


def ratio(timing: Timing | None, over: Timing | None) -> float | None:
    """How much faster `timing` is than `over`."""
    return None if timing is None or over is None else over.median / timing.median


def ratio_range(timing: Timing, over: Timing) -> tuple[float, float]:
    """The ratio at the quartiles of both."""
    return over.low / timing.high, over.high / timing.low


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
    table = [TableBlock(("bench", "cell", "candidate", "new speed over old"), rows, marks=marks)] if rows else []
    return [Heading(f"Against {name}"), Paragraph(text), *table]

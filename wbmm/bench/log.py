"""Results as they come: a line of JSON for each cell, so that a stopped run continues and a report reads every bench.

A cell is what is measured together, all candidates in turn: one batch size at one image size, say. Its line has the
cell, the result of each candidate, the machine and the command. A cell is written whole or not at all.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wbmm.machine import machine_facts
from wbmm.text import render_table
from wbmm.timing import Timing, remove_outliers

__all__ = ["Cell", "Entry", "Result", "RunLog", "add_log_arguments", "plan_text", "read_log", "run_cells"]

Result = dict[str, object]  # `seconds` of each run or round and what else is known, or `why_not`
SAME = ("machine", "threads", "torch", "wbmm")  # what must not change within a log


@dataclass(frozen=True)
class Cell:
    """What is measured together.

    Attributes:
        values: what tells the cell from others, e.g. its batch size.
        names: the candidates.
        measure: measures all of them; a result for each.
        work: how much there is to do, in any unit; with it a budget foresees how long a cell takes. 0: unknown.
    """

    values: dict[str, object]
    names: Sequence[str]
    measure: Callable[[], dict[str, Result]]
    work: float = 0.0

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.values.items() if value not in (None, False, ""))


@dataclass(frozen=True)
class Entry:
    """A line of a log."""

    bench: str
    cell: dict[str, object]
    results: dict[str, Result]
    facts: dict[str, str] = field(default_factory=dict)
    command: str = ""

    def timing(self, name: str) -> Timing | None:
        """Of a candidate, outliers removed; None if it did not run."""
        seconds = self.results.get(name, {}).get("seconds")
        return Timing(tuple(remove_outliers(seconds))) if seconds else None


def read_log(path: Path) -> list[Entry]:
    """The cells of a log in their order, the last measurement of each; a line that a kill cut off is left out."""
    found: dict[tuple[str, str], Entry] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            entry = Entry(**json.loads(line))
        except (json.JSONDecodeError, TypeError):
            continue
        found[entry.bench, _key(entry.cell)] = entry
    return list(found.values())


def _key(cell: dict[str, object]) -> str:
    return json.dumps(cell, sort_keys=True)


class RunLog:
    """The log of one run, `FOLDER/BENCH.jsonl`; without a folder nothing is kept.

    Args:
        folder: of `--out`.
        bench: name of the benchmark.
        command: that measures the same again.
        device: that is measured on.
        fresh: measure what is there already again.
    """

    def __init__(self, folder: Path | None, bench: str, command: str, device: str = "cpu", fresh: bool = False) -> None:
        self.path = None if folder is None else folder / f"{bench}.jsonl"
        self.bench, self.command, self.facts = bench, command, machine_facts(device)
        entries = [] if self.path is None or fresh else read_log(self.path)
        self._check(entries)
        self._found = {_key(entry.cell): entry.results for entry in entries}

    def _check(self, entries: list[Entry]) -> None:
        for entry in entries:
            for key in SAME:
                before, now = entry.facts.get(key), self.facts.get(key)
                if before != now:
                    raise ValueError(
                        f"{self.path} was measured with {key} {before}, and this is {now}: choose another --out, or "
                        "measure it again with --fresh"
                    )

    def find(self, cell: Cell) -> dict[str, Result] | None:
        """What was measured before, if that has all candidates: those of one cell are measured together."""
        found = self._found.get(_key(cell.values), {})
        return {name: found[name] for name in cell.names} if set(cell.names) <= set(found) else None

    def add(self, cell: Cell, results: dict[str, Result]) -> None:
        self._found[_key(cell.values)] = results
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        entry = {
            "bench": self.bench,
            "cell": cell.values,
            "results": results,
            "facts": self.facts,
            "command": self.command,
        }
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(("\n" if _cut_off(self.path) else "") + json.dumps(entry) + "\n")


def _cut_off(path: Path) -> bool:
    """Whether a kill left a line without its end."""
    with open(path, "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def run_cells(cells: Sequence[Cell], log: RunLog, budget: float | None = None) -> list[Entry]:
    """Measures what the log does not have, and adds it as it comes.

    Args:
        cells: in the order in which they run.
        log: of this run.
        budget: minutes. A cell that would end later, going by the one before it, is not started.
    """
    started, entries, kept, left = time.monotonic(), [], 0, 0
    pace: tuple[float, float] | None = None  # seconds and work of the last cell that was measured
    for number, cell in enumerate(cells, 1):
        results = log.find(cell)
        kept += results is not None
        if results is None:
            begun = time.monotonic()
            if budget is not None and begun - started + _foreseen(cell, pace) > 60 * budget:
                left += 1
                continue
            _say(f"{number}/{len(cells)}: {cell}")
            results = cell.measure()
            log.add(cell, results)
            pace = time.monotonic() - begun, cell.work
        entries.append(Entry(log.bench, cell.values, results, log.facts, log.command))
    if kept:
        _say(f"{kept} of {len(cells)} cells were measured before ({log.path}); --fresh measures them again")
    if left:
        _say(f"--budget {budget:g}: {left} of {len(cells)} cells were left out")
    return entries


def _foreseen(cell: Cell, pace: tuple[float, float] | None) -> float:
    """Seconds that a cell will take. More work takes longer in proportion; less is not trusted to take less."""
    if pace is None:
        return 0.0
    seconds, work = pace
    return seconds * max(1.0, cell.work / work) if work else seconds


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every benchmark that runs cell by cell."""
    parser.add_argument("--budget", type=float, metavar="MINUTES", help="start no cell that would end later than this")
    parser.add_argument("--dry-run", action="store_true", help="what would run; nothing is measured")
    parser.add_argument("--fresh", action="store_true", help="measure again what the log in --out has")


def plan_text(cells: Iterable[Cell], log: RunLog, **columns: Callable[[Cell], str]) -> str:
    """A table of what would run."""
    rows = [
        [str(cell), str(len(cell.names)), "yes" if log.find(cell) else "no", *(show(cell) for show in columns.values())]
        for cell in cells
    ]
    heads = ("cell", "candidates", "measured before", *(name.replace("_", " ") for name in columns))
    return render_table(heads, rows)

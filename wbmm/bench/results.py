"""Results of benchmarks: a log of cells as they come, and tables, CSV and Markdown with where they were measured.

A cell is what is measured together, all candidates in turn: one batch size at one image size, say. Its line of JSON has
the cell, the result of each candidate, the machine and the command, and is written whole or not at all. So a run that
was stopped continues, and a report reads every bench.
"""

import argparse
import csv
import io
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from wbmm.io.atomic import atomic_path
from wbmm.machine import machine_facts, measured_line
from wbmm.text import render_table
from wbmm.timing import Timing, remove_outliers

__all__ = [
    "Cell",
    "Entry",
    "Result",
    "RunLog",
    "add_log_arguments",
    "add_output_arguments",
    "check_out",
    "data_name",
    "plan_text",
    "present",
    "read_log",
    "run_cells",
    "say",
    "speed_record",
    "table",
    "to_csv",
    "typed_argv",
    "write_report",
]

# key of a record: its column's heading and how a value is shown; a column that no record has is left out
COLUMNS = {
    "model": ("model", "{}"),
    "numbers": ("numbers", "{}"),
    "top1": ("top-1 %, published", "{:.1f}"),
    "image": ("image", "{}"),
    "batch": ("batch", "{}"),
    "first": ("first path (median)", "{}"),
    "second": ("second path (median)", "{}"),
    "images_per_s": ("images/s (median)", "{:.2f}"),
    "images_per_s_best": ("images/s (best)", "{:.2f}"),
    "ratio": ("ratio of medians", "{:.2f}x"),
    "ratio_best": ("ratio of bests", "{:.2f}x"),
    "over": ("ratio to", "{}"),
    "accuracy": ("top-1, %", "{:.2f}"),
    "agreement": ("same top-1 as float32, %", "{:.2f}"),
    "layout": ("layout", "{}"),
    "paper_images_per_s": ("paper: images/s", "{:g}"),
    "paper_ratio": ("paper: ratio", "{:.2f}x"),
    "gmacs": ("multiply-adds, G", "{:.2f}"),
    "share": ("share of the limit", "{:.2f}"),
    "peak_mb": ("peak memory, MB", "{:.0f}"),
    "params": ("params M", "{:.1f}"),
    "epoch": ("ImageNet epoch here", "{}"),
    "paper_epoch": ("paper: epoch, 8 A800", "{}"),
    "paper_memory_gb": ("paper: GB", "{:g}"),
    "taken": ("taken", "{}"),
    "calls": ("calls", "{:g}"),
    "ms": ("ms", "{:.2f}"),
    "part": ("share of the time", "{:.2f}"),
}
NONE = "--"
NOT_THE_SAME = ("out", "markdown", "dry_run", "fresh", "budget")  # options that change no figure

Record = dict[str, object]


def speed_record(model: str, batch: int, timing: Timing, baseline: Timing) -> Record:
    """What every benchmark of speed reports of one model at one batch size."""
    return {
        "model": model,
        "batch": batch,
        "images_per_s": batch / timing.median,
        "images_per_s_best": batch / timing.best,
        "ratio": baseline.median / timing.median,
        "ratio_best": baseline.best / timing.best,
    }


def table(records: Sequence[Record], markdown: bool = False, first: str = "model") -> str:
    """Records in columns; `first` is the heading of the first one."""
    keys = [key for key in COLUMNS if any(key in record for record in records)]
    headers = [first if key == "model" else COLUMNS[key][0] for key in keys]
    rows = [[COLUMNS[key][1].format(record[key]) if key in record else NONE for key in keys] for record in records]
    return render_table(headers, rows, markdown=markdown)


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the table there, as CSV and Markdown")


def present(
    args: argparse.Namespace,
    bench: str,
    records: Sequence[Record],
    columns: Mapping[str, object],
    argv: Sequence[str],
    note: str,
    first: str = "model",
) -> int:
    """Prints the table and, with `--out`, writes the files; arguments as of `write_report`."""
    if not records:
        print("nothing was measured")
        return 0
    print(table(records, markdown=args.markdown, first=first))
    threads = torch.get_num_threads()
    print(f"\n{note}\n{threads} thread{'' if threads == 1 else 's'}, torch {torch.__version__}")
    if args.out is not None:
        page, sheet = write_report(args.out, bench, records, columns, argv, note, first)
        print(f"written to {page} and {sheet}")
    return 0


def check_out(folder: Path, bench: str) -> tuple[Path, Path]:
    """The Markdown and the CSV file of a benchmark; an error if something else stands there."""
    page, sheet = folder / f"{bench}.md", folder / f"{bench}.csv"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder}: it is a file; expected a folder")
    for path, start in ((page, _heading(bench)), (sheet, "bench,")):
        if path.exists() and not path.read_text(encoding="utf-8").startswith(start):
            raise ValueError(f"{path} is not of `wbmm bench {bench}`: choose another --out")
    return page, sheet


def write_report(
    folder: Path,
    bench: str,
    records: Sequence[Record],
    columns: Mapping[str, object],
    argv: Sequence[str],
    note: str,
    first: str = "model",
) -> tuple[Path, Path]:
    """Writes both files, each whole or not at all.

    Args:
        folder: made if there is none.
        bench: name of the benchmark.
        records: of the models.
        columns: of the CSV, with what all records share, such as the size of the images.
        argv: arguments of `wbmm bench <bench>`.
        note: what the figures mean, under the table.
        first: heading of the first column.
    """
    page, sheet = check_out(folder, bench)
    folder.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["wbmm", "bench", bench, *argv])
    facts = machine_facts(str(columns.get("device", "cpu")))
    text = (
        f"{_heading(bench)}\n{table(records, markdown=True, first=first)}\n\n{note}\n\n{measured_line(facts)}\n\n"
        f"```sh\n{command}\n```\n"
    )
    rows = [{"bench": bench, **record, **columns, **facts, "command": command} for record in records]
    for path, content in ((page, text), (sheet, to_csv(rows))):
        with atomic_path(path, force=True) as temporary:
            temporary.write_text(content, encoding="utf-8")
    return page, sheet


def to_csv(rows: Sequence[Record]) -> str:
    """Rows of any keys as CSV; a key that a row lacks is an empty cell."""
    out = io.StringIO()
    fields = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(out, fields, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})
    return out.getvalue()


def _heading(bench: str) -> str:
    return f"# wbmm bench {bench}\n"


def data_name(data: Path) -> str:
    """A folder of images as a page names it: nothing of where one machine keeps it."""
    return "/".join(data.parts[-2:]) if data.is_absolute() else data.as_posix()


def say(text: str) -> None:
    """What is being done, on standard error."""
    print(text, file=sys.stderr, flush=True)


def typed_argv(add_arguments: Callable[[argparse.ArgumentParser], None], args: argparse.Namespace) -> list[str]:
    """The arguments that measure the same again: what was given and not the defaults."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    argv: list[str] = []
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if action.dest in ("help", *NOT_THE_SAME) or value == action.default:
            continue
        if action.option_strings:
            argv.append(action.option_strings[0] if value is not False else f"--no-{action.dest}")
        if not isinstance(value, bool):
            argv += map(str, value if isinstance(value, list | tuple) else [value])
    return argv


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

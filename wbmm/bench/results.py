"""What benchmarks share: options, and results as a table, CSV and Markdown with where and how they were measured."""

import argparse
import csv
import io
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from wbmm.io.atomic import atomic_path
from wbmm.machine import machine_facts, measured_line
from wbmm.text import render_table
from wbmm.timing import Timing

__all__ = [
    "add_output_arguments",
    "check_out",
    "data_name",
    "present",
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

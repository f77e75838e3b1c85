"""`wbmm runs DIR`: the runs below a folder side by side, with the settings in which they differ."""

import argparse
from pathlib import Path

from wbmm.text import render_table

from .console import duration
from .metrics import FILE
from .report import RunFacts, read_run, top1_of

__all__ = ["EXAMPLE", "add_arguments", "compare_runs", "find_runs", "run"]

EXAMPLE = "wbmm runs runs --sort top1"
NOT_SETTINGS = {"out", "resume", "device", "log.name", "data.workers"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a run's folder, or one that holds runs at any depth")
    parser.add_argument("--sort", choices=("name", "top1"), default="name", help="order of the rows")
    parser.add_argument("--markdown", action="store_true", help="a Markdown table")


def run(args: argparse.Namespace) -> int:
    runs = [read_run(folder) for folder in find_runs(args.folder)]
    if args.sort == "top1":
        runs.sort(key=lambda item: -(top1_of(item.best) or 0))
    print(compare_runs(runs, args.folder, args.markdown))
    return 0


def find_runs(folder: Path) -> list[Path]:
    """The folders at or below `folder` that hold metrics."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    found = sorted(path.parent for path in folder.rglob(FILE))
    if not found:
        raise ValueError(f"no run below {folder}: no folder holds a {FILE}")
    return found


def compare_runs(runs: list[RunFacts], base: Path, markdown: bool = False) -> str:
    """A table, one row a run."""
    differing = _differing([_flat(item.config) for item in runs])
    head = ["run", "status", "epoch", "best top1", "final top1", "loss", "images/s", "wait", "time", *differing]
    rows = [_row(item, base, differing) for item in runs]
    return render_table(head, rows, markdown)


def _row(item: RunFacts, base: Path, differing: list[str]) -> list[str]:
    name = str(item.folder.relative_to(base)) if item.folder != base else item.folder.name
    last = (item.train or item.eval or [{}])[-1]
    cells = [
        name,
        item.status,
        f"{last.get('epoch', 0):.3g}/{item.get('schedule.epochs')}",
        _number(top1_of(item.best), ".2f"),
        _number(top1_of(item.final), ".2f"),
        _number(item.train[-1]["loss"] if item.train else None, ".4f"),
        _number(item.typical("images_per_s"), ",.0f"),
        _number(item.data_wait(), ".1%"),
        duration(item.seconds),
    ]
    return cells + [str(_flat(item.config).get(key, "-")) for key in differing]


def _number(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


def _flat(config: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in config.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def _differing(configs: list[dict]) -> list[str]:
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if key not in NOT_SETTINGS and len({repr(config.get(key)) for config in configs}) > 1]

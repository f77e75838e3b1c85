"""`wbmm train`: from a folder of pictures, or from a configuration, to a trained model, its mistakes and its files."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from wbmm.data.discover import FORMS
from wbmm.deploy.export import PACKAGES
from wbmm.deploy.run_report import EXPORTS, finish_run
from wbmm.extras import need
from wbmm.handler import INTERRUPTED, run_command
from wbmm.text import first_line, render_table, terminal_width
from wbmm.train.config import TrainConfig, load_config
from wbmm.train.fit import Result, fit
from wbmm.train.guard import NOTHING_TO_SAVE
from wbmm.train.lr_find import draw_search, find_rate
from wbmm.train.recipe import EPOCHS, MODEL, SCRATCH, SIZE, choose_recipe

__all__ = ["EXAMPLE", "add_arguments", "main", "run"]

EXAMPLE = "wbmm train --data photos --model wbmm_a --epochs 20\n  wbmm train digits out=runs/digits"
FOR_DATA = ("model", "epochs", "size", "init")
TWO_WAYS = f"""wbmm train is called in one of two ways:

  wbmm train --data DIR [--model {MODEL}] [--epochs {EPOCHS}] [--size {SIZE}]   your own pictures, no configuration
  wbmm train CONFIG [key=value ...]                                    a configuration, e.g. digits or imagenet/wbmm_t

DIR holds {FORMS}.
`wbmm train --help` shows the rest."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config = "a YAML file, a name (imagenet/wbmm_t) or a row of a table (table:windows/hier); not with --data"
    parser.add_argument("config", nargs="?", help=config)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. out=runs/first batch=64")
    parser.add_argument("--data", metavar="DIR", help=f"train on {FORMS}")
    parser.add_argument("--model", metavar="NAME", help=f"with --data: a name that timm knows (default: {MODEL})")
    parser.add_argument("--epochs", type=int, metavar="N", help=f"with --data (default: {EPOCHS})")
    size = f"with --data: of the images (default: {SIZE}, or that of the weights)"
    parser.add_argument("--size", type=int, metavar="PIXELS", help=size)
    init = (
        f"with --data: a file or a run's folder to start from, or {SCRATCH} (default: published weights, if reachable)"
    )
    parser.add_argument("--init", metavar="FILE", help=init)
    find = "try learning rates, draw the loss for each, suggest one, and train nothing"
    parser.add_argument("--lr-find", action="store_true", help=find)
    parser.add_argument("--export", choices=EXPORTS, help="at the end also a file for this runtime")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="train", description=__doc__)
    add_arguments(parser)
    return run_command("train", lambda: run(parser.parse_intermixed_args(argv)))


def run(args: argparse.Namespace) -> int:
    if args.data is None and args.config is None:
        print(TWO_WAYS, file=sys.stderr)
        return 2
    for package in PACKAGES[args.export] if args.export else ():
        need(package, f"--export {args.export}")  # before training, not after it
    try:
        config = _choose(args) if args.data is not None else _load(args)
        if args.export and not config.log.report:
            raise ValueError("--export is part of what log.report=false leaves out")
        if args.lr_find:
            return _find_rate(config)
        result = fit(config, show_config=args.data is None)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(str(error) or NOTHING_TO_SAVE) from None
    if result.signal == "SIGINT":
        return INTERRUPTED
    if config.log.report and result.status == "finished" and _is_main():
        return _finish(config, result, args.export)
    return 0


def _is_main() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def _load(args: argparse.Namespace) -> TrainConfig:
    for name in FOR_DATA:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} is for --data DIR; a configuration takes key=value, e.g. schedule.epochs=20")
    return load_config(args.config, args.overrides)


def _choose(args: argparse.Namespace) -> TrainConfig:
    """The configuration for a folder of pictures; what was chosen is printed."""
    overrides = tuple(([args.config] if args.config else []) + args.overrides)
    for text in overrides:
        if "=" not in text:
            raise ValueError(f"{text}: give either a configuration or --data DIR; changes to it are key=value")
    choices = choose_recipe(args.data, overrides=overrides, **{name: getattr(args, name) for name in FOR_DATA})
    if _is_main():
        print(render_table(("what", "chosen", "why"), choices.rows, width=terminal_width()))
        for note in choices.notes:
            print(f"\n{note}")
        print(f"\nAll of it is in {choices.config.out}/config.yaml, which trains the same again.\n", flush=True)
    return choices.config


def _find_rate(config: TrainConfig) -> int:
    search = find_rate(config)
    picture, present = Path(config.out) / "lr_find.png", config.optim.lr
    line = f"suggested learning rate: optim.lr={search.suggestion:g} (the configuration has {present:g})"
    try:
        line += f"; the curve is in {draw_search(search, picture, present)}"
    except ImportError as error:
        line += f"; no curve: {error}"
    print(f"{line}. Nothing was changed: add it to the command to train with it.")
    return 0


def _finish(config: TrainConfig, result: Result, export: str | None) -> int:
    """What a run leaves behind; 1 if the file that was asked for is missing. Other failures are told: the weights are
    safe by now."""
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    try:
        report = finish_run(result.out, export, config.data.workers, device)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"note: trained, but without a look at its mistakes: {first_line(error)}", file=sys.stderr)
        return 1 if export else 0
    print("\n" + report.describe(), flush=True)
    return 1 if export and EXPORTS[export] not in report.files else 0

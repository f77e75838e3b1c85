"""`wbmm train`: from a folder of pictures, or from a configuration, to a trained model and its fused file."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from wbmm.deploy.export import export_model
from wbmm.handler import INTERRUPTED, run_command
from wbmm.io.files import load_model, save_model
from wbmm.models.fuse import fuse
from wbmm.text import render_table
from wbmm.train.config import load_config
from wbmm.train.fit import fit
from wbmm.train.guard import NOTHING_TO_SAVE
from wbmm.train.recipe import EPOCHS, MODEL, SIZE, choose_recipe

__all__ = ["EXAMPLE", "add_arguments", "main", "run"]

EXAMPLE = "wbmm train --data photos --model wbmm_a --epochs 20\n  wbmm train configs/digits.yaml out=runs/digits"
TWO_WAYS = f"""wbmm train is called in one of two ways:

  wbmm train --data DIR [--model {MODEL}] [--epochs {EPOCHS}] [--size {SIZE}]   your pictures, no configuration
  wbmm train CONFIG [key=value ...]                                    a configuration, e.g. imagenet/wbmm_t

`wbmm train --help` shows the rest."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config = "a YAML file, a name (imagenet/wbmm_t) or a row of a table (table:windows/hier); not with --data"
    parser.add_argument("config", nargs="?", help=config)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. data.root=/data/imagenet batch=64")
    forms = "train/ and val/ of class folders, class folders alone, a CSV file of paths and labels, or shards"
    parser.add_argument("--data", metavar="DIR", help=f"train on {forms}")
    parser.add_argument("--model", metavar="NAME", help=f"with --data: a name that timm knows (default: {MODEL})")
    parser.add_argument("--epochs", type=int, metavar="N", help=f"with --data (default: {EPOCHS})")
    parser.add_argument("--size", type=int, metavar="PIXELS", help=f"with --data: of the images (default: {SIZE})")
    parser.add_argument("--init", metavar="FILE", help="with --data: weights to start from")
    parser.add_argument("--export", choices=("onnx", "openvino"), help="at the end also a file for this runtime")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="train", description=__doc__)
    add_arguments(parser)
    return run_command("train", lambda: run(parser.parse_intermixed_args(argv)))


def run(args: argparse.Namespace) -> int:
    if args.data is None and args.config is None:
        print(TWO_WAYS, file=sys.stderr)
        return 2
    try:
        config = _choose(args) if args.data is not None else _load(args)
        result = fit(config)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(str(error) or NOTHING_TO_SAVE) from None
    if result.signal == "SIGINT":
        return INTERRUPTED
    if result.status == "finished" and (args.data is not None or args.export) and int(os.environ.get("RANK", 0)) == 0:
        _finish(result.out, args.export)
    return 0


def _load(args: argparse.Namespace):
    for name in ("model", "epochs", "size", "init"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} is for --data DIR; a configuration takes key=value, e.g. schedule.epochs=20")
    return load_config(args.config, args.overrides)


def _choose(args: argparse.Namespace):
    """The configuration for a folder of pictures; what was chosen is printed."""
    overrides = tuple(([args.config] if args.config else []) + args.overrides)
    for text in overrides:
        if "=" not in text:
            raise ValueError(f"{text}: give either a configuration or --data DIR; changes to it are key=value")
    given = {
        name: getattr(args, name) for name in ("model", "epochs", "size", "init") if getattr(args, name) is not None
    }
    choices = choose_recipe(args.data, overrides=overrides, **given)
    if int(os.environ.get("RANK", 0)) == 0:
        print(render_table(("what", "chosen", "why"), choices.rows), flush=True)
        print(f"\nAll of it is in {choices.config.out}/config.yaml, which trains the same again.\n", flush=True)
    return choices.config


def _finish(out: Path, export: str | None) -> None:
    """The fused file of the best weights, beside it a file for a runtime, and how to use them."""
    best = next(path for path in (out / "best.pt", out / "last.pt") if path.is_file())
    fused = fuse(load_model(best), "compact")
    file = out / "fused.safetensors"
    save_model(fused, file, force=True)
    lines = [f"wbmm predict {file} PICTURES", f"wbmm export {file} --format onnx"]
    if export:
        target = out / ("model.onnx" if export == "onnx" else "model.xml")
        export_model(fused, target, dynamic_batch=True, force=True)
        lines[1] = f"wbmm predict {target} PICTURES"
    print(f"\nThe best weights of this run, fused: {file}\n  " + "\n  ".join(lines))

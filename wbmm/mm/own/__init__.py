"""Data of one's own: what is in a folder, and a configuration for it.

`seg` and `det` are `wbmm train-seg` and `wbmm train-det`, and `masks` looks at folders of images with masks. Here is
what both commands share: arguments, starting weights, the configuration, the call. None of it needs an mm package
before training starts.
"""

import argparse
import os
import shlex
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import timm

from wbmm.io.atomic import atomic_path
from wbmm.models.hub import published_weights
from wbmm.models.state import CheckpointError
from wbmm.text import render_table
from wbmm.zoo import load_zoo

from ..backbone import timm_depths
from ..tools import prepare_packages, train

__all__ = ["Choices", "add_shared_arguments", "choose_start", "choose_workers", "train_on_own_data"]


MODEL = "wbmm_t_dense"
CONFIG = "config.py"
LEAST_SIZE = 32  # pixels: the last stage then sees one
FEW_STEPS = 20_000  # below, blocks from scratch would not get going from a layer scale of 1e-6


@dataclass
class Choices:
    """A configuration to be written.

    Attributes:
        base: the file that it starts from, `wbmm::own/NAME.py`.
        variables: what it sets.
        backbone: more arguments of the backbone.
        rows: what was found or chosen, its value and why.
    """

    base: str
    variables: dict = field(default_factory=dict)
    backbone: dict = field(default_factory=dict)
    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def choose(self, what: str, why: str = "", **variables) -> None:
        """Sets variables, with a row for people."""
        self.variables |= variables
        self.rows.append((what, " ".join(map(_short, variables.values())), why))

    def text(self, command: str) -> str:
        lines = [f'_base_ = "{self.base}"', ""]
        lines += [f"{name} = {value!r}" for name, value in self.variables.items()]
        if self.backbone:
            lines.append(f"model = dict(backbone={self.backbone!r})")
        body = "\n".join(lines) + "\n"
        return f"# Written by `{command}` ({_digest(body)}).\n{body}"


def _digest(body: str) -> str:
    return f"{zlib.crc32(body.encode()):08x}"


def _is_edited(file: Path) -> bool:
    """Whether a configuration is another one than `Choices.text` wrote."""
    head, _, body = file.read_text(encoding="utf-8").partition("\n")
    return not head.endswith(f"({_digest(body)}).")


def _short(value: object) -> str:
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(side, int) for side in value):
        return f"{value[0]}x{value[1]}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the folder to look at")
    parser.add_argument("--model", default=MODEL, help=f"backbone: of ours, or a name of timm's (default: {MODEL})")
    parser.add_argument("--init", metavar="FILE", help="weights of the backbone; published ones are taken otherwise")
    parser.add_argument("--size", type=int, metavar="PIXELS", help="short side of the images (default: by the data)")
    parser.add_argument("--batch", type=int, metavar="N", help="images a step and process")
    parser.add_argument("--small-heads", action="store_true", help="narrow heads, for small data and for CPUs")
    parser.add_argument("--work-dir", type=Path, help="output folder (default: work_dirs/NAME OF THE FOLDER-MODEL)")
    parser.add_argument("--resume", action="store_true", help="continue the run in the work folder")
    parser.add_argument("--dry-run", action="store_true", help="write the configuration, and do not train")
    parser.add_argument("--cfg-options", nargs="+", default=[], metavar="KEY=VALUE", help="e.g. lr=5e-5 crop=(256,256)")


def choose_start(choices: Choices, model: str, init: str | None, steps: int, lr: dict[bool, float]) -> None:
    """The backbone, its weights, and the learning rate that fits a start from weights (True) or from scratch."""
    if model not in load_zoo() and not timm.is_model(model):
        raise ValueError(f"--model {model}: neither ours nor timm's; `wbmm list` shows ours")
    if model not in load_zoo():
        timm_depths(model)  # an error now, where it gives no maps of four stages
    choices.choose("backbone", f"--model, or the default {MODEL}", arch=model)
    source, why = init, "as given by --init"
    if init is None and model in load_zoo():
        try:
            found = published_weights(model)
            source, why = (str(found), "published") if found else (None, "none are published; --init FILE")
        except CheckpointError as error:
            why = str(error)
    elif init is None:
        why = "--init FILE, or a name of timm's such as convnext_atto.d2_in1k"
    elif not Path(init).is_file() and not timm.is_model(init.partition(".")[0]):
        raise ValueError(f"--init {init}: there is no such file, and timm knows no such model")
    place = os.path.abspath(source) if source and Path(source).is_file() else source
    choices.variables["init"] = place
    choices.rows.append(("starts from", source or "scratch", why))
    if source is None and model in load_zoo() and steps < FEW_STEPS:
        choices.backbone["ls_init_value"] = 0.1
        choices.rows.append(("layer scale", "0.1", f"{steps:,} steps are few for the family's 1e-6"))
    choices.choose("learning rate", "from weights" if source else "from scratch", lr=lr[source is not None])


def choose_workers(choices: Choices) -> None:
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    workers = max(1, min(4, (os.cpu_count() or 1) // processes - 1))
    choices.choose("data workers", f"{os.cpu_count()} cores", workers=workers)


def train_on_own_data(extra: str, args: argparse.Namespace, choose: Callable[[Path], Choices]) -> int:
    """Writes the configuration into the work folder, shows what was chosen, and trains as tools/train_*.py do.

    Args:
        extra: `seg` or `det`.
        args: of the command line.
        choose: looks at the data; gets the work folder.
    """
    for name, least in (("size", LEAST_SIZE), ("batch", 1)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise ValueError(f"--{name} {getattr(args, name)}: give a number from {least}")
    if not args.dry_run:
        prepare_packages(extra)
    folder = args.work_dir or Path("work_dirs") / f"{args.data.absolute().name}-{args.model.replace('/', '-')}"
    file = folder / CONFIG
    if args.resume and file.is_file():
        print(f"The configuration is {file}, as it is there.", flush=True)
    else:
        _check_free(folder)
        if file.is_file() and _is_edited(file):
            raise ValueError(
                f"{file} was changed by hand: --resume trains with it as it is, and another --work-dir leaves it alone"
            )
        choices = choose(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(file, force=True) as temporary:  # by every process: all write the same
            temporary.write_text(choices.text(f"wbmm train-{extra} --data {args.data.absolute()}"))
        if int(os.environ.get("RANK", 0)) == 0:
            print(render_table(("what", "value", "why"), choices.rows))
            print(
                f"\nAll of it is in {file}, which tools/train_{extra}.py and tools/test_{extra}.py take.\n", flush=True
            )
    if args.dry_run:
        return 0
    argv = [str(file), "--work-dir", str(folder), *(["--resume"] if args.resume else [])]
    train(extra, [*argv, *(["--cfg-options", *args.cfg_options] if args.cfg_options else [])])
    if int(os.environ.get("RANK", 0)) == 0:
        _say_next(extra, folder, file)
    return 0


def _say_next(extra: str, folder: Path, file: Path) -> None:
    best = next(iter([*folder.glob("best_*.pth"), *folder.glob("*_*.pth")]), None)
    command = {"seg": "segment", "det": "detect"}[extra]
    if best is not None:
        print(f"\nThe best weights of this run: {best}")
        weights, config, onnx = (shlex.quote(str(path)) for path in (best, file, folder / "model.onnx"))
        print(f"  wbmm {command} {weights} PICTURES --config {config}")
        print(f"  wbmm export {weights} {onnx} --config {config}")


def _check_free(folder: Path) -> None:
    """Raises if a folder holds a run: its configuration must stay what it was."""
    checkpoints = sorted(folder.glob("*_*.pth"))
    if checkpoints:
        raise ValueError(
            f"{folder} already holds {checkpoints[0].name} of a run: continue it with --resume, or choose another "
            "--work-dir"
        )

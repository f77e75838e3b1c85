"""Checkpoints of a run: written atomically, rotated, and verified part by part when read."""

import copy
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import timm
import torch

from wbmm.io.reader import safe_load
from wbmm.models.state import CheckpointError
from wbmm.version import __version__

from .log import writing

__all__ = [
    "CorruptCheckpoint",
    "Position",
    "check_like",
    "check_optimizer",
    "check_parts",
    "check_weights",
    "clear_stale",
    "environment",
    "latest",
    "part",
    "read",
    "read_position",
    "write",
]

LAST, PREVIOUS, BEST, DAMAGED = "last.pt", "last-1.pt", "best.pt", "last.damaged.pt"


class CorruptCheckpoint(Exception):
    """A checkpoint file that is damaged: truncated, or with a record that fails its checksum."""


@dataclass
class Position:
    """Where a run is. Randomness is a function of it, so that it is all that resuming needs besides the weights."""

    step: int = 0  # optimiser steps done
    evaluated: bool = True  # whether the evaluation that is due at this step has been done
    skips: int = 0  # steps skipped in a row because of a loss that was not finite
    best: float | None = None
    metrics: dict = field(default_factory=dict)  # of the last evaluation


def write(folder: Path, payload: dict, best: bool = False, keep_epoch: int | None = None) -> Path:
    """Writes `payload` as the run's last checkpoint; the one before stays as `last-1.pt`.

    At every moment of this function a kill leaves a whole `last.pt` or `last-1.pt`: the new file is complete on disk
    before it takes its name. A full disk is an error, and leaves what was there before.

    Args:
        folder: The run's folder.
        payload: Tensors, numbers, text, lists and dicts: what `torch.load(weights_only=True)` reads.
        best: Also name it `best.pt`.
        keep_epoch: Also keep it as `epoch-<number>.pt`.
    """
    last = folder / LAST
    with writing(last):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _write(folder, payload, best, keep_epoch)
        finally:
            clear_stale(folder)
    return last


def _write(folder: Path, payload: dict, best: bool, keep_epoch: int | None):
    last, fresh = folder / LAST, folder / f"{LAST}.tmp"
    with open(fresh, "wb") as file:
        try:
            torch.save(payload, file)
        except RuntimeError as error:  # torch's writer raises it over the error of a full disk, or over Ctrl-C
            if isinstance(error.__context__, OSError | KeyboardInterrupt):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())
    if last.exists():
        _link(last, folder / PREVIOUS)
    os.replace(fresh, last)
    if best:
        _link(last, folder / BEST)
    if keep_epoch is not None:
        _link(last, folder / f"epoch-{keep_epoch:04d}.pt")
    _sync_folder(folder)


def clear_stale(folder: Path):
    """Removes what a run that was killed while it wrote a file has left, in a folder that this process has locked."""
    for path in chain(folder.glob("*.pt.tmp"), folder.glob(".*.tmp")):
        path.unlink(missing_ok=True)


def _link(source: Path, target: Path):
    """Gives `source` a second name, replacing that name's old file in one step."""
    fresh = target.with_name(f"{target.name}.tmp")
    fresh.unlink(missing_ok=True)
    try:
        os.link(source, fresh)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, fresh)
    os.replace(fresh, target)


def _sync_folder(folder: Path):
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path) -> dict:
    """Reads a checkpoint of a run; the reader verifies the checksum of every record in it."""
    if not path.is_file():
        raise ValueError(f"no checkpoint file {path}")
    try:
        payload = safe_load(path)
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{path}: ").removeprefix("damaged: ")
        raise CorruptCheckpoint(f"{path} is damaged: {reason}") from error
    if not isinstance(payload, dict) or not {"model", "optimizer", "position", "config"} <= payload.keys():
        raise ValueError(f"{path} holds weights but not a run's state; start from it with init={path}")
    return payload


def latest(folder: Path, say: Callable[[str], None] = lambda text: None) -> Path | None:
    """The newest checkpoint of a run that reads well, or None for a folder with none; all damaged is an error."""
    found = [path for path in (folder / LAST, folder / PREVIOUS) if path.exists()]
    reasons = []
    for path in found:
        try:
            read(path)
        except CorruptCheckpoint as error:
            reasons.append(str(error))
            continue
        if reasons:
            say(f"{reasons[0]}; falling back to {path}, the checkpoint before it")
            os.replace(folder / LAST, folder / DAMAGED)  # or the next save would put it in the good one's place
        return path
    if found:
        raise ValueError(f"no checkpoint in {folder} can be read: {'; '.join(reasons)}")
    return None


def environment() -> dict:
    """Versions and the commit, for the checkpoint to describe itself."""
    return {
        "versions": {
            "wbmm": __version__,
            "torch": str(torch.__version__),
            "timm": timm.__version__,
            "python": platform.python_version(),
        },
        "commit": _git_commit(),
    }


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


NOTHING = type(None)
NAMES = {dict: "a mapping", int: "a whole number", float: "a number", bool: "true or false", NOTHING: "nothing"}
PARTS = {
    "model": (dict,),
    "ema": (dict, NOTHING),
    "optimizer": (dict,),
    "scheduler": (dict,),
    "scaler": (dict,),
    "position": (dict,),
    "config": (dict,),
    "num_classes": (int,),
}
POSITION = {
    "step": (int,),
    "evaluated": (bool,),
    "skips": (int,),
    "best": (float, int, NOTHING),
    "metrics": (dict,),
    "steps_per_epoch": (int,),
}
LONGEST_REASON = 300


@contextmanager
def part(name: str, path: Path) -> Iterator[None]:
    """Turns any error with a part of the checkpoint into one line that names the part and the file."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        reason = text if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: {text}"
        shown = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}..."
        raise ValueError(f"{path}: its part {name!r} does not fit this run: {shown}") from error


def check_parts(saved: dict, path: Path):
    """Raises unless the checkpoint has every part that continuing needs, each of its type."""
    for name, kinds in PARTS.items():
        if name not in saved:
            raise ValueError(f"{path} has no part {name!r}, so a run cannot continue from it")
        with part(name, path):
            _check_type(saved[name], kinds, "it")
    with part("seconds", path):
        _check_type(saved.get("seconds"), (float, int, NOTHING), "it")


def _check_type(value: object, kinds: tuple[type, ...], name: str):
    wrong = not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)
    if wrong or (isinstance(value, float) and not math.isfinite(value)):
        wanted = " or ".join(NAMES[kind] for kind in kinds if not (kind is int and float in kinds))
        raise ValueError(f"{name} should be {wanted}, not {_short(value)}")


def _short(value: object) -> str:
    return type(value).__name__ if isinstance(value, dict | list | tuple | torch.Tensor) else f"{value!r:.60}"


def check_like(value: object, own: object, name: str = "it"):
    """Raises unless `value` is of the types of `own`, all the way down; a mapping may have fewer keys."""
    if isinstance(own, dict):
        _check_type(value, (dict,), name)
        for key, item in value.items():
            if key not in own:
                raise ValueError(f"{name} has an unknown entry {key!r}")
            check_like(item, own[key], repr(key))
    elif isinstance(own, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(own):
            raise ValueError(f"{name} should be {len(own)} values, not {_short(value)}")
        for item, own_item in zip(value, own, strict=True):
            check_like(item, own_item, name)
    elif isinstance(own, bool):
        _check_type(value, (bool,), name)
    elif own is None or isinstance(own, int | float):
        _check_type(value, (float, int, NOTHING), name)
    elif type(value) is not type(own):
        raise ValueError(f"{name} should be of type {type(own).__name__}, not {_short(value)}")


def check_weights(weights: dict, own: dict):
    """Raises on weights of another type than `own`: torch would convert them. Names and shapes torch checks itself."""
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name!r} should be a tensor, not {_short(value)}")
        if name in own and value.dtype != own[name].dtype:
            raise ValueError(f"{name!r} is of {value.dtype}, this run's of {own[name].dtype}")


def check_optimizer(state: dict, optimizer: torch.optim.Optimizer):
    """Takes a step with a copy: torch loads any state, and fails later, or trains wrongly, with that of another run."""
    known = {key for group in optimizer.param_groups for key in group}
    for group in state["param_groups"]:
        unknown = [key for key in group if key not in known]
        if unknown:
            raise ValueError(f"it is of another optimiser: {type(optimizer).__name__} has no option {unknown[0]!r}")
    trial = copy.deepcopy(optimizer)
    trial.load_state_dict(copy.deepcopy(state))
    for group in trial.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    trial.step()


def read_position(saved: dict) -> tuple[Position, int]:
    """The position, and the steps an epoch that it counts in."""
    wrong = POSITION.keys() ^ saved.keys()
    if wrong:
        name = min(wrong, key=str)
        raise ValueError(f"it {'lacks' if name in POSITION else 'has an unknown entry'} {name!r}")
    for name, value in saved.items():
        _check_type(value, POSITION[name], repr(name))
        if name in ("step", "skips") and value < 0:
            raise ValueError(f"{name!r} should be 0 or more, not {value}")
    for name, value in saved["metrics"].items():
        _check_type(value, (float, int), f"the metric {name!r}")
    values = dict(saved)
    steps_per_epoch = values.pop("steps_per_epoch")
    return Position(**values), steps_per_epoch

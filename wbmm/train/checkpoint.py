"""The checkpoint files of a run: written atomically, rotated, and verified when read."""

import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import timm
import torch

from wbmm.io.atomic import link, remove_stale, replacing, sync
from wbmm.io.reader import safe_load
from wbmm.models.state import CheckpointError
from wbmm.version import __version__

from .log import writing

__all__ = ["CorruptCheckpoint", "Position", "environment", "latest", "read", "write"]

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
            remove_stale(folder)
    return last


def _write(folder: Path, payload: dict, best: bool, keep_epoch: int | None):
    last = folder / LAST
    with replacing(last) as fresh:
        with open(fresh, "wb") as file:
            try:
                torch.save(payload, file)
            except RuntimeError as error:  # torch's writer raises it over the error of a full disk, or over Ctrl-C
                if isinstance(error.__context__, OSError | KeyboardInterrupt):
                    raise error.__context__ from None
                raise
        sync(fresh)
        if last.exists():
            link(last, folder / PREVIOUS)
    if best:
        link(last, folder / BEST)
    if keep_epoch is not None:
        link(last, folder / f"epoch-{keep_epoch:04d}.pt")
    sync(folder)


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


def check_free(folder: Path) -> None:
    """Raises where another run would be written over."""
    if (folder / LAST).exists():
        raise ValueError(f"{folder} already holds a run: continue it with resume=auto, or choose another out=")


def latest(folder: Path, say: Callable[[str], None] = lambda text: None) -> tuple[Path, dict] | None:
    """The newest checkpoint of a run that reads well, and its contents; None for a folder with none.

    All damaged is an error.
    """
    found = [path for path in (folder / LAST, folder / PREVIOUS) if path.exists()]
    reasons = []
    for path in found:
        try:
            saved = read(path)
        except CorruptCheckpoint as error:
            reasons.append(str(error))
            continue
        if reasons:
            say(f"{reasons[0]}; falling back to {path}, the checkpoint before it")
            os.replace(folder / LAST, folder / DAMAGED)  # or the next save would put it in the good one's place
        return path, saved
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

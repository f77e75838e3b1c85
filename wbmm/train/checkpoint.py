"""Checkpoints of a run: written atomically, rotated, and verified when read."""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import timm
import torch

from wbmm.io.reader import safe_load
from wbmm.models.state import CheckpointError
from wbmm.version import __version__

from .metrics import writing

__all__ = ["CorruptCheckpoint", "clear_stale", "environment", "latest", "read", "write"]

LAST, PREVIOUS, BEST, DAMAGED = "last.pt", "last-1.pt", "best.pt", "last.damaged.pt"


class CorruptCheckpoint(Exception):
    """A checkpoint file that is damaged: truncated, or with a record that fails its checksum."""


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

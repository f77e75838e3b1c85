"""The parts of a checkpoint, checked before a run continues from it: the file may hold anything."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .engine import Position

__all__ = ["check_like", "check_optimizer", "check_parts", "check_weights", "part", "read_position"]

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

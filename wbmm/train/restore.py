"""Continuing a run: which checkpoint, whether it is of this run, and its state put back part by part."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from . import checkpoint
from .checkpoint import Position
from .config import TrainConfig, config_from_dict, to_dict
from .dist import World, broadcast_object
from .engine import Run

__all__ = ["check_same_run", "find_resume", "restore"]

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


def find_resume(config: TrainConfig, world: World, say: Callable[[str], None]) -> tuple[Path, dict] | None:
    """The checkpoint to continue from and its contents, chosen by rank 0 for all; refuses to write over another run.

    Every process reads the file once.
    """
    path, saved, error = None, None, None
    if world.main:
        try:
            path, saved = _choose(config, say) or (None, None)
        except (ValueError, checkpoint.CorruptCheckpoint) as problem:
            error = str(problem)
    path, error = broadcast_object((path, error), world)
    if error:
        raise ValueError(error)
    if path is None:
        return None
    return path, saved if world.main else checkpoint.read(path)


def _choose(config: TrainConfig, say: Callable[[str], None]) -> tuple[Path, dict] | None:
    out = Path(config.out)
    if config.resume == "auto":
        return checkpoint.latest(out, say)
    if not config.resume:
        checkpoint.check_free(out)
        return None
    path = Path(config.resume)
    if (out / checkpoint.LAST).exists() and path.resolve().parent != out.resolve():
        raise ValueError(f"{out} already holds another run than {path}: choose another out=")
    return path, checkpoint.read(path)


def check_same_run(saved: dict, config: TrainConfig, num_classes: int, path: Path):
    """Raises unless the checkpoint is whole and of this model; before anything is built from it."""
    _check_parts(saved, path)
    with _part("config", path):
        before = config_from_dict(saved["config"], where="it")
    here = (config.model.name, config.model.args, num_classes)
    there = (before.model.name, before.model.args, saved["num_classes"])
    if here != there:
        raise ValueError(
            f"{path} is a checkpoint of another model: {_describe(*there)}; this run is of {_describe(*here)}. "
            f"resume= continues the same run; to start a new one from those weights use init={path}"
        )


def _describe(name: str, args: dict, num_classes: int) -> str:
    return f"{name} with {num_classes} classes" + (f" and {args}" if args else "")


def restore(run: Run, saved: dict, path: Path) -> list[str]:
    """Puts a checkpoint's state into a run; returns what to tell the user."""
    with _part("position", path):
        position, steps_per_epoch = _read_position(saved["position"])
    if steps_per_epoch != run.data.train.steps_per_epoch:
        raise ValueError(
            f"{path} counts {steps_per_epoch} steps per epoch, this run {run.data.train.steps_per_epoch}: "
            "the training set or global_batch has changed, so its position has no meaning here"
        )
    if (saved["ema"] is None) != (run.ema is None):
        raise ValueError(
            f"{path} was saved {'without' if saved['ema'] is None else 'with'} an EMA; set ema.decay alike"
        )
    for name, module in (("model", run.model), ("ema", run.ema.module if run.ema else None)):
        if module is not None:
            with _part(name, path):
                _check_weights(saved[name], module.state_dict())
                module.load_state_dict(saved[name])
    asked = [{key: value for key, value in group.items() if key != "params"} for group in run.optimizer.param_groups]
    with _part("optimizer", path):
        _check_optimizer(saved["optimizer"], run.optimizer)
        groups = zip(saved["optimizer"]["param_groups"], asked, strict=True)
        # Weight decay, betas and so on are the configuration's, not the checkpoint's. Before loading: where Adam's step
        # is counted, on the host or on the device, goes by them.
        groups = [{**group, **options} for group, options in groups]
        run.optimizer.load_state_dict({**saved["optimizer"], "param_groups": groups})
        _match_layout(run.optimizer)
    with _part("scaler", path):
        if run.scaler.is_enabled():
            _check_like(saved["scaler"], run.scaler.state_dict())
        run.scaler.load_state_dict(saved["scaler"])
    run.position = position
    texts = [f"resumed from {path} at step {run.position.step} of {run.total_steps}"]
    before = to_dict(config_from_dict(saved["config"]))  # with the defaults of what the file is too old to have
    changed = _changes(before, to_dict(run.config))
    if changed:
        texts.append(f"changed since that checkpoint: {'; '.join(changed)}")
    else:
        with _part("scheduler", path):
            _check_like(saved["scheduler"], run.scheduler.state_dict())
            run.scheduler.load_state_dict(saved["scheduler"])
    return texts


def _changes(before: dict, after: dict, prefix: str = "") -> list[str]:
    harmless = {"resume", "init", "out", "timeout", "log", "batch", "data.workers", "data.root"}
    changes = []
    for key, value in after.items():
        name, old = prefix + key, before.get(key)
        if name in harmless:
            continue
        if isinstance(value, dict) and isinstance(old, dict):
            changes += _changes(old, value, f"{name}.")
        elif value != old:
            changes.append(f"{name} {old!r} -> {value!r}")
    return changes


@contextmanager
def _part(name: str, path: Path) -> Iterator[None]:
    """Turns any error with a part of the checkpoint into one line that names the part and the file."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        reason = text if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: {text}"
        shown = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}..."
        raise ValueError(f"{path}: its part {name!r} does not fit this run: {shown}") from error


def _check_parts(saved: dict, path: Path):
    """Raises unless the checkpoint has every part that continuing needs, each of its type."""
    for name, kinds in PARTS.items():
        if name not in saved:
            raise ValueError(f"{path} has no part {name!r}, so a run cannot continue from it")
        with _part(name, path):
            _check_type(saved[name], kinds, "it")
    with _part("seconds", path):
        _check_type(saved.get("seconds"), (float, int, NOTHING), "it")


def _check_like(value: object, own: object, name: str = "it"):
    """Raises unless `value` is of the types of `own`, all the way down; a mapping may have fewer keys."""
    if isinstance(own, dict):
        _check_type(value, (dict,), name)
        for key, item in value.items():
            if key not in own:
                raise ValueError(f"{name} has an unknown entry {key!r}")
            _check_like(item, own[key], repr(key))
    elif isinstance(own, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(own):
            raise ValueError(f"{name} should be {len(own)} values, not {_short(value)}")
        for item, own_item in zip(value, own, strict=True):
            _check_like(item, own_item, name)
    elif isinstance(own, bool):
        _check_type(value, (bool,), name)
    elif own is None or isinstance(own, int | float):
        _check_type(value, (float, int, NOTHING), name)
    elif type(value) is not type(own):
        raise ValueError(f"{name} should be of type {type(own).__name__}, not {_short(value)}")


def _check_weights(weights: dict, own: dict):
    """Raises on weights of another type than `own`: torch would convert them. Names and shapes torch checks itself."""
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name!r} should be a tensor, not {_short(value)}")
        if name in own and value.dtype != own[name].dtype:
            raise ValueError(f"{name!r} is of {value.dtype}, this run's of {own[name].dtype}")


def _check_optimizer(state: dict, optimizer: torch.optim.Optimizer):
    """Takes a step with a copy: torch loads any state, and fails later, or trains wrongly, with that of another run."""
    known = {key for group in optimizer.param_groups for key in group}
    for group in state["param_groups"]:
        unknown = [key for key in group if key not in known]
        if unknown:
            raise ValueError(f"it is of another optimiser: {type(optimizer).__name__} has no option {unknown[0]!r}")
    trial = copy.deepcopy(optimizer)
    trial.load_state_dict(copy.deepcopy(state))
    _match_layout(trial)
    for group in trial.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    trial.step()


def _match_layout(optimizer: torch.optim.Optimizer):
    """Lays out the state in memory as the weights are, which fused optimisers ask for: `channels_last` may change."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _read_position(saved: dict) -> tuple[Position, int]:
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


def _check_type(value: object, kinds: tuple[type, ...], name: str):
    wrong = not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)
    if wrong or (isinstance(value, float) and not math.isfinite(value)):
        wanted = " or ".join(NAMES[kind] for kind in kinds if not (kind is int and float in kinds))
        raise ValueError(f"{name} should be {wanted}, not {_short(value)}")


def _short(value: object) -> str:
    return type(value).__name__ if isinstance(value, dict | list | tuple | torch.Tensor) else f"{value!r:.60}"

"""From a configuration to a model, its starting weights, a run, and a run that continues another."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn as nn
from timm.layers import convert_sync_batchnorm
from timm.utils import ModelEmaV3
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from wbmm.io.card import read_card
from wbmm.io.reader import read_checkpoint
from wbmm.io.weights import load_weights, read_state_dict
from wbmm.models.identify import identify
from wbmm.models.state import CheckpointError

from . import checkpoint
from .checkpoint import check_like, check_optimizer, check_parts, check_weights, part, read_position
from .config import TrainConfig, config_from_dict, to_dict
from .dist import World, broadcast_object
from .engine import Run
from .known import create_model
from .optim import freeze

__all__ = [
    "build_ema",
    "build_model",
    "check_same_run",
    "find_resume",
    "init_weights",
    "restore",
    "set_reproducible",
    "wrap",
]


def init_weights(model: nn.Module, path: Path, resize_tables: bool = False) -> str:
    """Loads `path` into `model` and says what was done.

    A classifier of another number of classes stays as initialised; anything else that does not fit is an error.

    Args:
        model: The model to start.
        path: A run's checkpoint (its moving average, if it has one), or a file of weights.
        resize_tables: Interpolate tables of other window sizes.
    """
    state_dict = dict(read_state_dict(path))
    seen = identify(state_dict)
    if seen is not None and seen.form != "training":
        raise CheckpointError(
            f"{path} is fused ({seen.form} form), which cannot be trained: batch norms and branches are folded into "
            f"its weights. Fine-tuning needs the training checkpoint that it was made from{_source(path)}"
        )
    own = model.state_dict()
    fresh = [
        key
        for key in _classifier_keys(model)
        if key in own and (key not in state_dict or _has_other_classes(state_dict[key], own[key]))
    ]
    state_dict.update({key: own[key] for key in fresh})
    try:
        load_weights(model, state_dict, resize_tables=resize_tables)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    head = f"; the classifier is new ({', '.join(fresh)})" if fresh else ""
    return f"started from the weights in {path}{head}"


def _has_other_classes(value: Tensor, own: Tensor) -> bool:
    return value.ndim == own.ndim and value.shape[1:] == own.shape[1:] and len(value) != len(own)


def _source(path: Path) -> str:
    card = read_card(read_checkpoint(path))
    return f": {card.source['file']}" if card and card.source else ""


def _classifier_keys(model: nn.Module) -> list[str]:
    classifier = model.get_classifier()
    names = [name for name, module in model.named_modules() if module is classifier]
    return [f"{name}.{part}" for name in names for part in ("weight", "bias")]


def set_reproducible(config: TrainConfig):
    torch.manual_seed(config.seed)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False


def build_model(config: TrainConfig, num_classes: int, world: World) -> nn.Module:
    """The model by its timm name, on its device, with what is frozen frozen."""
    options = config.model
    model = create_model(options.name, options.args, options.drop_path, config.data.in_chans, num_classes)
    if config.model.grad_checkpointing:
        model.set_grad_checkpointing()
    freeze(model, config.model.freeze)
    if config.model.sync_bn:
        if world.device.type == "cuda":
            model = convert_sync_batchnorm(model)
        elif world.size > 1:
            raise ValueError("model.sync_bn needs CUDA: torch has no SyncBatchNorm for the CPU; set it to false")
    layout = torch.channels_last if config.model.channels_last else torch.contiguous_format
    return model.to(world.device, memory_format=layout)


def build_ema(model: nn.Module, config: TrainConfig) -> ModelEmaV3 | None:
    if config.ema.decay is None:
        return None
    return ModelEmaV3(model, decay=config.ema.decay, use_warmup=config.ema.warmup)


def wrap(model: nn.Module, config: TrainConfig, world: World) -> nn.Module:
    """Compiles the model if asked, in place so that its names stay, and puts DDP around it for several processes."""
    if config.model.compile:
        model.compile()
    if world.size == 1:
        return model
    # Buffers in no state dict are constants (the index of a window), which DDP would send to all at every step.
    constants = sorted({name for name, _ in model.named_buffers()} - model.state_dict().keys())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, constants)
    return DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )


def find_resume(config: TrainConfig, world: World, say: Callable[[str], None]) -> Path | None:
    """The checkpoint to continue from, chosen by rank 0 for all; refuses to write over another run."""
    out = Path(config.out)
    found, error = None, None
    if world.main:
        try:
            if config.resume == "auto":
                found = checkpoint.latest(out, say)
            elif config.resume:
                found = Path(config.resume)
                if (out / checkpoint.LAST).exists() and found.resolve().parent != out.resolve():
                    raise ValueError(f"{out} already holds another run than {found}: choose another out=")
                checkpoint.read(found)
            elif (out / checkpoint.LAST).exists():
                raise ValueError(f"{out} already holds a run: continue it with resume=auto, or choose another out=")
        except (ValueError, checkpoint.CorruptCheckpoint) as problem:
            error = str(problem)
    found, error = broadcast_object((found, error), world)
    if error:
        raise ValueError(error)
    return found


def check_same_run(saved: dict, config: TrainConfig, num_classes: int, path: Path):
    """Raises unless the checkpoint is whole and of this model; before anything is built from it."""
    check_parts(saved, path)
    with part("config", path):
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
    with part("position", path):
        position, steps_per_epoch = read_position(saved["position"])
    if steps_per_epoch != run.data.train.steps_per_epoch:
        raise ValueError(
            f"{path} counts {steps_per_epoch} steps an epoch, this run {run.data.train.steps_per_epoch}: "
            "the training set or global_batch has changed, so its position has no meaning here"
        )
    if (saved["ema"] is None) != (run.ema is None):
        raise ValueError(
            f"{path} was saved {'without' if saved['ema'] is None else 'with'} an EMA; set ema.decay alike"
        )
    for name, module in (("model", run.model), ("ema", run.ema.module if run.ema else None)):
        if module is not None:
            with part(name, path):
                check_weights(saved[name], module.state_dict())
                module.load_state_dict(saved[name])
    asked = [{key: value for key, value in group.items() if key != "params"} for group in run.optimizer.param_groups]
    with part("optimizer", path):
        check_optimizer(saved["optimizer"], run.optimizer)
        run.optimizer.load_state_dict(saved["optimizer"])
    for group, options in zip(run.optimizer.param_groups, asked, strict=True):
        group.update(options)  # weight decay, betas and so on are the configuration's, not the checkpoint's
    with part("scaler", path):
        if run.scaler.is_enabled():
            check_like(saved["scaler"], run.scaler.state_dict())
        run.scaler.load_state_dict(saved["scaler"])
    run.position = position
    texts = [f"resumed from {path} at step {run.position.step} of {run.total_steps}"]
    before = to_dict(config_from_dict(saved["config"]))  # with the defaults of what the file is too old to have
    changed = _changes(before, to_dict(run.config))
    if changed:
        texts.append(f"changed since that checkpoint: {'; '.join(changed)}")
    else:
        with part("scheduler", path):
            check_like(saved["scheduler"], run.scheduler.state_dict())
            run.scheduler.load_state_dict(saved["scheduler"])
    return texts


def _changes(before: dict, after: dict, prefix: str = "") -> list[str]:
    harmless = {"resume", "init", "out", "timeout", "log.every", "log.name", "batch", "data.workers", "data.root"}
    changes = []
    for key, value in after.items():
        name, old = prefix + key, before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            changes += _changes(old, value, f"{name}.")
        elif value != old and name not in harmless:
            changes.append(f"{name} {old!r} -> {value!r}")
    return changes

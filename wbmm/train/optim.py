"""Optimiser, schedule and freezing, from timm's factories."""

from functools import partial

import torch.nn as nn
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from wbmm.models import WBMM
from wbmm.models.layer_groups import layer_scale

from .config import OptimConfig, ScheduleConfig
from .known import frozen_names, optimizer_options

__all__ = ["build_optimizer", "build_scheduler", "freeze", "set_train_mode"]


def build_optimizer(model: nn.Module, config: OptimConfig, lr: float) -> Optimizer:
    """Builds timm's optimiser with its parameter groups.

    Weight decay is left off 1-d parameters and biases. GRN's gamma and beta (4-d) and the tables (2-d) are decayed.
    Layer decay goes by the groups of `wbmm.models.layer_groups` for our models, by timm's for others.
    """
    ours = config.layer_decay is not None and isinstance(model, WBMM)
    return create_optimizer_v2(
        model,
        opt=config.name,
        lr=lr,
        weight_decay=config.weight_decay,
        layer_decay=config.layer_decay,
        param_group_fn=partial(_layer_decay_groups, config=config) if ours else None,
        **optimizer_options(config.name, config.betas, config.eps),
    )


def _layer_decay_groups(model: WBMM, config: OptimConfig) -> list[dict]:
    """timm's groups, decayed and not, each split by the scale on the learning rate, which timm's schedules apply."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    depths = [len(stage) for stage in model.patterns]
    groups: dict[tuple[float, float], dict] = {}
    for part in param_groups_weight_decay(model, config.weight_decay, no_weight_decay_list=model.no_weight_decay()):
        for parameter in part["params"]:
            scale = layer_scale(names[id(parameter)], depths, config.layer_decay)
            group = {"params": [], "lr_scale": scale, "weight_decay": part["weight_decay"]}
            groups.setdefault((scale, part["weight_decay"]), group)["params"].append(parameter)
    return list(groups.values())


def build_scheduler(optimizer: Optimizer, config: ScheduleConfig, steps_per_epoch: int) -> Scheduler:
    """Builds timm's schedule, stepped once an optimiser step."""
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=config.name,
        num_epochs=config.epochs,
        warmup_epochs=config.warmup_epochs,
        warmup_lr=config.warmup_lr,
        min_lr=config.min_lr,
        step_on_epochs=False,
        updates_per_epoch=steps_per_epoch,
    )
    if scheduler is None:
        raise ValueError(f"schedule.name {config.name!r} is not one of timm's schedules, e.g. cosine, step, poly")
    return scheduler


def freeze(model: nn.Module, prefixes: list[str]):
    """Stops the training of every parameter whose name starts with one of `prefixes` (whole parts of the name)."""
    for name in frozen_names(model, prefixes):
        model.get_parameter(name).requires_grad_(False)


def set_train_mode(model: nn.Module, frozen: list[str], bn_eval: bool):
    """Train mode, but with the statistics of frozen batch norms (or of all, with `bn_eval`) kept as they are."""
    model.train()
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (bn_eval or any(_under(name, prefix) for prefix in frozen)):
            module.eval()


def _under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")

"""Optimiser and schedule, from timm's factories, and the global batch that the learning rate is for."""

import inspect
import math
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch.nn as nn
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch.optim import SGD, Adam, AdamW, Optimizer

from wbmm.fields import Choice, Items, Known, Range, takes
from wbmm.models import WBMM
from wbmm.models.layer_groups import layer_scale

__all__ = [
    "MOST_EPOCHS",
    "BatchPlan",
    "OptimConfig",
    "ScheduleConfig",
    "build_optimizer",
    "build_scheduler",
    "optimizer_options",
    "plan_batch",
    "scale_lr",
]

MOST_EPOCHS = 100_000
FUSED = (Adam, AdamW, SGD)


def _is_optimizer(name: str) -> bool:
    try:
        return bool(get_optimizer_info(name))
    except ValueError:
        return False


OPTIMIZERS = Known("one of timm's optimisers", list_optimizers, _is_optimizer)


@dataclass
class OptimConfig:
    name: str = takes("adamw", OPTIMIZERS)
    lr: float = takes(4e-3, Range(0.0, 1000.0, "(]"))
    lr_batch: int = takes(4096, Range(1, 2**20))  # `lr` is for this global batch and scales linearly with the real one
    weight_decay: float = takes(0.05, Range(0.0, 100.0))
    betas: list[float] = takes([0.9, 0.999], Items(2, 3, Range(0.0, 1.0, "[)")))
    eps: float = takes(1e-8, Range(0.0, 1.0, "(]"))
    layer_decay: float | None = takes(None, Range(0.0, 1.0, "(]"))
    clip_grad: float | None = takes(None, Range(0.0, 1e6, "(]"))


@dataclass
class ScheduleConfig:
    name: str = takes("cosine", Choice("cosine", "tanh", "step", "multistep", "poly"))
    epochs: int = takes(300, Range(1, MOST_EPOCHS))
    warmup_epochs: float = takes(5.0, Range(0.0, MOST_EPOCHS))
    min_lr: float = takes(1e-6, Range(0.0, 1000.0))
    warmup_lr: float = takes(1e-6, Range(0.0, 1000.0))


def optimizer_options(name: str, betas: list[float], eps: float) -> dict:
    """The options of this optimiser among those that not all have."""
    if wrong := OPTIMIZERS.problem(name):
        raise ValueError(f"optim.name {wrong}")
    info = get_optimizer_info(name)
    if info.second_order:
        raise ValueError(f"optim.name {name!r} needs second derivatives, which training does not compute; e.g. adamw")
    package = info.opt_class.partition(".")[0] if isinstance(info.opt_class, str) else None
    if package and find_spec(package) is None:
        raise ValueError(f"optim.name {name!r} needs the package {package}, which is not installed")
    if info.has_betas and len(betas) != info.num_betas:
        raise ValueError(f"optim.betas must be {info.num_betas} numbers for optim.name={name}, got {betas}")
    # timm lists eps for one optimiser that has none (kronc), hence the look at the class
    has_eps = info.has_eps and (package is not None or "eps" in inspect.signature(info.opt_class).parameters)
    return ({"betas": tuple(betas)} if info.has_betas else {}) | ({"eps": eps} if has_eps else {})


def build_optimizer(model: nn.Module, config: OptimConfig, lr: float, fused: bool = False) -> Optimizer:
    """Builds timm's optimiser with its parameter groups; with `fused`, as one kernel where torch has it so.

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
        **({"fused": True} if fused and get_optimizer_info(config.name).opt_class in FUSED else {}),
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


@dataclass(frozen=True)
class BatchPlan:
    world: int
    batch: int
    accumulation: int

    @property
    def global_batch(self) -> int:
        return self.world * self.batch * self.accumulation

    def __str__(self) -> str:
        processes = "1 process" if self.world == 1 else f"{self.world} processes"
        forwards = "1 forward pass" if self.accumulation == 1 else f"{self.accumulation} forward passes (accumulated)"
        return f"global batch {self.global_batch} = {processes} x {self.batch} images x {forwards}"


def plan_batch(global_batch: int, batch: int, world: int) -> BatchPlan:
    """Finds the gradient accumulation that makes `global_batch`, or raises with the combinations that would work."""
    if global_batch % (world * batch) == 0:
        return BatchPlan(world, batch, global_batch // (world * batch))
    text = (
        f"global_batch={global_batch} cannot be made of {world} process{'es' if world > 1 else ''} x batch={batch}: "
        f"it is not a multiple of {world * batch}."
    )
    if global_batch % world == 0:
        near = _nearest_divisors(global_batch // world, batch)
        text += f" With {world} process{'es' if world > 1 else ''}, these work: {_join('batch', near)}."
    else:
        near = _nearest_divisors(global_batch // batch, world) if global_batch % batch == 0 else []
        text += f" {world} does not divide {global_batch}."
        if near:
            text += f" With batch={batch}, {', '.join(map(str, near))} processes work."
    unit = world * batch
    below, above = global_batch // unit * unit, (global_batch // unit + 1) * unit
    text += f" Or change the other: {_join('global_batch', [size for size in (below, above) if size])}."
    raise ValueError(text)


def _nearest_divisors(number: int, wanted: int, count: int = 4) -> list[int]:
    """The divisors of `number` nearest to `wanted`, in order."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    divisors = sorted({*small, *(number // size for size in small)})
    return sorted(sorted(divisors, key=lambda size: abs(size - wanted))[:count])


def _join(name: str, values: list[int]) -> str:
    return ", ".join(f"{name}={value}" for value in values)


def scale_lr(lr: float, lr_batch: int, global_batch: int) -> tuple[float, str]:
    """The learning rate for `global_batch`, stated as `lr` for `lr_batch`, and a sentence that says so."""
    if global_batch == lr_batch:
        return lr, f"learning rate {lr:g}"
    scaled = lr * global_batch / lr_batch
    return scaled, f"learning rate {lr:g} x {global_batch}/{lr_batch} = {scaled:g} (scaled with the global batch)"

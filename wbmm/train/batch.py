"""The global batch is the contract: how processes, per-device batch and gradient accumulation make it up."""

import math
from dataclasses import dataclass

__all__ = ["BatchPlan", "plan_batch", "scale_lr"]


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
    text += f" Or change the contract: {_join('global_batch', [size for size in (below, above) if size])}."
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

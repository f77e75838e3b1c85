"""How a step went: decided on the device, read by the host a step later. Nothing of this makes the host wait for a GPU.

On a CPU the host decides and reads at once. So it does on a GPU for optimisers that cannot leave out a step themselves.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn as nn
from timm.utils import ModelEmaV3
from torch import Tensor

from .dist import World, check_complete
from .guard import BufferSnapshot

__all__ = ["Attempt", "DeviceUpdate", "Outcome", "Outcomes", "decides_on_device", "queues"]

QUEUED = ("cuda",)  # devices that compute while the host goes on
LAG = 1  # steps: while the device works on one, the host prepares the next and reads how the one before went


def queues(device: torch.device) -> bool:
    """Whether work for this device is queued."""
    return device.type in QUEUED


def decides_on_device(device: torch.device, optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimiser, when told by `found_inf`, leaves out a step by itself: torch's fused ones do."""
    return queues(device) and getattr(optimizer, "_step_supports_amp_scaling", False)


@dataclass
class Attempt:
    """What must be known of a step to say what was wrong with it."""

    step: int
    lr: float
    micro_batches: list[tuple[Tensor, Tensor]]
    losses: Tensor  # of this process, one a micro-batch
    names: list[str]  # of the parameters with a gradient
    norms: Tensor  # of these gradients


@dataclass
class Outcome:
    """The figures of a step, summed over the processes, and whether it counts as done."""

    attempt: Attempt
    loss: float
    norm: float
    stop: float  # processes that were asked to
    kept: bool


class Outcomes:
    """The steps whose figures the host has not read, oldest first.

    On a GPU they come through page-locked memory, each with an event that says when it is there.
    """

    FIGURES = 5

    def __init__(self, world: World, lag: int):
        self.world, self.lag = world, lag
        on_gpu = world.device.type == "cuda"
        self._rows = torch.zeros(lag + 1, self.FIGURES, dtype=torch.float64, pin_memory=on_gpu)
        self._values = self._rows.numpy()
        self._arrived = [torch.cuda.Event() if on_gpu else None for _ in range(lag + 1)]
        self._pending: deque[tuple[Attempt, int]] = deque()
        self._count = 0

    def put(self, attempt: Attempt, figures: Tensor | list[float]) -> None:
        """Adds a step with its loss, norm, wish to stop, processes and whether it is kept."""
        slot = self._count % len(self._rows)
        if isinstance(figures, Tensor):
            self._rows[slot].copy_(figures, non_blocking=True)
            if self._arrived[slot] is not None:
                self._arrived[slot].record()
        else:
            self._values[slot] = figures
        self._pending.append((attempt, slot))
        self._count += 1

    def take(self, everything: bool = False) -> Iterator[Outcome]:
        """Reads the steps that are `lag` steps old, or all."""
        while len(self._pending) > (0 if everything else self.lag):
            yield self._read(*self._pending.popleft())

    def skipping(self, before: int) -> bool:
        """Whether the last step was left out; reads ahead without taking. `before`: skips among the steps taken."""
        return not self._read(*self._pending[-1]).kept if self._pending else before > 0

    def _read(self, attempt: Attempt, slot: int) -> Outcome:
        if self._arrived[slot] is not None:
            self._arrived[slot].synchronize()
        loss, norm, stop, processes, kept = self._values[slot].tolist()
        check_complete(processes, self.world)
        return Outcome(attempt, loss, norm, stop, kept > 0)


class DeviceUpdate:
    """Applies gradients, or does not if something is not finite, without the host knowing which.

    The optimiser gets the decision as `found_inf`, as `torch.amp.GradScaler` gives it.
    """

    def __init__(
        self,
        model: nn.Module,
        ema: ModelEmaV3 | None,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        before_step: BufferSnapshot,
    ):
        self.ema, self.optimizer, self.scaler, self.before_step = ema, optimizer, scaler, before_step
        pairs = list(zip(ema.module.state_dict().values(), model.state_dict().values(), strict=True)) if ema else []
        self._averaged = [pair for pair in pairs if pair[0].is_floating_point()]
        self._counters = [pair for pair in pairs if not pair[0].is_floating_point()]
        _fill_momentum(optimizer)

    @torch.no_grad()
    def __call__(self, finite: Tensor, ema_step: int | None) -> Tensor:
        """Returns whether the step is kept.

        Args:
            finite: [2], whether the loss and the gradients are.
            ema_step: for the warm-up of the average; None without.
        """
        good = finite.all()
        self.optimizer.found_inf, self.optimizer.grad_scale = good.logical_not().float(), None
        try:
            self.optimizer.step()
        finally:
            del self.optimizer.found_inf, self.optimizer.grad_scale
        self.scaler.update()
        kept = good
        if self.scaler.is_enabled():  # as on the host: see `update` in engine.py
            kept = good | (finite[0] & (self.scaler._get_scale_async() >= 1))
        self.before_step.restore_unless(kept)
        if self.ema is not None:
            self._average(good, self.ema.get_decay(ema_step))
        return kept

    def _average(self, good: Tensor, decay: float) -> None:
        """The average's update, with weight 0 where the step is left out; the model must hold no NaN any more."""
        averages, values = map(list, zip(*self._averaged, strict=True))
        weight = good.float() * (1 - decay)
        torch._foreach_lerp_(averages, values, [weight.to(average.dtype) for average in averages])
        for average, value in self._counters:
            torch.where(good, value, average, out=average)


def _fill_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Zeros as SGD's first momentum, which gives what its own start gives.

    It starts in memory that the fused kernel fills at the first step, and leaves as it is if that one is left out.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
            for parameter in group["params"]:
                if optimizer.state[parameter].get("momentum_buffer") is None and parameter.requires_grad:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

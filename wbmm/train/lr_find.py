"""A range test for the learning rate: it grows with each step until the loss does too; drawn, with a suggestion.

Nothing is changed by it: the run that it was asked for starts afresh with the rate that one gives it.
"""

import dataclasses
import math
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from wbmm.io.figures import BLUE, GREY, ORANGE, new_figure, save_figure
from wbmm.progress import progress_bar

from .config import TrainConfig
from .dist import setup
from .engine import Run, read_outcomes, train_step
from .fit import build
from .guard import BufferSnapshot, StopSignal
from .model import set_train_mode
from .outcome import Outcomes
from .runs import smooth

__all__ = ["RateSearch", "draw_search", "find_rate"]

LOWEST, HIGHEST = 1e-6, 1.0
STEPS = 100
DIVERGED = 3.0  # times the best smoothed loss, above what a constant guess would have
SAFE = 10.0  # the suggestion is so much below the rate of the lowest loss


@dataclass(frozen=True)
class RateSearch:
    """What was tried.

    Attributes:
        rates: of the global batch, one a step.
        losses: of each step.
        per_batch: what a rate is multiplied by to be `optim.lr`, which is for `optim.lr_batch`.
    """

    rates: list[float]
    losses: list[float]
    per_batch: float = 1.0

    @property
    def smoothed(self) -> list[float]:
        return smooth(self.losses, window=0.1)

    @property
    def lowest(self) -> float:
        """The rate at which the smoothed loss is lowest."""
        smoothed = self.smoothed
        return self.rates[smoothed.index(min(smoothed))]

    @property
    def suggestion(self) -> float:
        """The `optim.lr` to try, to two digits."""
        return float(f"{self.lowest / SAFE * self.per_batch:.1e}")


def find_rate(config: TrainConfig, steps: int = STEPS) -> RateSearch:
    """Trains for at most `steps` steps, whose rates go from `LOWEST` to `HIGHEST`, and forgets the result.

    Args:
        config: of the run that is wanted; logs go to `lr_find` in its folder.
        steps: the loss may end it earlier.
    """
    world = setup(config.device, config.timeout)
    if world.size > 1:
        raise ValueError("--lr-find runs in one process: start it without torchrun")
    config = dataclasses.replace(config, out=str(Path(config.out) / "lr_find"), resume=None)
    with StopSignal(say=True) as stop:
        run = build(config, world, stop, show_config=False)
        run.before_step, run.outcomes = BufferSnapshot(run.model), Outcomes(world, 0)
        run.scheduler = _Ramp(run.optimizer, steps)
        try:
            rates, losses = _climb(run, steps)
        finally:
            run.logger.close("finished")
    if stop.name:
        raise KeyboardInterrupt("interrupted; nothing was changed")
    if len(losses) < 2:
        raise ValueError("the loss is not finite from the start: a learning rate would not help")
    return RateSearch(rates, losses, config.optim.lr_batch / config.global_batch)


class _Ramp:
    """The schedule of the test, with the one method that a step calls."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.optimizer, self.steps = optimizer, steps

    def rate(self, step: int) -> float:
        return LOWEST * (HIGHEST / LOWEST) ** (step / max(self.steps - 1, 1))

    def step_update(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step) * group.get("lr_scale", 1.0)


def _climb(run: Run, steps: int) -> tuple[list[float], list[float]]:
    set_train_mode(run.model, run.config.model.freeze, run.config.model.bn_eval)
    rates, losses = [], []
    batches = (batch for epoch in count() for batch in run.data.train.epoch(epoch))
    limit = DIVERGED * math.log(run.data.num_classes)  # a constant guess has the logarithm
    with progress_bar(steps, "learning rates tried") as advance:
        for step in range(steps):
            train_step(run, next(batches))
            run.position.step += 1
            loss, stop = read_outcomes(run, everything=True)
            advance(1)
            if stop or not math.isfinite(loss):
                break
            rates.append(run.scheduler.rate(step))
            losses.append(loss)
            if smooth(losses, window=0.1)[-1] > limit:
                break
    return rates, losses


def draw_search(search: RateSearch, path: str | Path, present: float) -> Path:
    """Draws loss against rate, with the suggestion and the rate that the configuration has.

    Args:
        search: what was tried.
        path: of the .png or .pdf file.
        present: `optim.lr` of the configuration.
    """
    figure = new_figure(7.5, 4.5, "the picture of --lr-find")
    axis = figure.subplots()
    rates = [rate * search.per_batch for rate in search.rates]
    axis.plot(rates, search.losses, color=BLUE, alpha=0.3, linewidth=1, label="each step")
    axis.plot(rates, search.smoothed, color=BLUE, linewidth=1.8, label="smoothed")
    axis.axvline(search.suggestion, color=ORANGE, linestyle="--", label=f"suggested: {search.suggestion:g}")
    axis.axvline(present, color=GREY, linestyle=":", label=f"in the configuration: {present:g}")
    axis.set_xscale("log")
    top = max(search.smoothed[: search.smoothed.index(min(search.smoothed)) + 1])
    low = min(search.smoothed)
    axis.set_ylim(low - 0.15 * (top - low + 0.1), top + 0.8 * (top - low + 0.1))
    axis.set(xlabel="optim.lr", ylabel="training loss", title="loss while the learning rate grows")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper left", framealpha=0.9)
    return save_figure(figure, path)

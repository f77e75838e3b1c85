"""The training loop, in the order in which things happen, and validation."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.loss import SoftTargetCrossEntropy
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor

from wbmm.data.classes import is_right
from wbmm.data.loader import BatchMixer
from wbmm.data.order import hash64
from wbmm.text import some
from wbmm.train.build import Data
from wbmm.train.optim import BatchPlan

from . import checkpoint
from .checkpoint import Position
from .config import TrainConfig, to_dict
from .dist import World, all_sum, broadcast_buffers, gather_objects, sum_on_device
from .guard import MARKER, BufferSnapshot, StopSignal, nonfinite_layers, write_marker
from .log import Clock, RunLogger, memory_mb, writing
from .model import set_train_mode
from .outcome import LAG, Attempt, DeviceUpdate, Outcome, Outcomes, decides_on_device
from .runs import FIRST_BATCH, MOST_SHOWN, draw_batch

__all__ = ["Run", "train", "validate"]

FINISHED, STOPPED = "finished", "stopped"
STEP_RANDOMNESS = 100  # what the hash is for; data.order uses the small numbers
AMP_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Run:
    """Everything that a run is made of, built by `wbmm.train.fit`."""

    config: TrainConfig
    world: World
    plan: BatchPlan
    data: Data
    mixer: BatchMixer
    model: nn.Module  # the bare model: evaluated, saved
    wrapped: nn.Module  # what is called in training: the model, or DDP around it
    ema: ModelEmaV3 | None
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler
    scaler: torch.amp.GradScaler
    stop: StopSignal
    logger: RunLogger | None = None
    position: Position = field(default_factory=Position)
    criterion: nn.Module = field(default_factory=SoftTargetCrossEntropy)
    saved_at: float = 0.0  # when the last checkpoint was written, or training began
    before_step: BufferSnapshot | None = None  # made when training begins
    after_forward: BufferSnapshot | None = None  # with activation checkpointing alone
    on_device: DeviceUpdate | None = None  # where the device decides whether a step is applied
    outcomes: Outcomes | None = None

    @property
    def out(self) -> Path:
        return Path(self.config.out)

    @property
    def total_steps(self) -> int:
        return self.config.schedule.epochs * self.data.train.steps_per_epoch

    @property
    def amp_dtype(self) -> torch.dtype | None:
        return AMP_DTYPES[self.config.amp]

    @property
    def lr(self) -> float:
        return max(group["lr"] for group in self.optimizer.param_groups)


def train(run: Run) -> str:
    """Trains from the run's position to the end, or to a signal; returns `finished` or `stopped`."""
    run.stop.saves, run.saved_at = True, time.monotonic()
    run.before_step = BufferSnapshot(run.model)
    run.after_forward = BufferSnapshot(run.model) if run.config.model.grad_checkpointing else None
    if decides_on_device(run.world.device, run.optimizer):
        run.on_device = DeviceUpdate(run.model, run.ema, run.optimizer, run.scaler, run.before_step)
    run.outcomes = Outcomes(run.world, LAG if run.on_device else 0)
    try:
        return train_epochs(run)
    finally:
        run.stop.saves = False


def train_epochs(run: Run) -> str:
    per_epoch = run.data.train.steps_per_epoch
    if not run.position.evaluated and not finish_epoch(run, run.position.step // per_epoch):
        return interrupt(run)
    for epoch in range(run.position.step // per_epoch, run.config.schedule.epochs):
        if train_epoch(run, epoch) or not finish_epoch(run, epoch + 1):
            return interrupt(run)
    return FINISHED


def train_epoch(run: Run, epoch: int) -> bool:
    """Trains one epoch, or what is left of it; returns whether a signal asked to stop."""
    config, position = run.config, run.position
    per_epoch = run.data.train.steps_per_epoch
    set_train_mode(run.model, config.model.freeze, config.model.bn_eval)
    batches = run.data.train.epoch(epoch, position.step - epoch * per_epoch)
    clock = Clock()
    while position.step < (epoch + 1) * per_epoch:
        with clock.waiting():
            micro_batches = next(batches)
        if position.step == 0 and run.world.main and config.log.report:
            show_first_batch(run, micro_batches)
            clock = Clock()  # drawing is no training
        train_step(run, micro_batches)
        clock.steps += 1
        position.step += 1
        position.evaluated = position.step % per_epoch != 0
        logged = position.step == 1 or position.step % config.log.every == 0 or position.step == run.total_steps
        loss, stop = read_outcomes(run, everything=logged or not position.evaluated)
        run.logger.step(position.step, position.step / per_epoch, loss, run.lr)
        if logged:
            report(run, loss, clock)
        if stop:
            return True
        if position.evaluated and save_is_due(run):
            save_unless_skipping(run)
    return False


def show_first_batch(run: Run, micro_batches: list[tuple[Tensor, Tensor]]) -> None:
    """Draws the images of the first step as the net sees them: the first thing to look at when training fails."""
    enough = micro_batches[: math.ceil(MOST_SHOWN / run.config.batch)]
    seen = [prepare(run, batch, micro) for micro, batch in enumerate(enough)]
    images, targets = (torch.cat(parts)[:MOST_SHOWN].cpu() for parts in zip(*seen, strict=True))
    with suppress(ImportError):  # of which the log has told
        draw_batch(images, targets, run.config, run.data.class_names, run.out / FIRST_BATCH)


def report(run: Run, loss: float, clock: Clock):
    """Logs this step's loss and the speed since the report before."""
    seconds, wait = clock.read()
    step = run.position.step
    run.logger.train(
        step=step,
        epoch=step / run.data.train.steps_per_epoch,
        loss=loss,
        lr=run.lr,
        images_per_s=run.plan.global_batch / seconds,
        data_wait=wait,
        memory_mb=memory_mb(run.world.device),
        eta_s=seconds * (run.total_steps - step),
    )


def train_step(run: Run, micro_batches: list[tuple[Tensor, Tensor]]) -> None:
    """One optimiser step on the global batch; how it went is put into `run.outcomes`."""
    step, world = run.position.step, run.world
    torch.manual_seed(int(hash64(run.config.seed, STEP_RANDOMNESS, step, world.rank)[0] >> 1))
    run.scheduler.step_update(step)
    run.before_step.take()
    losses = []
    for micro, batch in enumerate(micro_batches):
        images, targets = prepare(run, batch, micro)
        last = micro == len(micro_batches) - 1
        with nullcontext() if last or world.size == 1 else run.wrapped.no_sync():
            loss = forward(run, images, targets) / len(micro_batches)
            backward(run, loss)
        losses.append(loss.detach())
    run.scaler.unscale_(run.optimizer)
    graded = {name: parameter for name, parameter in run.model.named_parameters() if parameter.grad is not None}
    norms = torch.stack(torch._foreach_norm([parameter.grad for parameter in graded.values()]))
    attempt = Attempt(step, run.lr, micro_batches, torch.stack(losses), list(graded), norms)
    run.outcomes.put(attempt, update(run, attempt, list(graded.values())))
    run.optimizer.zero_grad(set_to_none=True)


def prepare(run: Run, batch: tuple[Tensor, Tensor] | None, micro: int) -> tuple[Tensor, Tensor]:
    step = run.position.step
    if batch is None:
        raise RuntimeError(f"step {step}: every image of a batch is damaged")
    layout = torch.channels_last if run.config.model.channels_last else torch.contiguous_format
    images = batch[0].to(run.world.device, non_blocking=True, copy=True)  # mixing works in place
    targets = batch[1].to(run.world.device, non_blocking=True)
    images, targets = run.mixer(images, targets, step, micro)
    return images.contiguous(memory_format=layout), targets


def forward(run: Run, images: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(run.world.device.type, run.amp_dtype, enabled=run.amp_dtype is not None):
        logits = run.wrapped(images)
    return run.criterion(logits.float(), targets)


def backward(run: Run, loss: Tensor):
    """Computes the gradients; with activation checkpointing the blocks run again, which must not count twice."""
    if run.after_forward is not None:
        run.after_forward.take()
    run.scaler.scale(loss).backward()
    if run.after_forward is not None:
        run.after_forward.restore()


def update(run: Run, attempt: Attempt, parameters: list[nn.Parameter]) -> Tensor | list[float]:
    """Applies the gradients unless they, or the loss, are not finite; returns the figures of the step's outcome."""
    norm = torch.linalg.vector_norm(attempt.norms)
    summed = [attempt.losses.sum() / run.world.size, norm, run.stop.name is not None]
    if run.on_device is not None:
        total = sum_on_device(summed, run.world)
        clip(run, parameters, norm)
        kept = run.on_device(torch.isfinite(total[:2]), ema_step(run))
        return torch.cat([total, kept.to(total.dtype).view(1)])
    # The only point of a step at which the host waits for the device, but for the loss scaler of fp16.
    figures = all_sum(summed, run.world)
    finite, finite_gradients = map(math.isfinite, figures[:2])
    good = finite and finite_gradients
    if good:
        clip(run, parameters, norm)
        run.scaler.step(run.optimizer)
    run.scaler.update()  # fp16: lowers the scale where gradients overflowed
    if good and run.ema is not None:
        run.ema.update(run.model, ema_step(run))
    # An overflow of fp16 gradients is how the scale is found, as long as the scale has room to fall.
    kept = good or (finite and run.scaler.is_enabled() and run.scaler.get_scale() >= 1)
    if not kept:
        run.before_step.restore()
    return [*figures, run.world.size, kept]


def clip(run: Run, parameters: list[nn.Parameter], norm: Tensor) -> None:
    if run.config.optim.clip_grad is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, run.config.optim.clip_grad, norm)


def ema_step(run: Run) -> int | None:
    """The step that the average's warm-up counts by."""
    return run.position.step + 1 if run.config.ema.warmup else None


def read_outcomes(run: Run, everything: bool) -> tuple[float, bool]:
    """Answers the steps that can be read without waiting, or all; returns the last loss and whether to stop.

    All processes read the same steps at the same time, so that they stop at the same one.
    """
    stop = run.world.size == 1 and run.stop.name is not None
    read = list(run.outcomes.take(everything or stop))
    if any(outcome.stop > 0 for outcome in read):
        stop = True
        read += run.outcomes.take(everything=True)
    for outcome in read:
        if outcome.kept:
            run.position.skips = 0
        else:
            skip(run, outcome)
    return read[-1].loss if read else math.nan, stop


def skip(run: Run, outcome: Outcome):
    """Counts a step that was not applied; at the limit stops the run with what is known about the cause."""
    position, attempt = run.position, outcome.attempt
    position.skips += 1
    what = f"the loss is {outcome.loss}" if not math.isfinite(outcome.loss) else "the gradients are not finite"
    where = f"step {attempt.step}, learning rate {attempt.lr:.3g}"
    if position.skips <= run.config.max_skips:
        run.logger.message(
            f"{where}: {what}; step skipped ({position.skips} of at most {run.config.max_skips} in a row)"
        )
        return
    position.step = attempt.step  # where its images belong
    bad = torch.isfinite(attempt.losses).logical_not().tolist()
    worst = bad.index(True) if any(bad) else 0
    images, _ = prepare(run, attempt.micro_batches[worst], worst)
    with torch.autocast(run.world.device.type, run.amp_dtype, enabled=run.amp_dtype is not None):
        found = gather_objects(nonfinite_layers(run.model, images), run.world)
    layers = list(dict.fromkeys(name for names in found for name in names))
    norms = attempt.norms.tolist()
    gradients = [name for name, norm in zip(attempt.names, norms, strict=True) if not math.isfinite(norm)]
    if layers:
        cause = f"layers whose activations are not finite, in order: {some(layers, 8)}"
    elif gradients:
        cause = f"all activations are finite; gradients that are not: {some(gradients, 8)}"
    else:
        cause = "all activations and gradients are finite: the loss itself overflows"
    raise FloatingPointError(
        f"{where}: {what}, after {run.config.max_skips} skipped steps in a row; {cause}. "
        f"The checkpoints in {run.out} are from before this and intact."
    )


def finish_epoch(run: Run, epochs_done: int) -> bool:
    """Evaluates if due, and saves; returns False if a signal stopped the evaluation."""
    config, position = run.config, run.position
    better = False
    if epochs_done % config.eval_every == 0 or epochs_done == config.schedule.epochs:
        metrics = measure(run)
        if metrics is None:
            return False
        run.logger.eval(position.step, float(epochs_done), metrics)
        score = metrics["top1" if run.ema is None else "ema_top1"]
        better = position.best is None or score >= position.best  # of equal ones the later, which has trained longer
        position.best = max(score, -math.inf if position.best is None else position.best)
        position.metrics = metrics
    position.evaluated = True
    keep = config.save.every_epochs and epochs_done % config.save.every_epochs == 0
    best = better and config.save.best
    if best or keep or epochs_done == config.schedule.epochs:
        save(run, best, epochs_done if keep else None)
    else:
        save_unless_skipping(run)
    return True


def measure(run: Run) -> dict[str, float] | None:
    """Evaluates the model and, if there is one, its moving average."""
    metrics: dict[str, float] = {}
    for prefix, model in (("", run.model), ("ema_", run.ema.module if run.ema else None)):
        if model is None:
            continue
        figures = validate(
            model,
            run.data.val,
            run.world,
            run.amp_dtype,
            run.config.model.channels_last,
            stop=lambda: run.stop.name is not None,
            exact=run.config.data.on_bad_image == "fail",
            progress=run.logger.evaluating,
        )
        if figures is None:
            return None
        metrics |= {prefix + name: value for name, value in figures.items()}
    return metrics


def interrupt(run: Run) -> str:
    """Saves where the run is and leaves the marker."""
    save(run)
    names = gather_objects(run.stop.name, run.world)
    name = run.stop.name = next((name for name in names if name), None)
    if run.world.main:
        with writing(run.out / MARKER):
            write_marker(run.out, signal=name, step=run.position.step, total_steps=run.total_steps)
    run.logger.message(
        f"{name}: saved at step {run.position.step} of {run.total_steps} and stopped; continue with resume=auto"
    )
    return STOPPED


def save_is_due(run: Run) -> bool:
    """By steps or by time. Only the first process writes, so that each may ask its own clock."""
    every = run.config.save
    by_steps = every.every_steps and run.position.step % every.every_steps == 0
    return by_steps or (every.every_minutes > 0 and time.monotonic() - run.saved_at >= 60 * every.every_minutes)


def save_unless_skipping(run: Run):
    """Saves, except in a row of skipped steps: the checkpoints from before it must not be rotated away."""
    if not run.outcomes.skipping(run.position.skips):
        save(run)


def save(run: Run, best: bool = False, keep_epoch: int | None = None):
    if run.world.main:
        checkpoint.write(run.out, state(run), best, keep_epoch)
    run.saved_at = time.monotonic()


def state(run: Run) -> dict:
    """The content of a checkpoint."""
    position = asdict(run.position)
    if not run.outcomes.skipping(position["skips"]):
        position["skips"] = 0  # the last step ended the row, which may not have been read yet
    return {
        "model": run.model.state_dict(),
        "ema": run.ema.module.state_dict() if run.ema else None,
        "optimizer": run.optimizer.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "scaler": run.scaler.state_dict(),
        "seconds": run.logger.seconds,
        "position": position | {"steps_per_epoch": run.data.train.steps_per_epoch},
        "config": to_dict(run.config),
        "num_classes": run.data.num_classes,
        "class_names": run.data.class_names,
        **checkpoint.environment(),
    }


@torch.no_grad()
def validate(
    model: nn.Module,
    loader,
    world: World,
    amp_dtype: torch.dtype | None = None,
    channels_last: bool = True,
    stop: Callable[[], bool] = lambda: False,
    exact: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float] | None:
    """Top-1 and top-5 accuracy (per cent) and mean cross-entropy over the whole validation set.

    Args:
        model: The bare model, not a DDP wrapper: the processes may have different numbers of batches.
        loader: Yields this process's disjoint share as `(images, targets)`; `size` is that of the whole set.
        stop: Asked before each batch; when true on any process the evaluation is abandoned.
        progress: Told after each batch how many images of how many are done, about: this process's times all.
        exact: Raise if the images counted are not the whole set (off where damaged images are skipped).

    Returns:
        The figures, the same on every process, or None if abandoned.
    """
    broadcast_buffers(model, world)
    model.eval()
    layout = torch.channels_last if channels_last else torch.contiguous_format
    counted, right, right5, loss, stopped = 0, 0, 0, torch.zeros((), dtype=torch.float64, device=world.device), False
    for images, targets in loader:
        if stop():
            stopped = True
            break
        images = images.to(world.device, non_blocking=True, memory_format=layout)
        targets = targets.to(world.device, non_blocking=True)
        with torch.autocast(world.device.type, amp_dtype, enabled=amp_dtype is not None):
            logits = model(images)
        logits = logits.float()
        counted += len(targets)
        progress(min(counted * world.size, loader.size), loader.size)
        right = right + is_right(logits, targets).sum()
        right5 = right5 + is_right(logits, targets, k=5).sum()
        loss += F.cross_entropy(logits, targets, reduction="sum").double()
    counted, right, right5, loss, stopped = all_sum([counted, right, right5, loss, stopped], world)
    if stopped:
        return None
    if exact and counted != loader.size:
        raise RuntimeError(f"evaluation counted {counted:.0f} images, but the validation set has {loader.size}")
    return {"loss": loss / counted, "top1": 100 * right / counted, "top5": 100 * right5 / counted}

"""A training run from its configuration to its summary."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

import wbmm.models  # noqa: F401  (registers them)
from wbmm.data.loader import BatchMixer
from wbmm.io.atomic import remove_stale, write_text
from wbmm.text import counted

from .build import build_data, build_ema, build_model, init_weights, set_arithmetic, wrap
from .config import TrainConfig, to_yaml
from .dist import World, broadcast_object, is_peer_failure, setup
from .engine import STOPPED, Run, train
from .guard import StopSignal, clear_marker, lock_folder
from .log import RunLogger, writing
from .optim import build_optimizer, build_scheduler, plan_batch, scale_lr
from .outcome import decides_on_device, queues
from .restore import check_same_run, find_resume, restore
from .runs import write_summary

__all__ = ["Result", "build", "fit"]


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        status: `finished`, or `stopped` by a signal.
        out: The run's folder.
        step: Optimiser steps done.
        metrics: Figures of the last evaluation, e.g. top1 in per cent.
        best: The best top1 (of the EMA where there is one).
        signal: The signal that stopped it, e.g. SIGINT for Ctrl-C.
    """

    status: str
    out: Path
    step: int
    metrics: dict[str, float]
    best: float | None
    signal: str | None = None


def fit(config: TrainConfig, show_config: bool = True) -> Result:
    """Trains as configured, in this process and its peers if torchrun started any.

    Ctrl-C saves and stops as SIGTERM does. A second one raises KeyboardInterrupt, and so does one outside of training.

    Args:
        config: of the run.
        show_config: print it; it is saved with the run in any case.
    """
    world = setup(config.device, config.timeout)
    with StopSignal(say=world.main) as stop:
        try:
            result = _fit(config, world, stop, show_config)
        except RuntimeError as error:
            if world.size > 1 and is_peer_failure(error):
                raise ConnectionError(f"rank {world.rank}: another process is gone or stuck ({error})") from error
            raise
    # Not in a `finally`: after an error the peers may be gone, and leaving the group would wait for them.
    world.close()
    return result


def _fit(config: TrainConfig, world: World, stop: StopSignal, show_config: bool) -> Result:
    with lock_folder(Path(config.out), world.main):
        if world.main:
            clear_marker(Path(config.out))  # of the sitting before: if this one cannot start, it is not interrupted
            remove_stale(Path(config.out))
        run = build(config, world, stop, show_config)
        try:
            status = train(run)
        except BaseException as error:
            status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            with suppress(ValueError):  # on a full disk; the first error is the one to tell
                try:
                    run.logger.close(status)
                except RuntimeError:  # PyTorch's handler of a dead data worker's signal raises wherever it finds us
                    run.logger.close(status)
            raise
        run.logger.close(status)
        if world.main:
            with writing(run.out / "summary.md"):
                write_summary(run.out)
    position = broadcast_object(run.position, world)
    signal = stop.name if status == STOPPED else None
    return Result(status, run.out, position.step, position.metrics, position.best, signal)


def build(config: TrainConfig, world: World, stop: StopSignal, show_config: bool = True) -> Run:
    """Everything that can be wrong is found here, before the first step."""
    texts = [set_arithmetic(config, world.device)]
    plan = plan_batch(config.global_batch, config.batch, world.size)
    lr, lr_text = scale_lr(config.optim.lr, config.optim.lr_batch, config.global_batch)
    resume, saved = find_resume(config, world, texts.append) or (None, None)
    names = saved.get("class_names") if saved else None
    data = build_data(config, world.rank, world.size, plan.accumulation, names, world.device)
    if saved:
        check_same_run(saved, config, data.num_classes, resume)
    model = build_model(config, data.num_classes, world)
    if config.init and not saved:
        texts.append(init_weights(model, Path(config.init), config.init_resize_tables))
    ema = build_ema(model, config)
    optimizer = build_optimizer(model, config.optim, lr, fused=queues(world.device))
    if queues(world.device) and not decides_on_device(world.device, optimizer):
        texts.append(f"optim.name={config.optim.name}: each step waits for the device, to see if it can be applied")
    built = Run(
        config=config,
        world=world,
        plan=plan,
        data=data,
        mixer=BatchMixer(config.mix, data.num_classes, config.seed, world.rank),
        model=model,
        wrapped=model,
        ema=ema,
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, config.schedule, data.train.steps_per_epoch),
        scaler=torch.amp.GradScaler(world.device.type, enabled=config.amp == "fp16"),
        stop=stop,
    )
    if saved:
        texts += restore(built, saved, resume)
    built.wrapped = wrap(model, config, world)  # after the weights are in: DDP sends rank 0's to all
    open_log(built, saved, [str(plan), lr_text, *texts], show_config)
    return built


def open_log(run: Run, saved: dict | None, texts: list[str], show_config: bool = True) -> None:
    """Starts the logs: the resolved configuration, beside the run and printed, and how it was arrived at."""
    resumed = {"resumed_step": run.position.step, "resumed_seconds": saved.get("seconds")} if saved else {}
    run.logger = RunLogger(run.config, run.out, run.world.main, **resumed)
    if run.world.main:
        with writing(run.out / "config.yaml"):
            write_text(run.out / "config.yaml", to_yaml(run.config))
    if show_config:
        run.logger.message(to_yaml(run.config).rstrip())
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    epochs = f"{counted(run.config.schedule.epochs, 'epoch')} of {run.data.train.steps_per_epoch:,}"
    run.logger.message(
        f"{run.config.model.name}: {parameters / 1e6:.2f} M parameters, {run.data.num_classes} classes, "
        f"{counted(run.total_steps, 'step')} ({epochs}), output in {run.out}"
    )
    for text in texts:
        run.logger.message(text)

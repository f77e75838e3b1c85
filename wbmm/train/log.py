"""Logging of a run by its first process: console, metrics.jsonl, TensorBoard, Weights & Biases."""

import json
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from .config import TrainConfig
from .console import make_console
from .metrics import FILE, MetricsFile, working_seconds, write_text, writing
from .trackers import TensorBoard, WeightsAndBiases

__all__ = ["STATUS_FILE", "RunLogger"]

STATUS_FILE = "status.json"


class RunLogger:
    """Where the numbers of a run go. On other ranks than the first it does nothing.

    A file that cannot be written ends the run with a ValueError. A console that cannot does not: `| tee` dies of the
    Ctrl-C at which the run is to save.

    Args:
        cfg: `log` and `schedule.epochs` are read; the whole is shown in TensorBoard and wandb.
        out: The run's folder.
        main: Whether this is the first process.
        resumed_step: The step that the run continues from; None for a new run.
        resumed_seconds: The working time up to that step; None to take it from the metrics.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        out: str | Path,
        main: bool = True,
        resumed_step: int | None = None,
        resumed_seconds: float | None = None,
    ):
        self.main, self.out, self.last_step = main, Path(out), resumed_step or 0
        if not main:
            return
        self.trackers = []
        if cfg.log.tensorboard:
            self.trackers.append(TensorBoard(cfg, self.out, resumed_step))
        if cfg.log.wandb:
            self.trackers.append(WeightsAndBiases(cfg, self.out, resumed_step))
        with writing(self.out / FILE):
            self.out.mkdir(parents=True, exist_ok=True)
            self.metrics = MetricsFile(self.out, resumed_step)
        before = working_seconds(self.metrics.kept) if resumed_seconds is None else resumed_seconds
        self._began = time.monotonic() - before
        self.console = make_console(cfg.schedule.epochs)
        self._write_status("running")

    @property
    def seconds(self) -> float:
        """Working time of the run, that of earlier sittings included and the time between them not."""
        return time.monotonic() - self._began

    def train(
        self,
        step: int,
        epoch: float,
        loss: float,
        lr: float,
        images_per_s: float,
        data_wait: float,
        memory_mb: float,
        eta_s: float,
    ) -> None:
        """One line of training. `data_wait` is the share (0 to 1) of time spent waiting for batches."""
        if not self.main:
            return
        values = {
            "loss": loss,
            "lr": lr,
            "images_per_s": images_per_s,
            "data_wait": data_wait,
            "memory_mb": memory_mb,
            "eta_s": eta_s,
        }
        record = self._record("train", step, epoch, values)
        with suppress(OSError):
            self.console.train(record)

    def eval(self, step: int, epoch: float, metrics: dict[str, float]) -> None:
        """The figures of an evaluation, e.g. top1 and top5 in percent."""
        if not self.main:
            return
        record = self._record("eval", step, epoch, metrics)
        with suppress(OSError):
            self.console.eval(record, list(metrics))

    def message(self, text: str) -> None:
        if self.main:
            with suppress(OSError):
                self.console.message(text)

    def close(self, status: str) -> None:
        """Ends the logging. `status`: finished, stopped (by a signal) or failed."""
        if not self.main:
            return
        with suppress(OSError):
            self.console.close()
        with writing(self.out / FILE), ExitStack() as stack:  # each of them, whatever becomes of the others
            for tracker in self.trackers:
                stack.callback(tracker.close, status)
            stack.callback(self._write_status, status)
            stack.callback(self.metrics.close)

    def _record(self, kind: str, step: int, epoch: float, values: dict[str, float]) -> dict:
        values = {name: float(value) for name, value in values.items()}
        record = {"kind": kind, "step": int(step), "epoch": round(float(epoch), 6), **values}
        with writing(self.out / FILE):
            self.metrics.write({**record, "seconds": round(self.seconds, 3), "time": round(time.time(), 3)})
        for tracker in self.trackers:
            tracker.log(record["step"], {f"{kind}/{name}": value for name, value in values.items()})
        self.last_step = record["step"]
        return record

    def _write_status(self, status: str) -> None:
        with writing(self.out / STATUS_FILE):
            write_text(self.out / STATUS_FILE, json.dumps({"status": status, "step": self.last_step}) + "\n")

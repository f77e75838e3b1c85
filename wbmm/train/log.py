"""Where the figures of a run go, from its first process: metrics.jsonl, the console, TensorBoard, Weights & Biases."""

import json
import resource
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import torch

from wbmm.extras import install_command, is_installed, need
from wbmm.io.atomic import write_text

from .config import TrainConfig, to_dict, to_yaml
from .console import make_console

__all__ = [
    "METRICS_FILE",
    "STATUS_FILE",
    "Clock",
    "MetricsFile",
    "RunLogger",
    "TensorBoard",
    "WeightsAndBiases",
    "memory_mb",
    "read_metrics",
    "working_seconds",
    "writing",
]

METRICS_FILE = "metrics.jsonl"
STATUS_FILE = "status.json"
BREAK_S = 600  # without `seconds`: two records further apart than this are not one stretch of training


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
        if cfg.log.tensorboard or (cfg.log.tensorboard is None and is_installed("tensorboard")):
            self.trackers.append(TensorBoard(cfg, self.out, resumed_step))
        if cfg.log.wandb:
            self.trackers.append(WeightsAndBiases(cfg, self.out, resumed_step))
        with writing(self.out / METRICS_FILE):
            self.out.mkdir(parents=True, exist_ok=True)
            self.metrics = MetricsFile(self.out, resumed_step)
        before = working_seconds(self.metrics.kept) if resumed_seconds is None else resumed_seconds
        self._began = time.monotonic() - before
        self.console = make_console(cfg.schedule.epochs, cfg.global_batch)
        self._write_status("running")
        self._say_what_is_left_out(cfg)

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

    def step(self, step: int, epoch: float, loss: float, lr: float) -> None:
        """Moves the bar; `loss` is nan where the device has not told it yet. Nothing is written to a file."""
        if self.main:
            with suppress(OSError):
                self.console.step(step, epoch, loss, lr)

    def evaluating(self, done: int, total: int) -> None:
        """Says how far an evaluation is, in images."""
        if self.main:
            with suppress(OSError):
                self.console.evaluating(done, total)

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
        with writing(self.out / METRICS_FILE), ExitStack() as stack:  # each of them, whatever becomes of the others
            for tracker in self.trackers:
                stack.callback(tracker.close, status)
            stack.callback(self._write_status, status)
            stack.callback(self.metrics.close)

    def _say_what_is_left_out(self, cfg: TrainConfig) -> None:
        wanted = {"matplotlib": "train_batch.png, curves.png"}
        if cfg.log.tensorboard is None:
            wanted["tensorboard"] = "event files"
        if sys.stderr.isatty():
            wanted["rich"] = "a progress bar"
        missing = [f"{what} ({package})" for package, what in wanted.items() if not is_installed(package)]
        if missing:
            self.message(f"left out, as not installed: {', '.join(missing)}; {install_command('rich')} brings them")

    def _record(self, kind: str, step: int, epoch: float, values: dict[str, float]) -> dict:
        values = {name: float(value) for name, value in values.items()}
        record = {"kind": kind, "step": int(step), "epoch": round(float(epoch), 6), **values}
        with writing(self.out / METRICS_FILE):
            self.metrics.write({**record, "seconds": round(self.seconds, 3), "time": round(time.time(), 3)})
        for tracker in self.trackers:
            tracker.log(record["step"], {f"{kind}/{name}": value for name, value in values.items()})
        self.last_step = record["step"]
        return record

    def _write_status(self, status: str) -> None:
        with writing(self.out / STATUS_FILE):
            write_text(self.out / STATUS_FILE, json.dumps({"status": status, "step": self.last_step}) + "\n")


class MetricsFile:
    """Appends records; on resume it first drops those after the step that the run restarts from.

    A new run in a folder that has metrics keeps the old ones as `metrics.old.jsonl`.

    Attributes:
        kept: The records from before the resumed step.
    """

    def __init__(self, out: Path, resumed_step: int | None):
        path = out / METRICS_FILE
        self.kept: list[dict] = []
        if path.exists() and resumed_step is None:
            path.replace(out / "metrics.old.jsonl")
        elif path.exists():
            self.kept = [record for record in read_metrics(out) if record["step"] <= resumed_step]
            write_text(path, "".join(f"{json.dumps(record)}\n" for record in self.kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(run_dir: str | Path) -> list[dict]:
    """The records of a run. A line cut short by a crash is left out."""
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise ValueError(f"no {METRICS_FILE} in {run_dir}: not the folder of a run")
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [record for record in records if isinstance(record, dict) and "step" in record]


def working_seconds(records: list[dict]) -> float:
    """The time spent in training up to the last record, without the time between sittings.

    Each record says so in `seconds`. Those of older versions hold the time of day alone, from which it is guessed.
    """
    if records and "seconds" in records[-1]:
        return records[-1]["seconds"]
    gaps = (after - before for before, after in pairwise(record["time"] for record in records if "time" in record))
    return sum(gap for gap in gaps if gap < BREAK_S)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a full disk, and any other error in writing a run's file, into one line that says how to go on."""
    try:
        yield
    except OSError as error:
        room = ""
        with suppress(OSError):
            room = f" ({shutil.disk_usage(path.parent).free / 2**20:,.0f} MB free on that disk)"
        raise ValueError(
            f"cannot write {path}: {error.strerror or error}{room}. What was saved before is intact: "
            "make room, then continue with resume=auto"
        ) from error


class TensorBoard:
    """Event files in `<run>/tensorboard`; a resumed run hides what the interrupted one wrote after its step."""

    def __init__(self, cfg: TrainConfig, out: Path, resumed_step: int | None):
        need("tensorboard", "log.tensorboard=true")
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resumed_step is None else resumed_step + 1
        self.folder = out / "tensorboard"
        self._hook, threading.excepthook = threading.excepthook, self._thread_failed
        with writing(self.folder):
            self.writer = SummaryWriter(str(self.folder), purge_step=purge)
            if resumed_step is None:
                self.writer.add_text("config", f"```yaml\n{to_yaml(cfg)}```", 0)

    def log(self, step: int, values: dict[str, float]) -> None:
        with writing(self.folder):  # it writes in a thread of its own: this may be the error of a value before
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)

    def close(self, status: str) -> None:
        try:
            with writing(self.folder):
                self.writer.close()
        finally:
            threading.excepthook = self._hook

    def _thread_failed(self, failure: threading.ExceptHookArgs) -> None:
        """Keeps the traceback of a full disk off the console: the same error comes out of the next call."""
        ours = type(failure.thread).__module__.startswith("tensorboard.")
        if not (ours and issubclass(failure.exc_type, OSError)):
            self._hook(failure)


class WeightsAndBiases:
    """One wandb run for the life of the folder: its id is kept in `wandb-id.txt`, so resuming continues it.

    Steps are a logged value, not wandb's own counter, which refuses to go back to the step of a checkpoint.
    """

    def __init__(self, cfg: TrainConfig, out: Path, resumed_step: int | None):
        wandb = need("wandb", "log.wandb=true")
        id_file = out / "wandb-id.txt"
        if resumed_step is None or not id_file.is_file():
            with writing(id_file):
                out.mkdir(parents=True, exist_ok=True)
                id_file.write_text(secrets.token_hex(4) + "\n")
        self.run = wandb.init(
            project=cfg.log.wandb_project,
            name=cfg.log.name or out.name,
            id=id_file.read_text().strip(),
            resume="allow",
            dir=str(out),
            config=to_dict(cfg),
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log({**values, "step": step})

    def close(self, status: str) -> None:
        self.run.summary["status"] = status
        self.run.finish(exit_code=0 if status in ("finished", "stopped") else 1)


class Clock:
    """Measures the steps since the last reading."""

    def __init__(self):
        self._reset()

    def _reset(self):
        self._start, self._waited, self.steps = time.perf_counter(), 0.0, 0

    @contextmanager
    def waiting(self):
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    def read(self) -> tuple[float, float]:
        """Seconds a step and the share of them spent waiting for data; starts a new measurement."""
        elapsed = max(time.perf_counter() - self._start, 1e-9)
        seconds, share = elapsed / max(self.steps, 1), self._waited / elapsed
        self._reset()
        return seconds, share


def memory_mb(device: torch.device) -> float:
    """The peak so far: of the device's allocator on CUDA, of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

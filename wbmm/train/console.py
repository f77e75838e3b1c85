"""What people see of a run: a bar on a terminal, plain lines elsewhere."""

import math
import sys
import time

from wbmm.extras import is_installed, need

__all__ = ["BarConsole", "Pace", "PlainConsole", "duration", "make_console"]

KEPT = 0.9  # of the average of losses and of step times, at each step
WIDE = 115  # columns of a terminal that hold the bar and every figure
REFRESH_S = 0.2  # of the bar
INTERVAL_S = 30.0  # without a line, elsewhere
LEAST_S = 2.0  # between the lines of two reports: a small set has one at every step


class Pace:
    """A run from one step to the next: the smoothed loss, the speed, the time that is left.

    Args:
        epochs: of the run.
        images: in a step.
    """

    def __init__(self, epochs: int, images: int | None):
        self.epochs, self.images = epochs, images
        self._loss, self._seconds = _Average(), _Average()
        self._last: tuple[float, int] | None = None
        self.figures: dict[str, float] = {}  # by the names of a report's

    def step(self, step: int, epoch: float, loss: float, lr: float) -> None:
        now = time.monotonic()
        if self._last is not None and step > self._last[1]:
            self._seconds.add((now - self._last[0]) / (step - self._last[1]))
            left = (self.epochs - epoch) * step / epoch if epoch else math.nan
            self.figures["eta_s"] = self._seconds.value * left
            if self.images:
                self.figures["images_per_s"] = self.images / self._seconds.value
        self._last = now, step
        self._loss.add(loss)
        self.figures |= {"step": step, "epoch": epoch, "loss": self._loss.value, "lr": lr}

    def report(self, record: dict) -> None:
        """Takes over what a report of the run measured."""
        if record["step"] != self.figures.get("step"):
            self._loss.add(record["loss"])
        own = ("images_per_s", "eta_s") if self._seconds.known else ()  # smoother than what one report measured
        self.figures |= {key: value for key, value in record.items() if key not in own} | {"loss": self._loss.value}

    def pause(self) -> None:
        """What happens until the next step is no training."""
        self._last = None

    def line(self, short: bool = False) -> str:
        """Loss, rate, speed, memory and time left, as far as they are known; short: the most important of them."""
        known = self.figures
        parts = [f"loss {known['loss']:.4f}", f"lr {known['lr']:.2e}"]
        if "images_per_s" in known:
            parts.append(f"{known['images_per_s']:,.0f} images/s")
        if short:
            parts = [parts[0], *parts[2:]]
        elif "memory_mb" in known:
            parts += [f"wait {100 * known['data_wait']:.1f}%", f"{known['memory_mb']:,.0f} MB"]
        if math.isfinite(known.get("eta_s", math.nan)):
            parts.append(f"ETA {duration(known['eta_s'])}")
        return "  ".join(parts)


class _Average:
    """An exponential average that starts at its first value."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    @property
    def known(self) -> bool:
        return self._weight > 0

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else math.nan

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self._sum, self._weight = KEPT * self._sum + (1 - KEPT) * value, KEPT * self._weight + (1 - KEPT)


def make_console(epochs: int, images: int | None = None, stream=None):
    """A bar where one can be seen and rich is installed."""
    stream = stream or sys.stderr
    kind = BarConsole if stream.isatty() and is_installed("rich") else PlainConsole
    return kind(epochs, stream, images)


class PlainConsole:
    """One line a report, unless one came `LEAST_S` before, and one whenever `INTERVAL_S` have passed without."""

    def __init__(self, epochs: int, stream, images: int | None = None):
        self.epochs, self.stream, self.pace = epochs, stream, Pace(epochs, images)
        self._last, self._reported = time.monotonic(), -math.inf

    def step(self, step: int, epoch: float, loss: float, lr: float) -> None:
        self.pace.step(step, epoch, loss, lr)
        if time.monotonic() - self._last >= INTERVAL_S:
            self._print()

    def train(self, record: dict) -> None:
        self.pace.report(record)
        if time.monotonic() - self._reported >= LEAST_S:
            self._print()

    def _print(self) -> None:
        self._reported = time.monotonic()
        known = self.pace.figures
        self.message(f"epoch {known['epoch']:.2f}/{self.epochs}  step {known['step']}  {self.pace.line()}")

    def evaluating(self, done: int, total: int) -> None:
        self.pace.pause()
        if time.monotonic() - self._last >= INTERVAL_S:
            self.message(f"evaluating: {done} of {total} images")

    def eval(self, record: dict, names: list[str]) -> None:
        self.pace.pause()
        self.message(_eval_line(record, names))

    def message(self, text: str) -> None:
        self._last = time.monotonic()
        print(text, file=self.stream, flush=True)

    def close(self) -> None:
        pass


class BarConsole:
    """A rich progress bar over the whole run; evaluations and messages scroll above it."""

    def __init__(self, epochs: int, stream, images: int | None = None):
        need("rich", "a progress bar")
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self.epochs, self.pace, self._drawn = epochs, Pace(epochs, images), 0.0
        columns = (
            TextColumn("epoch {task.fields[epoch]:.2f}/{task.total:g}"),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TextColumn("{task.fields[line]}", markup=False),
        )
        self.progress = Progress(*columns, console=Console(file=stream), auto_refresh=False)
        self.task = self.progress.add_task("", total=epochs, epoch=0.0, line="")
        self.progress.start()

    def step(self, step: int, epoch: float, loss: float, lr: float) -> None:
        self.pace.step(step, epoch, loss, lr)
        if self._is_due():
            self._draw(self._line())

    def train(self, record: dict) -> None:
        self.pace.report(record)
        self._draw(self._line())

    def evaluating(self, done: int, total: int) -> None:
        self.pace.pause()
        if self._is_due():
            self._draw(f"evaluating: {done:,} of {total:,} images")

    def eval(self, record: dict, names: list[str]) -> None:
        self.pace.pause()
        self.message(_eval_line(record, names))

    def message(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self.progress.refresh()

    def close(self) -> None:
        self.progress.stop()

    def _is_due(self) -> bool:
        return time.monotonic() - self._drawn >= REFRESH_S

    def _line(self) -> str:
        if self.progress.console.width < WIDE:
            return self.pace.line(short=True)
        step, epoch = self.pace.figures["step"], self.pace.figures["epoch"]
        return f"step {step}/{round(step / epoch * self.epochs)}  {self.pace.line()}"

    def _draw(self, line: str) -> None:
        self._drawn, epoch = time.monotonic(), self.pace.figures.get("epoch", 0.0)
        self.progress.update(self.task, completed=epoch, epoch=epoch, line=line, refresh=True)


def _eval_line(record: dict, names: list[str]) -> str:
    shown = [name for name in names if not name.endswith("images")]
    values = (f"{name} {record[name]:.4f}" if "loss" in name else f"{name} {record[name]:.2f}" for name in shown)
    return f"epoch {record['epoch']:g}  step {record['step']}  eval  " + "  ".join(values)


def duration(seconds: float) -> str:
    """`0:01:05`, or `2d 03:00:00`."""
    minutes, seconds = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02d}:{minutes:02d}:{seconds:02d}" if days else f"{hours}:{minutes:02d}:{seconds:02d}"

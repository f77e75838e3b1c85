"""What a run prints: a progress bar on a terminal, plain lines anywhere else."""

import sys
from importlib.util import find_spec

__all__ = ["BarConsole", "PlainConsole", "duration", "is_installed", "make_console"]


def make_console(epochs: int, stream=None):
    """A bar where one can be seen and rich is installed."""
    stream = stream or sys.stderr
    return BarConsole(epochs, stream) if stream.isatty() and is_installed("rich") else PlainConsole(epochs, stream)


def is_installed(package: str) -> bool:
    """Whether a package is there, without the time of importing it."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


class PlainConsole:
    """One line a report."""

    def __init__(self, epochs: int, stream):
        self.epochs, self.stream = epochs, stream

    def train(self, record: dict) -> None:
        self.message(f"epoch {record['epoch']:.2f}/{self.epochs}  step {record['step']}  {_train_line(record)}")

    def eval(self, record: dict, names: list[str]) -> None:
        self.message(_eval_line(record, names))

    def message(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def close(self) -> None:
        pass


class BarConsole:
    """A rich progress bar over the whole run; evaluations and messages scroll above it."""

    def __init__(self, epochs: int, stream):
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
        except ImportError as error:
            raise ImportError("a progress bar needs rich: pip install 'wbmm[train]'") from error
        self.epochs = epochs
        columns = (
            TextColumn("epoch {task.fields[epoch]:.2f}/{task.total:g}"),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TextColumn("{task.fields[line]}", markup=False),
        )
        self.progress = Progress(*columns, console=Console(file=stream), auto_refresh=False)
        self.task = self.progress.add_task("", total=epochs, epoch=0.0, line="")
        self.progress.start()

    def train(self, record: dict) -> None:
        self.progress.update(
            self.task, completed=record["epoch"], epoch=record["epoch"], line=_train_line(record), refresh=True
        )

    def eval(self, record: dict, names: list[str]) -> None:
        self.message(_eval_line(record, names))

    def message(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False)
        self.progress.refresh()

    def close(self) -> None:
        self.progress.stop()


def _train_line(record: dict) -> str:
    return (
        f"loss {record['loss']:.4f}  lr {record['lr']:.2e}  {record['images_per_s']:,.0f} images/s  "
        f"wait {100 * record['data_wait']:.1f}%  {record['memory_mb']:,.0f} MB  ETA {duration(record['eta_s'])}"
    )


def _eval_line(record: dict, names: list[str]) -> str:
    shown = [name for name in names if not name.endswith("images")]
    values = (f"{name} {record[name]:.4f}" if "loss" in name else f"{name} {record[name]:.2f}" for name in shown)
    return f"epoch {record['epoch']:g}  step {record['step']}  eval  " + "  ".join(values)


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02d}:{minutes:02d}:{seconds:02d}" if days else f"{hours}:{minutes:02d}:{seconds:02d}"

"""Progress of long work, on standard error: a bar on a terminal, a line every half minute elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Advance", "progress_bar"]

INTERVAL_S = 30.0

Advance = Callable[[int], None]


@contextmanager
def progress_bar(total: int | None, label: str) -> Iterator[Advance]:
    """A function to call with the number of things that are done since the last call.

    The bar needs rich, of the extra `train`; without it there are lines on a terminal too. Work that ends within the
    first half minute prints no line.

    Args:
        total: how many there are, None if that is not known.
        label: what they are.
    """
    columns = _columns(total) if sys.stderr.isatty() else None
    if columns is None:
        lines = _Lines(total, label)
        yield lines.advance
        lines.finish()
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda count: progress.update(task, advance=count)


def _columns(total: int | None) -> tuple | None:
    """The parts of a bar; None without rich."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:
        return None
    left = TimeElapsedColumn() if total is None else TimeRemainingColumn()
    return TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), left


class _Lines:
    """A line whenever `INTERVAL_S` have passed since the last one, and one at the end if there was one before."""

    def __init__(self, total: int | None, label: str) -> None:
        self.total, self.label, self.done, self.printed = total, label, 0, 0
        self.start = self.last = time.monotonic()

    def advance(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if now - self.last >= INTERVAL_S and self.done != self.total:
            self.last = now
            self._print(now - self.start)

    def finish(self) -> None:
        if 0 < self.printed < self.done:
            self._print(time.monotonic() - self.start)

    def _print(self, seconds: float) -> None:
        self.printed = self.done
        text = f"{self.done} of {self.total}" if self.total else str(self.done)
        text = f"{self.label}: {text} in {_clock(seconds)}"
        if self.total and 0 < self.done < self.total:
            text += f", about {_clock(seconds / self.done * (self.total - self.done))} left"
        print(text, file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"

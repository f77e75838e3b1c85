"""Progress of long work, on standard error: a bar on a terminal, a line every half minute elsewhere."""

import sys
import threading
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
    first half minute prints no line. Work of which nobody knows how far it is, such as an export, need not call the
    function: the time goes on all the same.

    Args:
        total: how many there are, None if that is not known.
        label: what they are.
    """
    columns = _columns(total) if sys.stderr.isatty() else None
    if columns is None:
        lines = _Lines(total, label)
        try:
            yield lines.advance
        finally:
            lines.stop()
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
    name, bar, count = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
    if total is None:
        return name, bar, count, TimeElapsedColumn()
    return name, bar, count, TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn()


class _Lines:
    """A line whenever `INTERVAL_S` have passed since the last one, and one at the end if there was one before."""

    def __init__(self, total: int | None, label: str) -> None:
        self.total, self.label, self.done, self.printed = total, label, 0, None
        self.start = self.last = time.monotonic()
        self._lock, self._ended = threading.Lock(), threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def advance(self, count: int) -> None:
        with self._lock:
            self.done += count
        self._print_if_due()

    def stop(self) -> None:
        self._ended.set()

    def finish(self) -> None:
        if self.printed is not None and self.printed < self.done:
            self._print(time.monotonic() - self.start)

    def _watch(self) -> None:
        """Prints while a single step takes long."""
        while not self._ended.wait(INTERVAL_S):
            self._print_if_due()

    def _print_if_due(self) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self.last >= INTERVAL_S and self.done != self.total:
                self.last = now
                self._print(now - self.start)

    def _print(self, seconds: float) -> None:
        self.printed = self.done
        if self.total is None and not self.done:
            print(f"{self.label}: {_clock(seconds)} so far", file=sys.stderr, flush=True)
            return
        text = f"{self.done} of {self.total}" if self.total else str(self.done)
        text = f"{self.label}: {text} in {_clock(seconds)}"
        if self.total and 0 < self.done < self.total:
            text += f", about {_clock(seconds / self.done * (self.total - self.done))} left"
        print(text, file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"

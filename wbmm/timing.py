"""The one way time is measured here: candidates in turn, many rounds, outliers removed, ratios of medians."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of each round, outliers removed."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)


def remove_outliers(seconds: list[float]) -> list[float]:
    """Drop what lies more than 1.5 interquartile ranges outside the quartiles."""
    if len(seconds) < 4:
        return list(seconds)
    low, _, high = statistics.quantiles(seconds, n=4)
    margin = 1.5 * (high - low)
    return [s for s in seconds if low - margin <= s <= high + margin]


def time_interleaved(
    candidates: dict[str, Callable[[], object]],
    rounds: int = 10,
    warmup: int = 2,
    on_round: Callable[[], None] = bool,
    pause: float = 0.0,
) -> dict[str, Timing]:
    """Time candidates one after another in each round, so that a change of the machine's load meets all of them.

    Args:
        candidates: name to a call.
        rounds: measured rounds.
        warmup: rounds that are not counted.
        on_round: called after each round, for a progress bar.
        pause: seconds of rest before each call, so that the threads of another library have gone to sleep.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for i in range(warmup + rounds):
        for name, call in candidates.items():
            _synchronize()
            time.sleep(pause)
            start = time.perf_counter()
            call()
            _synchronize()
            if i >= warmup:
                seconds[name].append(time.perf_counter() - start)
        on_round()
    return {name: Timing(tuple(remove_outliers(values))) for name, values in seconds.items()}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

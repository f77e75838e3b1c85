"""The one way time is measured here: candidates in turn, many rounds, outliers removed, ratios of medians."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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

    @property
    def low(self) -> float:
        """The lower quartile; the least of fewer than four."""
        return self.best if len(self.seconds) < 4 else statistics.quantiles(self.seconds, n=4)[0]

    @property
    def high(self) -> float:
        """The upper quartile; the most of fewer than four."""
        return max(self.seconds) if len(self.seconds) < 4 else statistics.quantiles(self.seconds, n=4)[2]


def remove_outliers(seconds: list[float]) -> list[float]:
    """Drop what lies more than 1.5 interquartile ranges outside the quartiles.

    The quartiles are of these values themselves: as an estimate for more of them, one outlier among five would move the
    upper quartile so far that it stays.
    """
    if len(seconds) < 4:
        return list(seconds)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    margin = 1.5 * (high - low)
    return [s for s in seconds if low - margin <= s <= high + margin]


def time_interleaved(
    candidates: dict[str, Callable[[], object]],
    rounds: int = 10,
    warmup: int = 2,
    on_round: Callable[[], None] = bool,
    pause: float = 0.0,
    device: str = "cpu",
) -> dict[str, Timing]:
    """Time candidates one after another in each round, so that a change of the machine's load meets all of them.

    Args:
        candidates: name to a call.
        rounds: measured rounds.
        warmup: rounds that are not counted.
        on_round: called after each round, for a progress bar.
        pause: seconds of rest before each call, so that the threads of another library have gone to sleep.
        device: where the calls run. On a CUDA device the time is between two events on its stream.
    """
    seconds_of = partial(_on_cuda, device=torch.device(device)) if torch.device(device).type == "cuda" else _on_cpu
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for i in range(warmup + rounds):
        for name, call in candidates.items():
            time.sleep(pause)
            taken = seconds_of(call)
            if i >= warmup:
                seconds[name].append(taken)
        on_round()
    return {name: Timing(tuple(remove_outliers(values))) for name, values in seconds.items()}


def _on_cpu(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _on_cuda(call: Callable[[], object], device: torch.device) -> float:
    with torch.cuda.device(device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

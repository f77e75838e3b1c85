"""How long steps take, how much of that is waiting for data, and how much memory they need."""

import resource
import time
from contextlib import contextmanager

import torch

__all__ = ["Clock", "memory_mb"]


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

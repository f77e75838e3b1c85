"""Speed of a table's rows: inference and training steps, the rows in turn in every round."""

import sys
from collections.abc import Callable, Sequence
from functools import partial

import timm
import torch
import torch.nn as nn
from torch import Tensor

from wbmm.bench.timing import Timing, time_interleaved
from wbmm.bench.train import TrainingStep
from wbmm.deploy.fuse import fuse
from wbmm.layers.large_kernel import find_implicit_gemm

from .costs import check_model
from .rows import Row

__all__ = ["can_run", "measure_inference", "measure_training"]


def can_run(row: Row, device: str) -> bool:
    """Whether the row's operator is there: the large-kernel package runs on CUDA alone."""
    return not row.large_kernel or (device.startswith("cuda") and find_implicit_gemm() is not None)


def _build(row: Row, device: str) -> nn.Module:
    check_model(row.model)
    large_kernel = {"large_kernel": "implicit_gemm"} if row.large_kernel else {}
    return timm.create_model(row.model, **row.args, **large_kernel).to(device)


def _images(batch: int, size: int, device: str) -> Tensor:
    return torch.randn(batch, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)


def _time(calls: dict[str, Callable[[], object]], what: str, rounds: int, warmup: int = 1) -> dict[str, Timing]:
    done = 0

    def show() -> None:
        nonlocal done
        done += 1
        print(f"{what}: round {done} of {rounds + warmup}", file=sys.stderr, flush=True)

    return time_interleaved(calls, rounds=rounds, warmup=warmup, on_round=show)


def measure_inference(
    rows: Sequence[Row], batches: Sequence[int], size: int, rounds: int, device: str = "cpu"
) -> dict[int, dict[str, Timing]]:
    """Fused, eager, channels-last forward passes: batch size to row id to times."""
    models = {}
    for row in rows:
        fused = fuse(_build(row, device).eval())
        models[row.id] = fused.to(memory_format=torch.channels_last)
    found = {}
    with torch.inference_mode():
        for batch in batches:
            images = _images(batch, size, device)
            calls = {key: partial(model, images) for key, model in models.items()}
            found[batch] = _time(calls, f"inference, batch {batch}", rounds)
    return found


def measure_training(rows: Sequence[Row], batch: int, size: int, rounds: int, device: str = "cpu") -> dict[str, Timing]:
    """Training steps by row id."""
    images = _images(batch, size, device)
    layout = {"memory_format": torch.channels_last}
    calls = {row.id: TrainingStep(_build(row, device).to(**layout), images) for row in rows}
    return _time(calls, f"training, batch {batch}", rounds)

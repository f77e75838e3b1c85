"""What is known of each row of a table: costs counted, speed measured, the paper's figures beside them."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import timm
import torch
import torch.nn as nn
from torch import Tensor

from wbmm.bench.candidates import TrainingStep
from wbmm.layers.depthwise import find_implicit_gemm
from wbmm.models.fuse import fuse
from wbmm.models.profile import build_on_meta, count_macs, count_params
from wbmm.paper_tables import Row, Table
from wbmm.timing import Timing, time_interleaved

from .small import Small

__all__ = [
    "Costs",
    "Measured",
    "can_run",
    "check_model",
    "count_costs",
    "measure_inference",
    "measure_training",
    "records",
]


@dataclass(frozen=True)
class Costs:
    """Counts of one net in its training form and fused."""

    params: int
    params_fused: int
    macs: int
    macs_fused: int


def check_model(name: str) -> None:
    if not timm.is_model(name):
        raise ValueError(f"timm knows no model {name!r}; see `wbmm list` and timm.list_models()")


def count_costs(model: str, args: dict, size: int = 224, in_chans: int = 3) -> Costs:
    """Counts at a given size. Without the large-kernel package, which changes neither."""
    check_model(model)
    args = {key: value for key, value in args.items() if key != "large_kernel"}
    net = build_on_meta(model, **args, in_chans=in_chans)
    fused = fuse(net)
    return Costs(
        params=count_params(net),
        params_fused=count_params(fused),
        macs=count_macs(net, (size, size), in_chans)[""],
        macs_fused=count_macs(fused, (size, size), in_chans)[""],
    )


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


@dataclass
class Measured:
    """What was measured of a table, by row id; what was not is empty.

    Attributes:
        rows: those asked for, in order.
        costs: of every row.
        inference: by batch size, then row.
        training: times of training steps of `training_batch` images.
        small: runs of the small recipe.
        small_costs: of the nets of the small recipe.
        recipe: that they were trained by.
    """

    table: Table
    rows: list[Row]
    costs: dict[str, Costs]
    inference: dict[int, dict[str, Timing]] = field(default_factory=dict)
    training: dict[str, Timing] = field(default_factory=dict)
    training_batch: int = 0
    small: dict[str, Small] = field(default_factory=dict)
    small_costs: dict[str, Costs] = field(default_factory=dict)
    recipe: str = ""


def _seconds(time: str) -> int:
    minutes, seconds = time.split(":")
    return 60 * int(minutes) + int(seconds)


def _paper_ratios(row: Row, base: Row) -> dict[str, float | None]:
    """Speed as a multiple of the baseline's, from what the paper prints for both."""
    times = [_seconds(r.paper["time"]) for r in (base, row) if "time" in r.paper]
    speeds = [r.paper["speed"] for r in (row, base) if "speed" in r.paper]
    return {
        "training_ratio_paper": times[0] / times[1] if len(times) == 2 else None,
        "inference_ratio_paper": speeds[0] / speeds[1] if len(speeds) == 2 else None,
    }


def _speed(timings: dict[str, Timing], row: Row, batch: int, name: str) -> dict[str, float | None]:
    """Images per second, and the ratio of medians to the baseline of the same interleaved run."""
    if row.id not in timings:
        return {f"{name}_images_per_s": None, f"{name}_ratio": None}
    own, base = timings[row.id].median, timings[row.baseline].median
    return {f"{name}_images_per_s": batch / own, f"{name}_ratio": base / own}


def _small(row: Row, measured: Measured) -> dict:
    found, costs = measured.small.get(row.id), measured.small_costs.get(row.id)
    return {
        "small_model": row.small_model,
        "small_args": json.dumps(row.small_args),
        "small_params_m": costs.params / 1e6 if costs else None,
        "small_top1_mean": found.mean if found else None,
        "small_top1_spread": found.spread if found else None,
        "small_top1_seeds": " ".join(f"{value:.2f}" for value in found.top1) if found else None,
        "small_seconds": found.seconds if found else None,
    }


def records(measured: Measured) -> list[dict]:
    """One flat record a row, with the same keys in each; None is not printed or not measured."""
    table = measured.table
    result = []
    for row in measured.rows:
        costs, paper = measured.costs[row.id], row.paper
        record = {
            "table": table.name,
            "row": row.id,
            "label": row.label,
            "baseline": row.baseline,
            "model": row.model,
            "args": json.dumps(row.args),
            "large_kernel": row.large_kernel,
            "params_m_paper": paper.get("params"),
            "params_m": costs.params / 1e6,
            "params_m_fused": costs.params_fused / 1e6,
            "flops_g_paper": paper.get("flops"),
            "flops_g": costs.macs / 1e9,
            "flops_g_fused": costs.macs_fused / 1e9,
            "memory_gb_paper": paper.get("memory"),
            "epoch_time_paper": paper.get("time"),
            "images_per_s_paper": paper.get("speed"),
            **_paper_ratios(row, table.row(row.baseline)),
            **_speed(measured.training, row, measured.training_batch, "training"),
        }
        for batch, timings in measured.inference.items():
            record |= _speed(timings, row, batch, f"inference_b{batch}")
        record |= {f"{key}_paper": paper.get(key) for key in ("top1", "top1_pm", "miou", "miou_pm")}
        result.append(record | _small(row, measured))
    return result

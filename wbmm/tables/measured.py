"""What is known of each row of a table: the paper's figures and what was measured, as values."""

import json
from dataclasses import dataclass, field

from wbmm.bench.timing import Timing

from .costs import Costs
from .rows import Row, Table
from .small import Small

__all__ = ["Measured", "records"]


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

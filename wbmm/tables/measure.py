"""What is known of each row of a table: costs counted, speed measured, nets trained small; the paper beside them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, stdev

import timm
import torch
import torch.nn as nn
from torch import Tensor

from wbmm.bench.compare import Contender, compare
from wbmm.bench.memory import probe
from wbmm.bench.setting import Setting, TrainingStep
from wbmm.bench.training import IMAGES, epoch_seconds, epoch_text
from wbmm.config_files import SMALL_RECIPES, find_config
from wbmm.layers.depthwise import find_implicit_gemm
from wbmm.models.costs import build_on_meta, count_macs, count_params
from wbmm.models.fuse import fuse
from wbmm.ops.dispatch import watch
from wbmm.paper_tables import Row, Table
from wbmm.timing import Timing
from wbmm.train.runs import RunFacts

__all__ = [
    "LAYOUTS",
    "Costs",
    "Measured",
    "Small",
    "Speed",
    "Timer",
    "can_run",
    "check_row",
    "count_costs",
    "find_recipe",
    "records",
    "train_small",
]


@dataclass(frozen=True)
class Small:
    """The runs of one row, one a seed."""

    runs: tuple[RunFacts, ...]

    @property
    def top1(self) -> list[float]:
        """After the last epoch, not the best one."""
        return [run.final["top1"] for run in self.runs]

    @property
    def mean(self) -> float:
        return mean(self.top1)

    @property
    def spread(self) -> float | None:
        """Highest less lowest; one seed has none."""
        return max(self.top1) - min(self.top1) if len(self.runs) > 1 else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the seeds; one seed has none."""
        return stdev(self.top1) if len(self.runs) > 1 else None

    @property
    def seconds(self) -> float:
        return mean(run.seconds for run in self.runs)


def find_recipe(name: str) -> Path:
    """The file of a small recipe, e.g. of `fashion_mnist`, or any other training configuration."""
    try:
        return find_config(SMALL_RECIPES.get(name, name))
    except ValueError as error:
        raise ValueError(
            f"no recipe {name!r}: expected {', '.join(SMALL_RECIPES)} or a training configuration ({error})"
        ) from None


def train_small(
    rows: Sequence[Row], recipe: Path, seeds: int, out: Path, overrides: Sequence[str] = ()
) -> dict[str, Small] | None:
    """Trains what is not trained yet; None if a signal stopped it.

    LKA rows are left out: the package changes how a net is run, not the net.

    Args:
        rows: of one table.
        recipe: a training configuration; each row brings its model.
        seeds: how many, from 0.
        out: folder of the runs.
        overrides: `key=value` changes to the recipe.
    """
    entries = [Contender(row.id, row.small_model, row.small_args) for row in rows if not row.large_kernel]
    runs = compare(recipe, entries, range(seeds), out, overrides)
    return None if runs is None else {row_id: Small(tuple(facts)) for row_id, facts in runs.items()}


SETTING = ("device", "dtype", "autocast", "precision")
LAYOUTS = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass(frozen=True)
class Costs:
    """Counts of one net in its training form and fused."""

    params: int
    params_fused: int
    macs: int
    macs_fused: int


def check_row(name: str) -> None:
    """Raises unless timm knows the model."""
    if not timm.is_model(name):
        raise ValueError(f"timm knows no model {name!r}; see `wbmm list` and timm.list_models()")


def count_costs(model: str, args: dict, size: int = 224, in_chans: int = 3) -> Costs:
    """Counts at a given size. Without the large-kernel package, which changes neither."""
    check_row(model)
    args = {key: value for key, value in args.items() if key != "large_kernel"}
    net = build_on_meta(model, **args, in_chans=in_chans)
    fused = fuse(net)
    return Costs(
        params=count_params(net),
        params_fused=count_params(fused),
        macs=count_macs(net, (size, size), in_chans)[""],
        macs_fused=count_macs(fused, (size, size), in_chans)[""],
    )


def can_run(row: Row, setting: Setting) -> bool:
    """Whether the row's operator is there: the large-kernel package runs on CUDA alone."""
    return not row.large_kernel or (setting.on_cuda and find_implicit_gemm() is not None)


@dataclass(frozen=True)
class Speed:
    """The time of one row, and the memory format that it was taken in."""

    timing: Timing
    layout: str


@dataclass
class Timer:
    """How rows are timed: `inference` and `training`, all rows in turn.

    Attributes:
        setting: the device and the numbers.
        layouts: memory formats, of `LAYOUTS`, that each row is timed in; the faster one counts.
        size: side of the images.
        rounds: measured rounds.
        backends: filled in by timing: who computed each operator, by `inference` or `training` and the operator's name.
    """

    setting: Setting
    layouts: Sequence[str]
    size: int
    rounds: int
    backends: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def inference(self, rows: Sequence[Row], batches: Sequence[int]) -> dict[int, dict[str, Speed]]:
        """Fused, eager forward passes: batch size to row id to times."""
        models = {
            (row.id, layout): self.setting.place(fuse(_build(row).eval()), LAYOUTS[layout])
            for row in rows
            for layout in self.layouts
        }
        found = {}
        with torch.inference_mode():
            for batch in batches:
                images = self._images(batch)
                calls = {key: partial(self.setting.forward, model, images[key[1]]) for key, model in models.items()}
                found[batch] = self._time(calls, "inference", batch)
        return found

    def training(self, rows: Sequence[Row], batch: int) -> dict[str, Speed]:
        """Training steps by row id."""
        images = self._images(batch)
        calls = {
            (row.id, layout): TrainingStep(
                self.setting.place(_build(row), LAYOUTS[layout]), images[layout], self.setting
            )
            for row in rows
            for layout in self.layouts
        }
        return self._time(calls, "training", batch)

    def memory(self, rows: Sequence[Row], batch: int) -> dict[str, int]:
        """Peak bytes of a training step by row id, each in a process of its own."""
        size = (self.size, self.size)
        return {row.id: probe(row.model, "step", size, batch, self.setting, _arguments(row)) for row in rows}

    def _images(self, batch: int) -> dict[str, Tensor]:
        images = torch.randn(batch, 3, self.size, self.size)
        return {layout: self.setting.place(images, LAYOUTS[layout]) for layout in self.layouts}

    def _time(self, calls: dict[tuple[str, str], Callable[[], object]], what: str, batch: int) -> dict[str, Speed]:
        """The faster layout of each row."""
        with self.setting.running(), watch(partial(self._note, what)):
            for call in calls.values():
                call()
        timings = self.setting.time(calls, f"{what}, batch {batch}, rounds", self.rounds, warmup=1)
        found: dict[str, Speed] = {}
        for (row_id, layout), timing in timings.items():
            if row_id not in found or timing.median < found[row_id].timing.median:
                found[row_id] = Speed(timing, layout)
        return found

    def _note(self, what: str, operator: str, backend: str, reasons: dict[str, str]) -> None:
        self.backends.setdefault((what, operator), set()).add(backend)


def _build(row: Row) -> nn.Module:
    check_row(row.model)
    return timm.create_model(row.model, **_arguments(row))


def _arguments(row: Row) -> dict:
    return {**row.args, **({"large_kernel": "implicit_gemm"} if row.large_kernel else {})}


@dataclass
class Measured:
    """What was measured of a table, by row id; what was not is empty.

    Attributes:
        table: it belongs to.
        rows: those asked for, in order.
        costs: of every row.
        setting: that speed was measured in; None if it was not.
        inference: by batch size, then row.
        training: of training steps of `training_batch` images.
        peaks: bytes that such a step needs at most.
        small: runs of the small recipe.
        small_costs: of the nets of the small recipe.
        recipe: that they were trained by.
    """

    table: Table
    rows: list[Row]
    costs: dict[str, Costs]
    setting: Setting | None = None
    inference: dict[int, dict[str, Speed]] = field(default_factory=dict)
    training: dict[str, Speed] = field(default_factory=dict)
    training_batch: int = 0
    peaks: dict[str, int] = field(default_factory=dict)
    small: dict[str, Small] = field(default_factory=dict)
    small_costs: dict[str, Costs] = field(default_factory=dict)
    recipe: str = ""


def _paper_ratios(row: Row, base: Row) -> dict[str, float | None]:
    """Speed as a multiple of the baseline's, from what the paper prints for both."""
    times = [epoch_seconds(r.paper["time"]) for r in (base, row) if "time" in r.paper]
    speeds = [r.paper["speed"] for r in (row, base) if "speed" in r.paper]
    return {
        "training_ratio_paper": times[0] / times[1] if len(times) == 2 else None,
        "inference_ratio_paper": speeds[0] / speeds[1] if len(speeds) == 2 else None,
    }


def _speed(speeds: dict[str, Speed], row: Row, batch: int, name: str) -> dict[str, float | str | None]:
    """Images per second, the ratio of medians to the baseline of the same interleaved run, and the memory format."""
    if row.id not in speeds:
        return {f"{name}_images_per_s": None, f"{name}_ratio": None, f"{name}_layout": None}
    own, base = speeds[row.id].timing.median, speeds[row.baseline].timing.median
    return {
        f"{name}_images_per_s": batch / own,
        f"{name}_ratio": base / own,
        f"{name}_layout": speeds[row.id].layout,
    }


def _epoch(measured: Measured, row: Row) -> str | None:
    """An ImageNet epoch at the speed of the steps, without reading images."""
    if row.id not in measured.training:
        return None
    return epoch_text(IMAGES / measured.training_batch * measured.training[row.id].timing.median)


def _small(row: Row, measured: Measured) -> dict:
    found, costs = measured.small.get(row.id), measured.small_costs.get(row.id)
    return {
        "small_model": row.small_model,
        "small_args": json.dumps(row.small_args),
        "small_params_m": costs.params / 1e6 if costs else None,
        "small_top1_mean": found.mean if found else None,
        "small_top1_std": found.deviation if found else None,
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
            "speedup_paper": paper.get("speedup"),
            **_speed(measured.training, row, measured.training_batch, "training"),
            "epoch_here": _epoch(measured, row),
            "peak_mb": measured.peaks[row.id] / 2**20 if row.id in measured.peaks else None,
        }
        for batch, timings in measured.inference.items():
            record |= _speed(timings, row, batch, f"inference_b{batch}")
        record |= {f"{key}_paper": paper.get(key) for key in ("top1", "top1_pm", "miou", "miou_pm")}
        record |= {key: getattr(measured.setting, key, None) for key in SETTING}
        result.append(record | _small(row, measured))
    return result

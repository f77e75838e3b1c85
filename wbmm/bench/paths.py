"""`wbmm bench paths`: where a CPU can compute the same in two ways, the speed of each by shape, and which is taken.

`--tune` measures the thresholds of that choice on this processor, and writes them to a profile that dispatch reads. A
threshold is either a choice among sizes (the fastest over all shapes is taken, if it gains more than noise) or a start:
the size from which on one path is faster than the other.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from wbmm.io.atomic import write_text
from wbmm.layers import FeedForward, FusedFeedForward, HierarchicalWBMM2d, WBMM2d
from wbmm.machine import machine_facts, measured_line, processor
from wbmm.ops import expand_table, num_offsets, reference, use_backend
from wbmm.ops.backends.onednn.ffn import ffn_inference, rows_at_once
from wbmm.ops.backends.onednn.linear import computes, linear_gelu, pack_weight, takes_onednn
from wbmm.ops.backends.onednn.windowed import (
    kernel_size,
    pack_kernel,
    prefers_convolution,
    table_to_kernel,
    windowed_convolution,
)
from wbmm.ops.profile import NEVER, Profile, Thresholds, current, default_place, load, to_text, use_profile
from wbmm.progress import progress_bar
from wbmm.text import render_table
from wbmm.timing import time_interleaved

from .limit import Shape
from .results import Record, add_output_arguments, check_out, present
from .setting import DTYPES, Setting, add_setting_arguments

__all__ = ["choose", "run_tuning", "start", "tune"]

EXAMPLE = "wbmm bench paths --rounds 15 --out results/paths"
WINDOWS = (7, 8, 10, 14)
COUNTS = (1, 4, 8, 16, 64, 256)
LINEARS: tuple[Shape, ...] = (
    *((3136, 80, 320), (784, 160, 640), (196, 320, 1280), (49, 640, 2560)),
    *((12544, 160, 640), (3136, 320, 1280), (784, 640, 2560)),
)
FEED_FORWARDS = ((16, 80, 56), (16, 160, 28), (16, 320, 14), (16, 640, 7), (1, 80, 56), (1, 80, 128), (1, 80, 256))
NOTE = (
    "A ratio above 1 means that the second path is faster. Windows: a map of 320 channels cut into windows, the "
    "product with the matrix (which inference keeps) beside a depthwise convolution of each window with its kernel "
    "packed. Linears: rows x inputs x outputs with GELU after them, PyTorch's linear beside oneDNN with its weight "
    "packed. Feed-forward parts: batch x channels x map, the hidden layer as a whole beside blocks of it. 64 MB are "
    "read before each call, as a net's other layers do, so that weights come from memory."
)


class Pair(NamedTuple):
    """Two paths that compute the same.

    Attributes:
        what: is computed, with its shape.
        first, second: names of the paths.
        takes_second: whether the package takes the second one here.
        compute_first, compute_second: the paths.
    """

    what: str
    first: str
    second: str
    takes_second: bool
    compute_first: Callable[[], object]
    compute_second: Callable[[], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--tune",
        type=Path,
        nargs="?",
        const=default_place(),
        metavar="FILE",
        help="measure the thresholds of every data type and write them there; %(const)s is read by itself, another "
        "file by WBMM_PROFILE=FILE",
    )
    add_setting_arguments(parser)
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds}: expected at least 1")
    if args.device != "cpu" or args.dtype == "float16" or args.autocast:
        given = f"--device {args.device} --dtype {args.dtype}{' --autocast' if args.autocast else ''}"
        raise ValueError(f"{given}: these are paths of the CPU in float32 and bfloat16; for others, `wbmm bench op`")
    setting = Setting.from_args(args)
    if args.tune is not None:
        return run_tuning(args.tune, args.rounds)
    if args.out is not None:
        check_out(args.out, "paths")
    dtype = DTYPES[args.dtype]
    pairs = (*window_pairs(dtype), *width_pairs(dtype), *linear_pairs(dtype), *block_pairs(dtype))
    records = []
    with progress_bar(len(pairs), "pairs of paths") as advance:
        for pair in pairs:
            records.append(measure(pair, args.rounds, setting.device))
            advance(1)
    columns, argv = {"rounds": args.rounds, **setting.columns()}, ["--rounds", str(args.rounds), *setting.argv()]
    return present(args, "paths", records, columns, argv, f"{NOTE} {setting.describe()}.")


def measure(pair: Pair, rounds: int, device: str) -> Record:
    """Both paths in turn, without gradients."""
    others = torch.zeros(2**24)
    calls = {
        "others": others.sum,
        pair.first: pair.compute_first,
        "others again": others.sum,
        pair.second: pair.compute_second,
    }
    with torch.no_grad():
        timings = time_interleaved(calls, rounds=rounds, device=device)
    first, second = timings[pair.first].median, timings[pair.second].median
    return {
        "model": pair.what,
        "first": f"{pair.first}, {first * 1e3:.3f} ms",
        "second": f"{pair.second}, {second * 1e3:.3f} ms",
        "ratio": first / second,
        "taken": pair.second if pair.takes_second else pair.first,
    }


def _map(count: int, channels: int, side: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, channels, side, side).to(dtype, memory_format=torch.channels_last)


def window_pairs(dtype: torch.dtype = torch.float32, channels: int = 320) -> Iterator[Pair]:
    """A map cut into windows, by a product with the matrix and by a convolution with the table."""
    for side in WINDOWS:
        window = (side, side)
        kernel_table, bias = torch.randn(channels, num_offsets(window)).to(dtype), torch.randn(channels).to(dtype)
        matrix, kernel = expand_table(kernel_table, window), table_to_kernel(kernel_table, window)
        packed = pack_kernel(kernel, window) if takes_onednn(kernel) else None
        for count in COUNTS:
            x = _map(count, channels, side, dtype)
            yield Pair(
                f"{count} windows of {side}x{side}",
                "product",
                "convolution",
                prefers_convolution(x, window),
                lambda x=x, m=matrix, w=window, b=bias: reference.windowed(x, [m], w, b),
                lambda x=x, k=kernel, w=window, b=bias, p=packed: windowed_convolution(x, k, w, b, p),
            )


def width_pairs(dtype: torch.dtype = torch.float32, channels: int = 320) -> Iterator[Pair]:
    """Convolutions of 7x7 windows with their kernel as it is, and with a column of zeros at each side."""
    wide, bias = torch.randn(channels, 1, *kernel_size((7, 7), dtype)).to(dtype), torch.randn(channels).to(dtype)
    wide[..., 0] = wide[..., -1] = 0
    narrow = wide[..., 1:-1].contiguous()
    for count in COUNTS:
        x = _map(count, channels, 7, dtype)
        yield Pair(
            f"convolution of {count} windows of 7x7",
            "13 columns",
            "15 columns",
            True,
            lambda x=x: F.conv2d(x, narrow, bias, padding=(6, 6), groups=channels),
            lambda x=x: F.conv2d(x, wide, bias, padding=(6, 7), groups=channels),
        )


def linear_pairs(dtype: torch.dtype = torch.float32) -> Iterator[Pair]:
    """Linears with GELU, by PyTorch and by oneDNN."""
    for rows, inputs, outputs in LINEARS:
        x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((rows, inputs), (outputs, inputs), (outputs,)))
        by_onednn = takes_onednn(x)
        packed = pack_weight(weight, rows) if by_onednn else weight
        yield Pair(
            f"linear {rows}x{inputs}x{outputs}",
            "PyTorch",
            "oneDNN",
            by_onednn,
            lambda x=x, w=weight, b=bias: F.gelu(F.linear(x, w, b)),
            lambda x=x, w=packed, b=bias: linear_gelu(x, w, b),
        )


def block_pairs(dtype: torch.dtype = torch.float32) -> Iterator[Pair]:
    """Feed-forward parts of a batch or a large map, with the hidden layer as a whole and in blocks."""
    for batch, channels, side in FEED_FORWARDS:
        x = _map(batch, channels, side, dtype)
        layer = FusedFeedForward(channels, 4 * channels, 1e-6, dtype=dtype).eval().requires_grad_(False)
        w1, w2 = layer.fc1.weight, layer.fc2.weight
        w1, w2 = (pack_weight(weight, side * side) if takes_onednn(weight) else weight for weight in (w1, w2))
        gate, rows = torch.rand(batch, channels).to(dtype), batch * side * side
        values = x, gate, x, w1, layer.fc1.bias, layer.gamma, w2, layer.fc2.bias, layer.eps
        yield Pair(
            f"feed-forward {batch}x{channels}x{side}x{side}",
            "whole",
            "blocks",
            rows_at_once(4 * channels, x.flatten(2)) < rows,
            lambda values=values, rows=rows: ffn_inference(*values, at_once=rows),
            lambda values=values: ffn_inference(*values),
        )


GAIN = 1.03  # a choice must be faster than what holds now by this much, or it is noise
SIDES, TUNING_COUNTS, CHANNELS = (3, 5, 7, 10, 14), (4, 16, 64), 320
WIDTHS = (13, 15, 17)
TUNING_FEED_FORWARDS = ((16, 80, 56), (16, 320, 14), (1, 80, 56), (1, 320, 14))  # batch, channels, side of the map
TRAINED = ((16, 80, 28), (8, 320, 14))
SMALL = ((1, 320, 2), (8, 320, 2), (32, 320, 2), (32, 160, 4), (32, 80, 7), (32, 40, 14), (16, 80, 28))
Call = Callable[[], object]


def run_tuning(path: Path, rounds: int) -> int:
    """Measures, prints what changed and writes the profile."""
    if path.is_dir():
        raise ValueError(f"--tune {path}: it is a folder; expected a file")
    if path.exists():
        load(path)  # an error if it is no profile: it would be replaced
    found, rows = {}, []
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        before = current().of(dtype)
        found[name] = tune(dtype, rounds, before) if computes(dtype) else before
        why = "" if computes(dtype) else "not measured: oneDNN does not compute it here"
        for key in (*STARTS, *CHOICES):
            values = [_shown(getattr(thresholds, key)) for thresholds in (before, found[name])]
            rows.append([name, key, *values, why])
    facts = machine_facts()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, to_text(Profile(processor(), measured_line(facts).removeprefix("Measured: "), **found)))
    print(render_table(("type", "threshold", "before", "now", ""), rows))
    print(f"\n{measured_line(facts)}\nwritten to {path}; delete it to get the defaults back")
    return 0


def _shown(value: int) -> str:
    return "never" if value == NEVER else str(value)


def tune(dtype: torch.dtype, rounds: int, thresholds: Thresholds) -> Thresholds:
    """Thresholds for one data type; each is measured with those found before it.

    What the backend does not compute in that type, such as training, keeps its threshold.
    """
    with progress_bar(len(STARTS) + len(CHOICES), f"thresholds, {dtype}".replace("torch.", "")) as advance:
        for name, pairs in STARTS.items():
            ratios = {}
            for size, other, path in pairs(dtype):
                taken = _time({"other": other, "path": path}, rounds)
                ratios.setdefault(size, []).append(taken["other"] / taken["path"])
            thresholds = replace(thresholds, **{name: start(ratios)}) if ratios else thresholds
            advance(1)
        for name, (values, shapes) in CHOICES.items():
            held = getattr(thresholds, name)
            asked = sorted({*values, held})
            taken = [_time(calls, rounds) for calls in shapes(asked, dtype, thresholds)]
            thresholds = replace(thresholds, **{name: choose(taken, held)}) if taken else thresholds
            advance(1)
    return thresholds


def _time(calls: Mapping[object, Call], rounds: int) -> dict[object, float]:
    """Median seconds of each; other memory is read before each call, as a net's other layers do."""
    others = torch.zeros(2**24)
    mixed = {key: call for name, call in calls.items() for key, call in ((("others", name), others.sum), (name, call))}
    timings = time_interleaved(mixed, rounds=rounds, warmup=1)
    return {name: timings[name].median for name in calls}


def choose(taken: list[dict[int, float]], held: int) -> int:
    """The value that is fastest over all shapes (geometric mean), if it gains more than noise over what holds."""
    means = {value: math.exp(sum(math.log(times[value]) for times in taken) / len(taken)) for value in taken[0]}
    fastest = min(means, key=means.get)
    return fastest if means[held] > GAIN * means[fastest] else held


def start(ratios: Mapping[int, list[float]]) -> int:
    """The least size from which on the path is faster at every size that was measured.

    Args:
        ratios: speed of the path over the other's, by size; several shapes of a size count by their geometric mean.
    """
    found = NEVER
    for size in sorted(ratios, reverse=True):
        if math.prod(ratios[size]) <= 1:
            break
        found = size
    return 1 if found == min(ratios) else found


def _sides(dtype: torch.dtype) -> Iterator[tuple[int, Call, Call]]:
    """Windows by a product with the matrix, and by a convolution with the table."""
    for side in SIDES:
        window = (side, side)
        table, bias = torch.randn(CHANNELS, num_offsets(window)).to(dtype), torch.randn(CHANNELS).to(dtype)
        matrix, kernel = expand_table(table, window), table_to_kernel(table, window)
        packed = pack_kernel(kernel, window) if takes_onednn(kernel) else None
        for count in TUNING_COUNTS:
            x = _map(count, CHANNELS, side, dtype)
            product = torch.no_grad()(partial(reference.windowed, x, [matrix], window, bias))
            yield side, product, torch.no_grad()(partial(windowed_convolution, x, kernel, window, bias, packed))


def _widths(values: list[int], dtype: torch.dtype, thresholds: Thresholds) -> Iterator[dict[int, Call]]:
    """Convolutions of 7x7 windows with columns of zeros at the sides of their kernel."""
    bias = torch.randn(CHANNELS).to(dtype)
    for count in TUNING_COUNTS:
        x, calls = _map(count, CHANNELS, 7, dtype), {}
        for width in values:
            weight, padding = torch.randn(CHANNELS, 1, 13, max(width, 13)).to(dtype), (6, max(width, 13) // 2)
            call = partial(F.conv2d, x, weight, bias, padding=padding, groups=CHANNELS)
            calls[width] = torch.no_grad()(call)
        yield calls


def _hidden_blocks(name: str, values: list[int], dtype: torch.dtype, now: Thresholds) -> Iterator[dict[int, Call]]:
    """Feed-forward parts in inference, with the hidden layer in blocks of several sizes."""
    for batch, channels, side in TUNING_FEED_FORWARDS:
        x = _map(batch, channels, side, dtype)
        layer = FusedFeedForward(channels, 4 * channels, 1e-6, dtype=dtype).eval().requires_grad_(False)
        weights = layer.fc1.weight, layer.fc2.weight
        w1, w2 = (pack_weight(weight, side * side) if takes_onednn(weight) else weight for weight in weights)
        values_of = (x, torch.rand(batch, channels).to(dtype), x, w1, layer.fc1.bias, layer.gamma, w2, layer.fc2.bias)
        calls = {}
        for value in values:
            tried = replace(now, **{name: value})
            rows = max(tried.block_bytes // (4 * channels * dtype.itemsize), tried.block_rows)
            calls[value] = torch.no_grad()(partial(ffn_inference, *values_of, layer.eps, at_once=rows))
        yield calls


class _Step:
    """Forward and backward pass of a layer on a map, under other thresholds or by a given backend."""

    def __init__(self, layer: nn.Module, x: Tensor, backend: str | None = None, profile: Profile | None = None) -> None:
        self.layer, self.x, self.backend, self.profile = layer.train(), x.requires_grad_(), backend, profile
        self.inputs = [x, *layer.parameters()]

    def __call__(self) -> None:
        with use_backend(self.backend), nullcontext() if self.profile is None else use_profile(self.profile):
            out = self.layer(self.x)
            torch.autograd.grad(out, self.inputs, torch.ones_like(out))


def _trained(
    build: Callable[[int, torch.dtype], nn.Module],
    name: str,
    values: list[int],
    dtype: torch.dtype,
    now: Thresholds,
) -> Iterator[dict[int, Call]]:
    """Layers in training by the backend `onednn`, under several values of a threshold."""
    for batch, channels, side in TRAINED:
        layer, x = build(channels, dtype), _map(batch, channels, side, dtype)
        tried = {value: replace(now, **{name: value}) for value in values}
        if _can_train(layer, x):
            yield {
                value: _Step(layer, x, "onednn", Profile(float32=each, bfloat16=each)) for value, each in tried.items()
            }


def _written_out(
    build: Callable[[int, torch.dtype], nn.Module], dtype: torch.dtype
) -> Iterator[tuple[int, Call, Call]]:
    """Layers in training by autograd, and by the written-out backward pass; the size is the number of rows."""
    for batch, channels, side in SMALL:
        layer, x = build(channels, dtype), _map(batch, channels, side, dtype)
        if _can_train(layer, x):
            yield batch * side * side, _Step(layer, x, "reference"), _Step(layer, x, "onednn")


def _can_train(layer: nn.Module, x: Tensor) -> bool:
    """Whether the backend `onednn` trains this layer."""
    try:
        _Step(layer, x, "onednn")()
    except ValueError:
        return False
    return True


def _ffn(channels: int, dtype: torch.dtype) -> nn.Module:
    return FeedForward(channels, dtype=dtype)


def _windows(channels: int, dtype: torch.dtype) -> nn.Module:
    return WBMM2d(channels, 7, dtype=dtype)


def _hierarchical(channels: int, dtype: torch.dtype) -> nn.Module:
    return HierarchicalWBMM2d(channels, 7, dtype=dtype)


STARTS = {
    "least_side": _sides,
    "ffn_training_rows": partial(_written_out, _ffn),
    "windowed_training_rows": partial(_written_out, _windows),
}
CHOICES = {
    "least_width": (WIDTHS, _widths),
    "block_bytes": ((2**20, 2**21, 2**22, 2**23, 2**24), partial(_hidden_blocks, "block_bytes")),
    "block_rows": ((196, 392, 784, 1568), partial(_hidden_blocks, "block_rows")),
    "backward_rows": ((784, 1568, 3136, 6272), partial(_trained, _ffn, "backward_rows")),
    "matrix_bytes": ((2**20, 2**22, 2**24), partial(_trained, _hierarchical, "matrix_bytes")),
}

"""`wbmm bench paths`: where a CPU can compute the same in two ways, the speed of each by shape, and which is taken.

`--tune` measures the thresholds of that choice on this processor, and writes them to a profile that dispatch reads.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wbmm.layers import FusedFeedForward
from wbmm.ops import expand_table, num_offsets, reference
from wbmm.ops.backends.onednn.ffn import ffn_inference, rows_at_once
from wbmm.ops.backends.onednn.linear import linear_gelu, pack_weight, takes_onednn
from wbmm.ops.backends.onednn.windowed import (
    kernel_size,
    pack_kernel,
    prefers_convolution,
    table_to_kernel,
    windowed_convolution,
)
from wbmm.ops.profile import default_place
from wbmm.progress import progress_bar
from wbmm.timing import time_interleaved

from .limit import Shape
from .results import Record, add_output_arguments, check_out, present
from .setting import DTYPES, Setting, add_setting_arguments
from .tune import run_tuning

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

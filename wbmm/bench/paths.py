"""`wbmm bench paths`: where two exact paths compute the same, the speed of each by shape, and which one is taken."""

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from wbmm.layers import FusedFeedForward
from wbmm.ops import expand_table, num_offsets, reference
from wbmm.ops.backends.onednn.convolution import (
    kernel_size,
    pack_kernel,
    prefers_convolution,
    table_to_kernel,
    windowed_convolution,
)
from wbmm.ops.backends.onednn.ffn import ffn_inference, rows_at_once
from wbmm.ops.backends.onednn.linear import linear_gelu, pack_weight, takes_onednn
from wbmm.timing import time_interleaved

from .limit import Shape
from .results import Record, add_output_arguments, check_out, present

EXAMPLE = "wbmm bench paths --rounds 15 --out results/paths"
WINDOWS = (7, 8, 10, 14)
COUNTS = (1, 4, 8, 16, 64, 256)
LINEARS: tuple[Shape, ...] = (
    *((3136, 80, 320), (784, 160, 640), (196, 320, 1280), (49, 640, 2560)),
    *((12544, 160, 640), (3136, 320, 1280), (784, 640, 2560)),
)
FEED_FORWARDS = ((16, 80, 56), (16, 160, 28), (16, 320, 14), (16, 640, 7), (1, 80, 56), (1, 80, 128), (1, 80, 256))
NOTE = (
    "A ratio above 1 means that the second path is the faster. Windows: a map of 320 channels cut into windows, the "
    "product with the matrix (which inference keeps) beside a depthwise convolution of each window with its kernel "
    "packed. Linears: rows x inputs x outputs with GELU after them, PyTorch's linear beside oneDNN with its weight "
    "packed. Feed-forward parts: batch x channels x map, the hidden layer as a whole beside blocks of it. float32; 64 "
    "MB are read before each call, as a net's other layers do, so that weights come from memory."
)

Pair = tuple[str, str, str, bool, Callable[[], object], Callable[[], object]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=11)
    add_output_arguments(parser)


@torch.no_grad()
def run(args: argparse.Namespace) -> int:
    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds}: expected at least 1")
    if args.out is not None:
        check_out(args.out, "paths")
    pairs = (*window_pairs(), *width_pairs(), *linear_pairs(), *block_pairs())
    records = [measure(pair, args.rounds) for pair in pairs]
    return present(args, "paths", records, {}, ["--rounds", str(args.rounds)], NOTE)


def measure(pair: Pair, rounds: int) -> Record:
    """Both paths in turn."""
    what, first, second, takes_second, *calls = pair
    others = torch.zeros(2**24)
    calls = {"others": others.sum, first: calls[0], "others again": others.sum, second: calls[1]}
    timings = time_interleaved(calls, rounds=rounds)
    return {
        "model": what,
        "first": f"{first}, {timings[first].median * 1e3:.3f} ms",
        "second": f"{second}, {timings[second].median * 1e3:.3f} ms",
        "ratio": timings[first].median / timings[second].median,
        "taken": second if takes_second else first,
    }


def window_pairs(channels: int = 320) -> Iterator[Pair]:
    for side in WINDOWS:
        window = (side, side)
        kernel_table, bias = torch.randn(channels, num_offsets(window)), torch.randn(channels)
        matrix, kernel = expand_table(kernel_table, window), table_to_kernel(kernel_table, window)
        packed = pack_kernel(kernel, window) if takes_onednn(kernel) else None
        for count in COUNTS:
            x = torch.randn(count, channels, side, side).contiguous(memory_format=torch.channels_last)
            yield (
                f"{count} windows of {side}x{side}",
                "product",
                "convolution",
                prefers_convolution(x, window),
                lambda x=x, m=matrix, w=window, b=bias: reference.windowed(x, [m], w, b),
                lambda x=x, k=kernel, w=window, b=bias, p=packed: windowed_convolution(x, k, w, b, p),
            )


def width_pairs(channels: int = 320) -> Iterator[Pair]:
    """Convolutions of 7x7 windows with their kernel as it is, and with a column of zeros at each side."""
    wide, bias = torch.randn(channels, 1, *kernel_size((7, 7))), torch.randn(channels)
    wide[..., 0] = wide[..., -1] = 0
    narrow = wide[..., 1:-1].contiguous()
    for count in COUNTS:
        x = torch.randn(count, channels, 7, 7).contiguous(memory_format=torch.channels_last)
        yield (
            f"convolution of {count} windows of 7x7",
            "13 columns",
            "15 columns",
            True,
            lambda x=x: F.conv2d(x, narrow, bias, padding=(6, 6), groups=channels),
            lambda x=x: F.conv2d(x, wide, bias, padding=(6, 7), groups=channels),
        )


def block_pairs() -> Iterator[Pair]:
    """Feed-forward parts of a batch or a large map, with the hidden layer as a whole and in blocks."""
    for batch, channels, side in FEED_FORWARDS:
        x = torch.randn(batch, channels, side, side).contiguous(memory_format=torch.channels_last)
        layer = FusedFeedForward(channels, 4 * channels, 1e-6).eval()
        w1, w2 = layer.fc1.weight, layer.fc2.weight
        w1, w2 = (pack_weight(weight, side * side) if takes_onednn(weight) else weight for weight in (w1, w2))
        gate, rows = torch.rand(batch, channels), batch * side * side
        values = x, gate, x, w1, layer.fc1.bias, layer.gamma, w2, layer.fc2.bias, layer.eps
        yield (
            f"feed-forward {batch}x{channels}x{side}x{side}",
            "whole",
            "blocks",
            rows_at_once(4 * channels, x.flatten(2)) < rows,
            lambda values=values, rows=rows: ffn_inference(*values, at_once=rows),
            lambda values=values: ffn_inference(*values),
        )


def linear_pairs() -> Iterator[Pair]:
    for rows, inputs, outputs in LINEARS:
        x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
        by_onednn = takes_onednn(x)
        packed = pack_weight(weight, rows) if by_onednn else weight
        yield (
            f"linear {rows}x{inputs}x{outputs}",
            "PyTorch",
            "oneDNN",
            by_onednn,
            lambda x=x, w=weight, b=bias: F.gelu(F.linear(x, w, b)),
            lambda x=x, w=packed, b=bias: linear_gelu(x, w, b),
        )

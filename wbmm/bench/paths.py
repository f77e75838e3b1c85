"""`wbmm bench paths`: where two exact paths compute the same, the speed of each by shape, and which one is taken."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from wbmm.ops import expand_table, num_offsets, windowed_product
from wbmm.ops.convolution import pack_kernel, prefers_convolution, table_to_kernel, windowed_convolution
from wbmm.ops.linear import linear_gelu, pack_weight, takes_onednn

from .limit import Shape
from .report import Record, check_out, table, write_report
from .timing import time_interleaved

EXAMPLE = "wbmm bench paths --rounds 15 --out results/paths"
WINDOWS = (7, 8, 10, 14)
COUNTS = (1, 4, 8, 16, 64, 256)
LINEARS: tuple[Shape, ...] = (
    *((3136, 80, 320), (784, 160, 640), (196, 320, 1280), (49, 640, 2560)),
    *((12544, 160, 640), (3136, 320, 1280), (784, 640, 2560)),
)
NOTE = (
    "A ratio above 1 means that the second path is the faster. Windows: a map of 320 channels cut into windows, the "
    "product with the matrix (which inference keeps) beside a depthwise convolution of each window with its kernel "
    "packed. Linears: rows x inputs x outputs with GELU after them, PyTorch's linear beside oneDNN with its weight "
    "packed. float32; 64 MB are read before each call, as a net's other layers do, so that weights come from memory."
)

Pair = tuple[str, str, str, bool, Callable[[], object], Callable[[], object]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the table there, as CSV and Markdown")


@torch.no_grad()
def run(args: argparse.Namespace) -> int:
    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds}: expected at least 1")
    if args.out is not None:
        check_out(args.out, "paths")
    records = [measure(pair, args.rounds) for pair in (*window_pairs(), *linear_pairs())]
    print(table(records, markdown=args.markdown))
    print(f"\n{NOTE}\n{torch.get_num_threads()} threads, torch {torch.__version__}")
    if args.out is not None:
        page, sheet = write_report(args.out, "paths", records, {}, ["--rounds", str(args.rounds)], NOTE)
        print(f"written to {page} and {sheet}")
    return 0


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
                lambda x=x, m=matrix, w=window, b=bias: windowed_product(x, m, w, b),
                lambda x=x, k=kernel, w=window, b=bias, p=packed: windowed_convolution(x, k, w, b, p),
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

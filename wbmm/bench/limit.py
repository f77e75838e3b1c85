"""The machine's limits: multiply-adds a second of the fastest matrix product, and bytes a second of a copy."""

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn as nn

from wbmm.models.costs import count_macs
from wbmm.ops.backends.onednn.linear import linear
from wbmm.timing import Timing

from .results import Record
from .setting import Setting

__all__ = ["LIMITS", "Shape", "add_shares", "count_gmacs", "ffn_shapes", "limit", "measure_limits", "product_calls"]

Shape = tuple[int, int, int]  # rows, inputs, outputs

COMMON = ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 512, 2048))
COPIED = 2**27  # bytes, more than a cache holds
MACS_A_CALL = 1e9  # smaller products are repeated, or the clock and the wake-up of threads would count


def ffn_shapes(model: nn.Module, batch: int, size: tuple[int, int]) -> list[Shape]:
    """The two linears of a feed-forward part of ratio 4, at the width and map size of each stage."""
    shapes = []
    for info in model.feature_info:
        rows = batch * math.prod(math.ceil(side / info["reduction"]) for side in size)
        shapes += [(rows, info["num_chs"], 4 * info["num_chs"]), (rows, 4 * info["num_chs"], info["num_chs"])]
    return shapes


def product_calls(
    models: Iterable[nn.Module], batch: int, size: tuple[int, int], setting: Setting
) -> dict[Shape, Callable[[], None]]:
    """Linears by the fastest library at hand: common shapes, and those of the models at this batch size."""
    own = (shape for model in models for shape in ffn_shapes(model, batch, size))
    return {shape: _call(shape, setting) for shape in dict.fromkeys((*COMMON, *own))}


def _repeats(shape: Shape) -> int:
    return math.ceil(MACS_A_CALL / math.prod(shape))


def _call(shape: Shape, setting: Setting) -> Callable[[], None]:
    rows, inputs, outputs = shape
    sizes = (rows, inputs), (outputs, inputs), (outputs,)
    x, weight, bias = (torch.randn(s, device=setting.device, dtype=setting.product_dtype) for s in sizes)

    @torch.no_grad()
    def call() -> None:
        for _ in range(_repeats(shape)):
            linear(x, weight, bias)

    return call


def measure_limits(setting: Setting, rounds: int) -> dict[str, dict[str, object]]:
    """Seconds of common products and of a copy, with the multiply-adds or bytes of each: a roofline's two limits."""
    products = {_product_name(shape): (shape, _call(shape, setting)) for shape in COMMON}
    source = torch.zeros(COPIED // setting.product_dtype.itemsize, device=setting.device, dtype=setting.product_dtype)
    calls = {name: call for name, (_, call) in products.items()} | {
        "copy": partial(torch.empty_like(source).copy_, source)
    }
    timings = setting.time(calls, "limits, rounds", rounds, warmup=1)
    work = {name: {"macs": math.prod(shape) * _repeats(shape)} for name, (shape, _) in products.items()}
    work["copy"] = {"bytes": 2 * COPIED}  # read and written
    return {name: {"seconds": list(timing.seconds), **work[name]} for name, timing in timings.items()}


def _product_name(shape: Shape) -> str:
    return f"product {shape[0]}x{shape[1]} by {shape[1]}x{shape[2]}"


LIMITS = ("copy", *map(_product_name, COMMON))


def limit(timings: dict[Shape, Timing]) -> tuple[float, Shape]:
    """Multiply-adds a second of the fastest shape, by medians, and that shape."""
    speeds = {shape: math.prod(shape) * _repeats(shape) / timing.median for shape, timing in timings.items()}
    fastest = max(speeds, key=speeds.get)
    return speeds[fastest], fastest


def add_shares(records: Iterable[Record], gmacs: dict[str, float], timings: dict[Shape, Timing], batch: int) -> str:
    """Gives records of models the share of the limit that they reach; returns a sentence about the limit.

    Args:
        records: of one batch size; those that `gmacs` does not have are left as they are.
        gmacs: multiply-adds of one image in units of 1e9, by the record's name.
        timings: of the products, measured in the same rounds.
        batch: the batch size.
    """
    speed, shape = limit(timings)
    for record in records:
        if record["model"] in gmacs:
            record["gmacs"] = gmacs[record["model"]]
            record["share"] = record["gmacs"] * 1e9 * record["images_per_s"] / speed
            record["limit_gmacs_per_s"] = speed / 1e9
    return f"Limit at batch {batch}: {speed / 1e9:.1f} GMAC/s ({shape[0]}x{shape[1]} by {shape[1]}x{shape[2]})."


def count_gmacs(model: nn.Module, size: tuple[int, int]) -> float:
    """Multiply-adds of one image in units of 1e9, without running the model."""
    return count_macs(copy.deepcopy(model).to("meta"), size)[""] / 1e9

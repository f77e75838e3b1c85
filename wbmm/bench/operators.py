"""The operators of the paper's operator table: depthwise convolutions, the windowed product, and our backends of it."""

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources

import torch
import torch.nn.functional as F
from torch import Tensor

from wbmm import ops
from wbmm.layers.depthwise import find_implicit_gemm, large_kernel_conv2d
from wbmm.ops import Kept, num_offsets, reference, use_backend
from wbmm.ops.backends import Backend, Call

from .setting import DTYPES

__all__ = ["BASELINE", "DTYPES", "LAYOUTS", "MODES", "Case", "Operator", "operators", "paper_figures"]

KERNELS, LKA_KERNELS, WINDOWS = (3, 5, 7, 13, 27), (7, 13, 27), (7, 14)
BASELINE = "DW-Std 5x5"
LAYOUTS = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}
MODES = {"forward": "forward", "training": "forward + backward"}


@dataclass(frozen=True)
class Case:
    """One cell and what is the same in it."""

    batch: int
    map: int
    channels: int
    dtype: str
    layout: str
    mode: str
    device: str

    def images(self) -> Tensor:
        x = torch.randn(self.batch, self.channels, self.map, self.map, dtype=DTYPES[self.dtype], device=self.device)
        return x.contiguous(memory_format=LAYOUTS[self.layout]).requires_grad_(self.mode == "training")

    def on_meta(self) -> "Case":
        """The same without memory."""
        return replace(self, device="meta")

    def bytes(self) -> int:
        """Of the input map."""
        return self.batch * self.channels * self.map**2 * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Operator:
    """A row of the table.

    Attributes:
        name: of the row; `method` and `size` are the paper's.
        weights: made for a case.
        call: of the map and the weights.
        why_not: None, or why it cannot run a case.
        extra_bytes: memory that it needs besides the map, its result and their gradients.
        suffix: what tells it from the paper's operator of the same method and size.
    """

    method: str
    size: int
    weights: Callable[[Case], list[Tensor]]
    call: Callable[[Tensor, list[Tensor]], Tensor]
    why_not: Callable[[Case], str | None]
    extra_bytes: Callable[[Case], int]
    suffix: str = ""

    @property
    def name(self) -> str:
        return f"{self.method} {self.size}x{self.size}{self.suffix}"

    def macs(self, case: Case) -> int:
        """Multiply-adds of a forward pass, by definition: each window as a product, each kernel at every position."""
        positions = self.size**2
        if self.method.startswith("WBMM"):
            outputs = (math.ceil(case.map / self.size) * self.size) ** 2
        else:
            outputs = case.map**2
        return case.batch * case.channels * outputs * positions

    def least_bytes(self, case: Case) -> int:
        """What a forward pass has to move at least: the map in, the result out, and the weights once."""
        weights = sum(weight.numel() * weight.itemsize for weight in self.weights(case.on_meta()))
        return 2 * case.bytes() + weights


def operators(compiled: bool = False) -> list[Operator]:
    """Depthwise convolutions, the paper's operator with and without a cached matrix, and our backends of it."""
    rows = [_depthwise(size) for size in KERNELS]
    rows += [_depthwise(size, lka=True) for size in LKA_KERNELS]
    rows += [_product(size, cached=True) for size in WINDOWS]
    rows += [_product(size, cached=False) for size in WINDOWS]
    rows += [_backend(backend, size) for backend in ops.BACKENDS for size in WINDOWS]
    if compiled:
        rows += [_compiled(row) for row in rows if row.method in ("DW-Std", "WBMM-C", "WBMM-NC")]
    return rows


def _depthwise(size: int, lka: bool = False) -> Operator:
    def weights(case: Case) -> list[Tensor]:
        weight = torch.randn(case.channels, 1, size, size, dtype=DTYPES[case.dtype], device=case.device)
        return [weight.contiguous(memory_format=LAYOUTS[case.layout])]

    def call(x: Tensor, weights: list[Tensor]) -> Tensor:
        if lka:
            return large_kernel_conv2d(x, weights[0])
        return F.conv2d(x, weights[0], padding=size // 2, groups=x.shape[1])

    def why_not(case: Case) -> str | None:
        if lka and (not case.device.startswith("cuda") or find_implicit_gemm() is None):
            return "its CUDA package is not installed, or there is no CUDA device"
        return None

    return Operator("DW-LKA" if lka else "DW-Std", size, weights, call, why_not, lambda case: 0)


def _table(case: Case, size: int) -> Tensor:
    return torch.randn(case.channels, num_offsets((size, size)), device=case.device) * 0.02


def _matrix_bytes(case: Case, size: int) -> int:
    return case.channels * size**4 * DTYPES[case.dtype].itemsize


def _larger_than_map(case: Case, size: int) -> str | None:
    return f"a {size}x{size} window is larger than the map" if size > case.map else None


def _product(size: int, cached: bool) -> Operator:
    """The paper's operator, a batched product. Without a cached matrix it is made from the table in every call."""

    def weights(case: Case) -> list[Tensor]:
        table = _table(case, size).to(DTYPES[case.dtype])
        return [ops.expand([table], (size, size))] if cached else [table]

    def call(x: Tensor, weights: list[Tensor]) -> Tensor:
        return reference.windowed(x, weights, (size, size))

    def why_not(case: Case) -> str | None:
        if cached and case.mode == "training":
            return "the cached matrix is for inference"
        return _larger_than_map(case, size)

    def extra_bytes(case: Case) -> int:
        return 2 * case.bytes() + _matrix_bytes(case, size)  # the windows before and after the product, and the matrix

    return Operator("WBMM-C" if cached else "WBMM-NC", size, weights, call, why_not, extra_bytes)


def _backend(backend: Backend, size: int) -> Operator:
    """The same operator by one of our backends, with what it keeps in inference."""
    kept = Kept().eval()

    def call(x: Tensor, weights: list[Tensor]) -> Tensor:
        with use_backend(backend.name):
            return ops.windowed(x, weights, (size, size), kept=kept)

    def why_not(case: Case) -> str | None:
        x = replace(case, batch=1).images().detach().expand(case.batch, -1, -1, -1)  # its shape, without its memory
        table = _table(case, size).to(DTYPES[case.dtype])
        question = Call("windowed", x, (table,), case.mode == "training", (size, size), 1)
        return _larger_than_map(case, size) or backend.can_run(question)

    return Operator(
        "WBMM",
        size,
        lambda case: [_table(case, size).to(DTYPES[case.dtype])],
        call,
        why_not,
        lambda case: 2 * case.bytes(),
        f" ({backend.name})",
    )


def _compiled(row: Operator) -> Operator:
    call = torch.compile(row.call, dynamic=False)
    return Operator(row.method, row.size, row.weights, call, row.why_not, row.extra_bytes, ", compiled")


def paper_figures() -> dict[tuple[str, int, int, int], float]:
    """The paper's images a second on an A800 by (method, size, batch, map)."""
    text = resources.files("wbmm.bench").joinpath("paper_operators.csv").read_text(encoding="utf-8")
    return {
        (row["method"], int(row["size"]), int(row["batch"]), int(row["map"])): float(row["kfps"]) * 1e3
        for row in csv.DictReader(text.splitlines())
    }

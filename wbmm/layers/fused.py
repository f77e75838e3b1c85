"""Spatial mixers in their inference form, and the algebra that leads there.

Compact modules hold tables and build the matrix once; `to_dense()` gives the same layer with the matrix itself stored.
"""

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.ops import MatrixCache, expand_hierarchical, expand_table, pad_to_windows, relative_index, windowed_product
from wbmm.ops.convolution import is_convolvable, pack_kernel, table_to_kernel, windowed_convolution
from wbmm.ops.linear import takes_onednn
from wbmm.ops.windows import check_map, crop

from .window import WindowLayer


def batch_norm_affine(norm: nn.BatchNorm2d | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """A batch norm in inference as (scale, shift), both `[C]`; (1, 0) without one. `like` gives C, dtype and device."""
    if norm is None:
        channels = like.shape[0]
        return like.new_ones(channels), like.new_zeros(channels)
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    return scale, norm.bias - norm.running_mean * scale


class CompactMixer(WindowLayer):
    """A fused mixer that holds tables and a bias `[C]`."""

    def __init__(self, bias: Tensor, window: tuple[int, int], padding_mode: str) -> None:
        super().__init__(bias.numel(), window, padding_mode, bias.device)
        self.bias = nn.Parameter(bias.detach().clone())
        self._kernels = MatrixCache()

    def scales(self) -> tuple[tuple[int, int], ...]:
        """The window of each of `tables()`."""
        return (self.window,)

    def convolvable(self) -> bool:
        """Whether its windows are better convolved than multiplied, where oneDNN does it."""
        return all(map(is_convolvable, self.scales()))

    def kernels(self) -> tuple[Tensor, ...]:
        """The tables as kernels of convolutions."""
        return tuple(map(table_to_kernel, self.tables(), self.scales()))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not (self.convolvable() and takes_onednn(x, self.bias, *self.tables())):
            return self.product(x, bias=self.bias)
        check_map(x, self.dim)
        # Zeros around a window that the edge cuts are what a convolution has there anyway.
        padded = x if self.padding_mode == "zeros" else pad_to_windows(x, self.window, self.padding_mode)
        out, bias = None, self.bias
        for kernel, packed, window in self._kernels.get(self.tables(), self._packed_kernels):
            part = windowed_convolution(padded, kernel, window, bias, packed)
            out, bias = part if out is None else out.add_(part), None
        return crop(out, *x.shape[-2:])

    def _packed_kernels(self) -> list[tuple[Tensor, Tensor, tuple[int, int]]]:
        kernels = zip(self.kernels(), self.scales(), strict=True)
        return [(kernel, pack_kernel(kernel, window), window) for kernel, window in kernels]

    def _forget(self) -> None:
        super()._forget()
        self._kernels.clear()

    @torch.no_grad()
    def to_dense(self) -> "DenseWBMM2d":
        return DenseWBMM2d(self.build_matrix(), self.bias, self.window, self.padding_mode)


class FusedWBMM2d(CompactMixer):
    """One table `[C, (2wh-1)(2ww-1)]` and a bias: WBMM with everything around it folded in."""

    def __init__(self, table: Tensor, bias: Tensor, window: tuple[int, int], padding_mode: str = "zeros") -> None:
        super().__init__(bias, window, padding_mode)
        self.table = nn.Parameter(table.detach().clone())

    def tables(self) -> tuple[Tensor, ...]:
        return (self.table,)

    def build_matrix(self) -> Tensor:
        return expand_table(self.table, self.window, self.index)


class FusedHierarchicalWBMM2d(CompactMixer):
    """The tables of the global and the local window, and a bias."""

    def __init__(
        self, table: Tensor, local_table: Tensor, bias: Tensor, window: tuple[int, int], padding_mode: str = "zeros"
    ) -> None:
        super().__init__(bias, window, padding_mode)
        self.local_window = (window[0] // 2, window[1] // 2)
        self.register_buffer("local_index", relative_index(self.local_window, bias.device), persistent=False)
        self.table = nn.Parameter(table.detach().clone())
        self.local_table = nn.Parameter(local_table.detach().clone())

    def tables(self) -> tuple[Tensor, ...]:
        return self.table, self.local_table

    def scales(self) -> tuple[tuple[int, int], ...]:
        return self.window, self.local_window

    def build_matrix(self) -> Tensor:
        return expand_hierarchical(self.table, self.local_table, self.window, self.index, self.local_index)


class DenseWBMM2d(nn.Module):
    """The matrix `[C, d, d]` itself and a bias: no indexing at all, but many times the size of the tables."""

    def __init__(self, matrix: Tensor, bias: Tensor, window: tuple[int, int], padding_mode: str = "zeros") -> None:
        super().__init__()
        self.window = window
        self.padding_mode = padding_mode
        self.weight = nn.Parameter(matrix.detach().clone())
        self.bias = nn.Parameter(bias.detach().clone())

    def matrix(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return windowed_product(x, self.weight, self.window, bias=self.bias, padding_mode=self.padding_mode)

    def extra_repr(self) -> str:
        return f"{self.bias.numel()}, window={self.window[0]}x{self.window[1]}, padding_mode={self.padding_mode}"

"""Spatial mixers in their inference form, and the algebra that leads there.

Compact modules hold tables and build the matrix once; `to_dense()` gives the same layer with the matrix itself stored.
"""

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.ops.modules import WindowLayer


def batch_norm_affine(norm: nn.BatchNorm2d | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """A batch norm in inference as (scale, shift), both `[C]`; (1, 0) without one. `like` gives C, dtype and device."""
    if norm is None:
        channels = like.shape[0]
        return like.new_ones(channels), like.new_zeros(channels)
    weight, bias = (1 if norm.weight is None else norm.weight), (0 if norm.bias is None else norm.bias)
    scale = weight / torch.sqrt(norm.running_var + norm.eps)
    return scale, bias - norm.running_mean * scale


class CompactMixer(WindowLayer):
    """A fused mixer that holds tables and a bias `[C]`."""

    def __init__(self, bias: Tensor, window: tuple[int, int], padding_mode: str, tables: int = 1) -> None:
        super().__init__(bias.numel(), window, padding_mode, tables, bias.device)
        self.bias = nn.Parameter(bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.windowed(x, self.tables(), self.bias)

    @torch.no_grad()
    def to_dense(self) -> "DenseWBMM2d":
        return DenseWBMM2d(self.build_matrix(), self.bias, self.window, self.padding_mode)


class FusedWBMM2d(CompactMixer):
    """One table `[C, (2wh-1)(2ww-1)]` and a bias: WBMM with everything around it folded in."""

    def __init__(self, table: Tensor, bias: Tensor, window: tuple[int, int], padding_mode: str = "zeros") -> None:
        super().__init__(bias, window, padding_mode)
        self.table = nn.Parameter(table.detach().clone())

    def tables(self) -> list[Tensor]:
        return [self.table]


class FusedHierarchicalWBMM2d(CompactMixer):
    """The tables of the global and the local window, and a bias."""

    def __init__(
        self, table: Tensor, local_table: Tensor, bias: Tensor, window: tuple[int, int], padding_mode: str = "zeros"
    ) -> None:
        super().__init__(bias, window, padding_mode, tables=2)
        self.local_window = (window[0] // 2, window[1] // 2)
        self.table = nn.Parameter(table.detach().clone())
        self.local_table = nn.Parameter(local_table.detach().clone())

    def tables(self) -> list[Tensor]:
        return [self.table, self.local_table]


class DenseWBMM2d(WindowLayer):
    """The matrix `[C, d, d]` itself and a bias: no indexing at all, but many times the size of the tables."""

    def __init__(self, matrix: Tensor, bias: Tensor, window: tuple[int, int], padding_mode: str = "zeros") -> None:
        super().__init__(bias.numel(), window, padding_mode, tables=0)
        self.weight = nn.Parameter(matrix.detach().clone())
        self.bias = nn.Parameter(bias.detach().clone())

    def tables(self) -> list[Tensor]:
        return [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.windowed(x, self.tables(), self.bias)

"""Spatial mixers: WBMM at one scale, at two scales, and with depthwise kernels beside it, in both forms.

A training form is window-local at every input size and offers `fuse()`, which returns its inference form: `FusedWBMM2d`
or `FusedHierarchicalWBMM2d`. These hold tables and build the matrix once; `to_dense()` gives the same layer with the
matrix itself stored.
"""

from collections.abc import Iterator

import torch
import torch.nn as nn
from timm.layers import trunc_normal_
from torch import Tensor

from wbmm.ops import identity_table, kernel_to_table, num_offsets, to_window
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


class WBMM2d(WindowLayer):
    """Windowed batch matrix multiplication: per channel, one linear map inside each window, tied over offsets.

    Shape: `[B, C, H, W]` to the same, any H and W, in the input's memory format.

    Args:
        dim: channels.
        window_size: an int or (wh, ww).
        shortcut: add the input to the product.
        padding_mode: how a map is padded to whole windows: `zeros`, `reflect` or `replicate`.
    """

    def __init__(
        self,
        dim: int,
        window_size: int | tuple[int, int] = 7,
        shortcut: bool = True,
        padding_mode: str = "zeros",
        device=None,
        dtype=None,
    ) -> None:
        window = to_window(window_size)
        super().__init__(dim, window, padding_mode, device=device)
        self.shortcut = shortcut
        self.table = nn.Parameter(torch.empty(dim, num_offsets(window), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        trunc_normal_(self.table, std=0.02)

    def tables(self) -> list[Tensor]:
        return [self.table]

    def forward(self, x: Tensor) -> Tensor:
        return self.windowed(x, self.tables(), shortcuts=int(self.shortcut))

    @torch.no_grad()
    def folded_table(self) -> Tensor:
        """The table with the shortcut in it."""
        if not self.shortcut:
            return self.table.clone()
        return self.table + identity_table(self.dim, self.window, device=self.table.device, dtype=self.table.dtype)

    @torch.no_grad()
    def fuse(self, norm: nn.BatchNorm2d | None = None) -> FusedWBMM2d:
        """The inference form, with the batch norm that follows folded in, if given."""
        scale, bias = batch_norm_affine(norm, self.table)
        return FusedWBMM2d(self.folded_table() * scale[:, None], bias, self.window, self.padding_mode)


class HierarchicalWBMM2d(WindowLayer):
    """WBMM over a global window plus WBMM over the four local windows inside it, each with its own shortcut.

    Both tables expand to one matrix, so that training, too, costs one product.

    Shape: `[B, C, H, W]` to the same, any H and W, in the input's memory format.

    Args:
        dim: channels.
        window_size: the local window; the global one is twice as large in each direction.
        shortcut: add the input to the product at each scale.
        padding_mode: how a map is padded to whole global windows.
    """

    def __init__(
        self,
        dim: int,
        window_size: int | tuple[int, int] = 7,
        shortcut: bool = True,
        padding_mode: str = "zeros",
        device=None,
        dtype=None,
    ) -> None:
        local = to_window(window_size)
        window = (2 * local[0], 2 * local[1])
        super().__init__(dim, window, padding_mode, tables=2, device=device)
        self.local_window = local
        self.shortcut = shortcut
        self.table = nn.Parameter(torch.empty(dim, num_offsets(window), device=device, dtype=dtype))
        self.local_table = nn.Parameter(torch.empty(dim, num_offsets(local), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        trunc_normal_(self.table, std=0.02)
        trunc_normal_(self.local_table, std=0.02)

    def tables(self) -> list[Tensor]:
        return [self.table, self.local_table]

    def forward(self, x: Tensor) -> Tensor:
        return self.windowed(x, self.tables(), shortcuts=2 * int(self.shortcut))

    @torch.no_grad()
    def fuse(self, norm: nn.BatchNorm2d | None = None) -> FusedHierarchicalWBMM2d:
        """The inference form, with the batch norm that follows folded in, if given."""
        scale, bias = batch_norm_affine(norm, self.table)
        table = self.table
        if self.shortcut:  # both identities are the same table entry of the global window
            table = table + 2 * identity_table(self.dim, self.window, device=table.device, dtype=table.dtype)
        return FusedHierarchicalWBMM2d(
            table * scale[:, None], self.local_table * scale[:, None], bias, self.window, self.padding_mode
        )


class _Kernels(nn.ParameterList):
    """Depthwise kernels by size, in the order of their names, as in a ParameterDict, which scripts cannot iterate."""

    def __init__(self, kernels: dict[str, Tensor]) -> None:
        super().__init__()
        for name, kernel in sorted(kernels.items()):
            self.register_parameter(name, nn.Parameter(kernel))

    def __getitem__(self, name: str) -> nn.Parameter:
        return getattr(self, name)

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (getattr(self, name) for name in self._parameters)

    def items(self) -> Iterator[tuple[str, nn.Parameter]]:
        return zip(self._parameters, self, strict=True)


class MultiKernelWBMM2d(WindowLayer):
    """`BN(WBMM(x) + x) + BN(DW5(x)) + BN(DW3(x))`, the last stage of P and N.

    The depthwise kernels act inside the window, with zero padding at its edge: they are tables like the first one.

    Shape: `[B, C, H, W]` to the same, any H and W, in the input's memory format.

    Args:
        dim: channels.
        window_size: an int or (wh, ww).
        kernel_sizes: the depthwise kernels beside the table.
        padding_mode: how a map is padded to whole windows.
    """

    def __init__(
        self,
        dim: int,
        window_size: int | tuple[int, int] = 7,
        kernel_sizes: tuple[int, ...] = (5, 3),
        padding_mode: str = "zeros",
        device=None,
        dtype=None,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        window = to_window(window_size)
        super().__init__(dim, window, padding_mode, device=device)
        self.kernel_sizes = tuple(kernel_sizes)
        self.table = nn.Parameter(torch.empty(dim, num_offsets(window), **dd))
        self.norm = nn.BatchNorm2d(dim, **dd)
        self.kernels = _Kernels({str(k): torch.empty(dim, 1, k, k, **dd) for k in kernel_sizes})
        self.norms = nn.ModuleDict({str(k): nn.BatchNorm2d(dim, **dd) for k in kernel_sizes})
        self._places = [[name for name, _ in self.kernels.items()].index(name) for name in self.norms]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        trunc_normal_(self.table, std=0.02)
        for size in self.kernel_sizes:
            trunc_normal_(self.kernels[str(size)], std=0.02)

    def tables(self) -> list[Tensor]:
        """Each branch as a table, without the first one's shortcut."""
        return [self.table, *(kernel_to_table(self.kernels[str(k)], self.window) for k in self.kernel_sizes)]

    def branch_norms(self) -> tuple[nn.BatchNorm2d, ...]:
        return self.norm, *(self.norms[str(k)] for k in self.kernel_sizes)

    def forward(self, x: Tensor) -> Tensor:
        tables: list[Tensor] = []
        for kernel in self.kernels:
            tables.append(kernel_to_table(kernel, self.window))
        out = self.norm(self.windowed(x, [self.table], shortcuts=1))
        for i, norm in enumerate(self.norms.values()):
            out = out + norm(self.windowed(x, [tables[self._places[i]]], keep=False))
        return out

    @torch.no_grad()
    def fuse(self, norm: nn.BatchNorm2d | None = None) -> FusedWBMM2d:
        """The inference form, with the batch norm that follows folded in, if given."""
        table, bias = torch.zeros_like(self.table), torch.zeros_like(self.table[:, 0])
        identity = identity_table(self.dim, self.window, device=table.device, dtype=table.dtype)
        first, *rest = self.tables()
        for branch, branch_norm in zip([first + identity, *rest], self.branch_norms(), strict=True):
            scale, shift = batch_norm_affine(branch_norm, branch)
            table += branch * scale[:, None]
            bias += shift
        scale, shift = batch_norm_affine(norm, table)
        return FusedWBMM2d(table * scale[:, None], bias * scale + shift, self.window, self.padding_mode)

"""Spatial mixers of the straightforward layout, in training form and fused."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from wbmm import layers

from .windows import Window, multiply, offset_index, pad

__all__ = ["plain_conv", "plain_mixer"]


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone(memory_format=torch.contiguous_format))


def plain_conv(conv: nn.Conv2d) -> nn.Conv2d:
    """A convolution of PyTorch's own with the same weights."""
    plain = nn.Conv2d(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,
        stride=conv.stride,
        padding=conv.padding,
        groups=conv.groups,
        bias=conv.bias is not None,
        device=conv.weight.device,
        dtype=conv.weight.dtype,
    )
    plain.load_state_dict(conv.state_dict())
    return plain


class PlainWBMM(nn.Module):
    """The product, then the shortcut."""

    def __init__(self, mixer: layers.WBMM2d) -> None:
        super().__init__()
        self.window, self.padding_mode, self.shortcut = mixer.window, mixer.padding_mode, mixer.shortcut
        self.table = _parameter(mixer.table)
        self.register_buffer("index", offset_index(self.window).to(self.table.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = multiply(x, self.table[:, self.index], self.window, self.padding_mode)
        return out + x if self.shortcut else out


class PlainHierarchical(nn.Module):
    """One product over the global windows, one over the local ones, each with its shortcut."""

    def __init__(self, mixer: layers.HierarchicalWBMM2d) -> None:
        super().__init__()
        self.window, self.local_window = mixer.window, mixer.local_window
        self.padding_mode, self.shortcut = mixer.padding_mode, mixer.shortcut
        self.table, self.local_table = _parameter(mixer.table), _parameter(mixer.local_table)
        self.register_buffer("index", offset_index(self.window).to(self.table.device), persistent=False)
        self.register_buffer("local_index", offset_index(self.local_window).to(self.table.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = multiply(x, self.table[:, self.index], self.window, self.padding_mode)
        local = multiply(x, self.local_table[:, self.local_index], self.local_window, self.padding_mode)
        return (out + x) + (local + x) if self.shortcut else out + local


class PlainMultiKernel(nn.Module):
    """`BN(WBMM(x) + x)` plus `BN(DW(x))` for each kernel, a convolution of each window by itself."""

    def __init__(self, mixer: layers.MultiKernelWBMM2d) -> None:
        super().__init__()
        self.window, self.padding_mode = mixer.window, mixer.padding_mode
        self.table = _parameter(mixer.table)
        self.register_buffer("index", offset_index(self.window).to(self.table.device), persistent=False)
        self.norm, self.norms = copy.deepcopy(mixer.norm), copy.deepcopy(mixer.norms)
        self.kernels = nn.ParameterDict({name: _parameter(kernel) for name, kernel in mixer.kernels.items()})

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(multiply(x, self.table[:, self.index], self.window, self.padding_mode) + x)
        for name, kernel in self.kernels.items():
            out = out + self.norms[name](self._convolve(x, kernel))
        return out

    def _convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        padded = pad(x, self.window, self.padding_mode)
        batch, channels, height, width = padded.shape
        wh, ww = self.window
        grid = padded.reshape(batch, channels, height // wh, wh, width // ww, ww).permute(0, 2, 4, 1, 3, 5)
        windows = grid.reshape(-1, channels, wh, ww)
        out = F.conv2d(windows, kernel, padding=kernel.shape[-1] // 2, groups=channels)
        out = out.reshape(grid.shape).permute(0, 3, 1, 4, 2, 5).reshape(padded.shape)
        return out[:, :, : x.shape[2], : x.shape[3]]


class PlainDilated(nn.Module):
    """UniRepLKNet's operator: a large convolution and dilated small ones, each with its batch norm."""

    def __init__(self, mixer: layers.DilatedReparamConv2d) -> None:
        super().__init__()
        self.conv, self.norm = plain_conv(mixer.conv), copy.deepcopy(mixer.norm)
        self.branches, self.norms = copy.deepcopy(mixer.branches), copy.deepcopy(mixer.norms)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        for name, conv in self.branches.items():
            out = out + self.norms[name](conv(x))
        return out


class PlainDense(nn.Module):
    """The fused form: the matrices, built once, and the bias added after the product."""

    def __init__(self, matrix: Tensor, bias: Tensor, window: Window, padding_mode: str) -> None:
        super().__init__()
        self.window, self.padding_mode = window, padding_mode
        self.weight, self.bias = _parameter(matrix), _parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.window, self.padding_mode) + self.bias[:, None, None]


def _local_matrix(table: Tensor, window: Window) -> Tensor:
    """The matrix over a global window of a table that acts inside each quarter of it."""
    lh, lw = window[0] // 2, window[1] // 2
    row = torch.arange(window[0], device=table.device).repeat_interleave(window[1])
    column = torch.arange(window[1], device=table.device).repeat(window[0])
    quarter = 2 * (row // lh) + column // lw
    place = (row % lh) * lw + column % lw
    index = offset_index((lh, lw)).to(table.device)[place[:, None], place[None, :]]
    return table[:, index] * (quarter[:, None] == quarter[None, :])


def _dense(mixer: nn.Module) -> PlainDense:
    if isinstance(mixer, layers.DenseWBMM2d):
        matrix = mixer.weight
    else:
        matrix = mixer.table[:, offset_index(mixer.window).to(mixer.table.device)]
        if isinstance(mixer, layers.FusedHierarchicalWBMM2d):
            matrix = matrix + _local_matrix(mixer.local_table, mixer.window)
    return PlainDense(matrix, mixer.bias, mixer.window, mixer.padding_mode)


PLAIN = {
    layers.WBMM2d: PlainWBMM,
    layers.HierarchicalWBMM2d: PlainHierarchical,
    layers.MultiKernelWBMM2d: PlainMultiKernel,
    layers.DepthwiseConv2d: plain_conv,
    layers.DilatedReparamConv2d: PlainDilated,
    layers.FusedWBMM2d: _dense,
    layers.FusedHierarchicalWBMM2d: _dense,
    layers.DenseWBMM2d: _dense,
    layers.FusedDepthwiseConv2d: plain_conv,
}


def plain_mixer(mixer: nn.Module) -> nn.Module:
    """The same mixer in this layout, with a copy of its weights."""
    if type(mixer) not in PLAIN:
        known = ", ".join(kind.__name__ for kind in PLAIN)
        raise ValueError(f"mixer {type(mixer).__name__} has no straightforward form; those that have one: {known}")
    return PLAIN[type(mixer)](mixer)

"""WBMM and a 3x3 depthwise convolution in one layer: beside it, after it, or each on half of the channels.

The convolution runs over the whole map, across the windows' borders. These are the rows on window interaction of the
paper's ablation; the nets of the family spread both operators over blocks instead.
"""

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.ops.windows import is_channels_last

from .depthwise import DepthwiseConv2d, FusedDepthwiseConv2d
from .fused import FusedWBMM2d, batch_norm_affine
from .mixers import WBMM2d


class FusedParallelWBMM2d(nn.Module):
    """`WBMM(x) + DW3(x)`, each with its bias."""

    def __init__(self, wbmm: FusedWBMM2d, beside: FusedDepthwiseConv2d) -> None:
        super().__init__()
        self.wbmm = wbmm
        self.beside = beside

    def forward(self, x: Tensor) -> Tensor:
        return self.wbmm(x) + self.beside(x)


class ParallelWBMM2d(nn.Module):
    """`BN(WBMM(x) + x) + BN(DW3(x))`.

    Shape: `[B, C, H, W]` to the same, any H and W, in the input's memory format.

    Args:
        dim: channels.
        window_size: an int or (wh, ww).
        padding_mode: how a map is padded to whole windows.
    """

    def __init__(
        self, dim: int, window_size: int | tuple[int, int] = 7, padding_mode: str = "zeros", device=None, dtype=None
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.wbmm = WBMM2d(dim, window_size, padding_mode=padding_mode, **dd)
        self.norm = nn.BatchNorm2d(dim, **dd)
        self.beside = DepthwiseConv2d(dim, **dd)
        self.beside_norm = nn.BatchNorm2d(dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.wbmm(x)) + self.beside_norm(self.beside(x))

    @torch.no_grad()
    def fuse(self, norm: nn.BatchNorm2d | None = None) -> FusedParallelWBMM2d:
        """The inference form, with the batch norm that follows folded into both branches, if given."""
        wbmm, beside = self.wbmm.fuse(self.norm), self.beside.fuse(self.beside_norm)
        scale, shift = batch_norm_affine(norm, wbmm.table)
        wbmm.table.mul_(scale[:, None])
        wbmm.bias.mul_(scale).add_(shift)
        beside.weight.mul_(scale[:, None, None, None])
        beside.bias.mul_(scale)
        return FusedParallelWBMM2d(wbmm, beside)


class FusedSerialWBMM2d(nn.Module):
    """`DW3(WBMM(x))`, each with its bias."""

    def __init__(self, wbmm: FusedWBMM2d, after: FusedDepthwiseConv2d) -> None:
        super().__init__()
        self.wbmm = wbmm
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.wbmm(x))


class SerialWBMM2d(nn.Module):
    """`DW3(BN(WBMM(x) + x))`.

    The paper does not say what lies between the two; a batch norm follows each operator, as everywhere in the net. The
    fused form keeps two operators: at the map's edge the convolution's zeros come after the first one's bias.

    Shape: `[B, C, H, W]` to the same, any H and W, in the input's memory format.

    Args:
        dim: channels.
        window_size: an int or (wh, ww).
        padding_mode: how a map is padded to whole windows.
    """

    def __init__(
        self, dim: int, window_size: int | tuple[int, int] = 7, padding_mode: str = "zeros", device=None, dtype=None
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.wbmm = WBMM2d(dim, window_size, padding_mode=padding_mode, **dd)
        self.norm = nn.BatchNorm2d(dim, **dd)
        self.after = DepthwiseConv2d(dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.norm(self.wbmm(x)))

    def fuse(self, norm: nn.BatchNorm2d | None = None) -> FusedSerialWBMM2d:
        """The inference form, with the batch norm that follows folded into the convolution, if given."""
        return FusedSerialWBMM2d(self.wbmm.fuse(self.norm), self.after.fuse(norm))


class FusedHalfWBMM2d(nn.Module):
    """WBMM on the first half of the channels, a depthwise convolution on the rest."""

    def __init__(self, wbmm: FusedWBMM2d | WBMM2d, rest: nn.Conv2d) -> None:
        super().__init__()
        self.half = wbmm.dim
        self.wbmm = wbmm
        self.rest = rest

    def forward(self, x: Tensor) -> Tensor:
        layout = torch.channels_last if is_channels_last(x) else torch.contiguous_format
        first = x[:, : self.half].contiguous(memory_format=layout)
        rest = x[:, self.half :].contiguous(memory_format=layout)
        return torch.cat([self.wbmm(first), self.rest(rest)], dim=1)


class HalfWBMM2d(FusedHalfWBMM2d):
    """`WBMM(x) + x` on the first half of the channels, `DW3(x)` on the rest.

    Shape: `[B, C, H, W]` to the same, any H and W, in the input's memory format.

    Args:
        dim: channels, an even number.
        window_size: an int or (wh, ww).
        padding_mode: how a map is padded to whole windows.
    """

    def __init__(
        self, dim: int, window_size: int | tuple[int, int] = 7, padding_mode: str = "zeros", device=None, dtype=None
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        if dim % 2:
            raise ValueError(f"{dim} channels cannot be halved: expected an even number")
        super().__init__(
            WBMM2d(dim // 2, window_size, padding_mode=padding_mode, **dd), DepthwiseConv2d(dim // 2, **dd)
        )

    @torch.no_grad()
    def fuse(self, norm: nn.BatchNorm2d | None = None) -> FusedHalfWBMM2d:
        """The inference form, with the batch norm that follows folded into both halves, if given."""
        wbmm, rest = self.wbmm.fuse(), self.rest.fuse()
        if norm is not None:
            (scale, rest_scale), (shift, rest_shift) = (part.chunk(2) for part in batch_norm_affine(norm, wbmm.table))
            wbmm.table.mul_(scale[:, None])
            wbmm.bias.add_(shift)
            rest.weight.mul_(rest_scale[:, None, None, None])
            rest.bias.add_(rest_shift)
        return FusedHalfWBMM2d(wbmm, rest)

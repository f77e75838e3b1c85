"""What WBMM is compared with in W blocks: full connections, attention, SLaK's convolutions, and windows that interact.

The last three classes with their fused forms are the paper's rows on window interaction: WBMM and a 3x3 depthwise
convolution over the whole map, beside it, after it, or each on half of the channels. The nets of the family spread
both operators over blocks instead.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor

from wbmm.ops import num_offsets, pad_to_windows, to_window
from wbmm.ops.modules import WindowLayer
from wbmm.ops.windows import crop, grid_size, is_channels_last, zeros_added

from .depthwise import DepthwiseConv2d, FusedDepthwiseConv2d
from .mixers import CompactMixer, FusedWBMM2d, WBMM2d, batch_norm_affine


class FusedFullConnection2d(CompactMixer):
    """The matrix `[C, d, d]` and a bias. There are no tables, so that this is its compact and its dense form."""

    def __init__(self, full: Tensor, bias: Tensor, window: tuple[int, int], padding_mode: str = "zeros") -> None:
        super().__init__(bias, window, padding_mode, tables=0)
        self.full = nn.Parameter(full.detach().clone())

    def tables(self) -> list[Tensor]:
        return [self.full]

    def to_dense(self) -> "FusedFullConnection2d":
        return self


class FullConnection2d(WindowLayer):
    """Per channel, one linear map inside each window; WBMM without weights shared over offsets, and no shortcut.

    Shape: `[B, C, H, W]` to the same, any H and W, in the input's memory format.

    Args:
        dim: channels.
        window_size: an int or (wh, ww).
        padding_mode: how a map is padded to whole windows.
    """

    def __init__(
        self, dim: int, window_size: int | tuple[int, int] = 7, padding_mode: str = "zeros", device=None, dtype=None
    ) -> None:
        window = to_window(window_size)
        super().__init__(dim, window, padding_mode, tables=0)
        positions = window[0] * window[1]
        self.full = nn.Parameter(torch.empty(dim, positions, positions, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        trunc_normal_(self.full, std=0.02)

    def tables(self) -> list[Tensor]:
        return [self.full]

    def forward(self, x: Tensor) -> Tensor:
        return self.windowed(x, self.tables())

    @torch.no_grad()
    def fuse(self, norm: nn.BatchNorm2d | None = None) -> FusedFullConnection2d:
        """The inference form, with the batch norm that follows folded in, if given."""
        scale, bias = batch_norm_affine(norm, self.full)
        return FusedFullConnection2d(self.full * scale[:, None, None], bias, self.window, self.padding_mode)


HEAD_DIM = 40


class FusedWindowAttention2d(WindowLayer):
    """Each position of a window attends to all of them.

    What padding adds takes part as keys, unmasked: zeros to which the linear gives its bias.

    Shape: `[B, C, H, W]` to the same, any H and W; the result is channels-last.
    """

    def __init__(
        self, dim: int, window: tuple[int, int], head_dim: int, padding_mode: str = "zeros", device=None, dtype=None
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__(dim, window, padding_mode, device=device)
        if dim % head_dim:
            raise ValueError(
                f"{dim} channels: the heads of window attention have {head_dim}, so every stage needs a multiple of "
                f"{head_dim}, such as dims=({head_dim}, {2 * head_dim}, {4 * head_dim}, {8 * head_dim})"
            )
        self.head_dim = head_dim
        self.qkv = nn.Linear(dim, 3 * dim, **dd)
        self.proj = nn.Linear(dim, dim, **dd)
        self.bias_table = nn.Parameter(torch.zeros(dim // head_dim, num_offsets(window), **dd))

    def tables(self) -> list[Tensor]:
        """Its matrix `[heads, d, d]` is what is added to the products of queries and keys."""
        return [self.bias_table]

    def forward(self, x: Tensor) -> Tensor:
        (wh, ww), heads = self.window, self.dim // self.head_dim
        batch, _, height, width = x.shape
        nh, nw = grid_size(height, width, self.window)
        x = self._padded_qkv(x).permute(0, 2, 3, 1).reshape(batch, nh, wh, nw, ww, 3, heads, self.head_dim)
        qkv = x.permute(5, 0, 1, 3, 6, 2, 4, 7).reshape(3, batch * nh * nw, heads, wh * ww, self.head_dim)
        bias = self.matrix()[None].to(qkv.dtype)
        x = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], attn_mask=bias)
        x = x.reshape(batch, nh, nw, heads, wh, ww, self.head_dim).permute(0, 3, 6, 1, 4, 2, 5)
        x = crop(x.reshape(batch, self.dim, nh * wh, nw * ww), height, width)
        return self.proj(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def _padded_qkv(self, x: Tensor) -> Tensor:
        """Queries, keys and values of whole windows, `[B, 3C, H, W]`; the linear sees the map alone, not its padding.

        What zeros become in the linear is the same at every position of the padding.
        """
        out = self.qkv(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        padded = pad_to_windows(out, self.window, self.padding_mode)
        added = zeros_added(x, self.window, self.padding_mode)
        if added is None:
            return padded
        return padded + added.to(out.dtype) * self.qkv(x.new_zeros(1, self.dim))[:, :, None, None]


class WindowAttention2d(FusedWindowAttention2d):
    """Window attention in training, to be followed by a batch norm.

    Args:
        dim: channels, a multiple of `head_dim`.
        window_size: an int or (wh, ww).
        head_dim: channels of a head.
        padding_mode: how a map is padded to whole windows.
    """

    def __init__(
        self,
        dim: int,
        window_size: int | tuple[int, int] = 7,
        head_dim: int = HEAD_DIM,
        padding_mode: str = "zeros",
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(dim, to_window(window_size), head_dim, padding_mode, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        trunc_normal_(self.bias_table, std=0.02)

    @torch.no_grad()
    def fuse(self, norm: nn.BatchNorm2d | None = None) -> FusedWindowAttention2d:
        """The same with the batch norm that follows folded into the last linear, if given."""
        weight = self.proj.weight
        fused = FusedWindowAttention2d(
            self.dim, self.window, self.head_dim, self.padding_mode, weight.device, weight.dtype
        )
        fused.load_state_dict(self.state_dict())
        scale, shift = batch_norm_affine(norm, weight)
        fused.proj.weight.copy_(weight * scale[:, None])
        fused.proj.bias.copy_(self.proj.bias * scale + shift)
        return fused.train(self.training)


def _depthwise(dim: int, height: int, width: int, bias: bool = False, **factory) -> nn.Conv2d:
    return nn.Conv2d(dim, dim, (height, width), padding=(height // 2, width // 2), groups=dim, bias=bias, **factory)


class FusedSLaKConv2d(nn.Module):
    """A wide and a tall depthwise convolution, added; the small one is in the wide one, everything else too."""

    def __init__(self, wide: Tensor, tall: Tensor, bias: Tensor) -> None:
        super().__init__()
        factory = {"device": bias.device, "dtype": bias.dtype}
        self.wide = _depthwise(bias.numel(), *wide.shape[-2:], bias=True, **factory)
        self.tall = _depthwise(bias.numel(), *tall.shape[-2:], **factory)
        with torch.no_grad():
            self.wide.weight.copy_(wide)
            self.wide.bias.copy_(bias)
            self.tall.weight.copy_(tall)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x) + self.tall(x)


class SLaKConv2d(nn.Module):
    """`BN(DW5xk(x)) + BN(DWkx5(x)) + BN(DW5x5(x))`: a cross that is k long and 5 across.

    Shape: `[B, C, H, W]` to the same.

    Args:
        dim: channels.
        kernel_size: k, the length of the rectangles, odd.
        width: their short side, and the side of the square; odd and at most k.
    """

    def __init__(self, dim: int, kernel_size: int = 51, width: int = 5, device=None, dtype=None) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        if kernel_size % 2 == 0 or width % 2 == 0 or not 1 <= width <= kernel_size:
            raise ValueError(
                f"rectangles of {width}x{kernel_size}: expected odd sides, the first at most the second, such as 5x51"
            )
        self.wide = _depthwise(dim, width, kernel_size, **dd)
        self.tall = _depthwise(dim, kernel_size, width, **dd)
        self.small = _depthwise(dim, width, width, **dd)
        self.norms = nn.ModuleDict({name: nn.BatchNorm2d(dim, **dd) for name in ("wide", "tall", "small")})

    def forward(self, x: Tensor) -> Tensor:
        norms = self.norms
        return norms["wide"](self.wide(x)) + norms["tall"](self.tall(x)) + norms["small"](self.small(x))

    @torch.no_grad()
    def fuse(self, norm: nn.BatchNorm2d | None = None) -> FusedSLaKConv2d:
        """Two convolutions and a bias, with the batch norm that follows folded in, if given."""
        scale, bias = batch_norm_affine(norm, self.wide.weight)
        kernels = {}
        for name, branch_norm in self.norms.items():
            conv = self.get_submodule(name)
            branch_scale, shift = batch_norm_affine(branch_norm, conv.weight)
            kernels[name] = conv.weight * (branch_scale * scale)[:, None, None, None]
            bias = bias + shift * scale
        margin = (self.wide.kernel_size[1] - self.small.kernel_size[1]) // 2
        wide = kernels["wide"] + F.pad(kernels["small"], (margin, margin))
        return FusedSLaKConv2d(wide, kernels["tall"], bias)


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

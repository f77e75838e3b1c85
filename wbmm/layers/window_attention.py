"""Self-attention inside windows that do not overlap, with a relative position bias."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor

from wbmm.ops import num_offsets, pad_to_windows, to_window
from wbmm.ops.modules import WindowLayer
from wbmm.ops.windows import crop, grid_size

from .fused import batch_norm_affine

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
        x = pad_to_windows(x, self.window, self.padding_mode).permute(0, 2, 3, 1)
        x = x.reshape(batch, nh, wh, nw, ww, self.dim).permute(0, 1, 3, 2, 4, 5)
        qkv = self.qkv(x.reshape(batch * nh * nw, wh * ww, self.dim))
        qkv = qkv.reshape(batch * nh * nw, wh * ww, 3, heads, self.head_dim).permute(2, 0, 3, 1, 4)
        bias = self.matrix()[None].to(qkv.dtype)
        x = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], attn_mask=bias)
        x = self.proj(x.transpose(1, 2).reshape(batch * nh * nw, wh * ww, self.dim))
        x = x.reshape(batch, nh, nw, wh, ww, self.dim).permute(0, 1, 3, 2, 4, 5)
        return crop(x.reshape(batch, nh * wh, nw * ww, self.dim).permute(0, 3, 1, 2), height, width)


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

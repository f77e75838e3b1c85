"""A full connection inside windows: per channel, a matrix whose entries are all free."""

import torch
import torch.nn as nn
from timm.layers import trunc_normal_
from torch import Tensor

from wbmm.ops import to_window
from wbmm.ops.modules import WindowLayer

from .fused import CompactMixer, batch_norm_affine


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

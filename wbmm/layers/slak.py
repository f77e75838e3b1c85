"""SLaK's operator: a large kernel as two rectangular ones, with a small square one beside them."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .fused import batch_norm_affine


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

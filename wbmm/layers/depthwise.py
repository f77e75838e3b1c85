"""Depthwise convolutions as mixers: plain ones of any size, and a large one with dilated branches beside it.

PyTorch computes them. For large kernels on a GPU there is a faster CUDA package, not ours: `large_kernel` names it, and
the functions at the end of this file call it.
"""

from functools import cache

import torch
import torch.nn as nn
from torch import Tensor

from .mixers import batch_norm_affine

__all__ = [
    "DepthwiseConv2d",
    "DilatedReparamConv2d",
    "FusedDepthwiseConv2d",
    "check_large_kernel",
    "find_implicit_gemm",
    "large_kernel_conv2d",
]

PACKAGE = "depthwise_conv2d_implicit_gemm"
LARGE_KERNELS = ("implicit_gemm",)
# UniRepLKNet's branches beside a large kernel: its size to the (kernel size, dilation) of each.
DILATED_BRANCHES = {13: ((5, 1), (7, 2), (3, 3), (3, 4), (3, 5))}


class FusedDepthwiseConv2d(nn.Conv2d):
    """A depthwise convolution with bias: any of the others with everything around it folded in."""

    def __init__(self, weight: Tensor, bias: Tensor, large_kernel: str | None = None) -> None:
        dim, _, size, _ = weight.shape
        super().__init__(dim, dim, size, padding=size // 2, groups=dim, device=weight.device, dtype=weight.dtype)
        self.large_kernel = large_kernel
        with torch.no_grad():
            self.weight.copy_(weight)
            self.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.large_kernel is None:
            return self._conv_forward(x, self.weight, self.bias)
        else:  # noqa: RET505  a script compiles the branch that applies
            return large_kernel_conv2d(x, self.weight, self.bias)


class DepthwiseConv2d(nn.Conv2d):
    """A depthwise convolution; the 3x3 one of a D block carries information across windows.

    Shape: `[B, C, H, W]` to the same.

    Args:
        dim: channels.
        kernel_size: odd.
        large_kernel: `implicit_gemm` for the large-kernel CUDA package.
    """

    def __init__(
        self, dim: int, kernel_size: int = 3, large_kernel: str | None = None, device=None, dtype=None
    ) -> None:
        super().__init__(
            dim, dim, kernel_size, padding=kernel_size // 2, groups=dim, bias=False, device=device, dtype=dtype
        )
        self.large_kernel = check_large_kernel(large_kernel)

    def forward(self, x: Tensor) -> Tensor:
        if self.large_kernel is None:
            return self._conv_forward(x, self.weight, self.bias)
        else:  # noqa: RET505
            return large_kernel_conv2d(x, self.weight)

    @torch.no_grad()
    def fuse(self, norm: nn.BatchNorm2d | None = None) -> FusedDepthwiseConv2d:
        """A convolution with bias, with the batch norm that follows folded in, if given."""
        scale, bias = batch_norm_affine(norm, self.weight)
        return FusedDepthwiseConv2d(self.weight * scale[:, None, None, None], bias, self.large_kernel)


def dilate_kernel(kernel: Tensor, dilation: int, size: int) -> Tensor:
    """The kernel of `size` without dilation that does what a dilated one does.

    Args:
        kernel: `[C, 1, k, k]` with odd k.
        dilation: of the kernel.
        size: odd, at least (k - 1) * dilation + 1.
    """
    reach = kernel.shape[-1] // 2 * dilation
    taps = slice(size // 2 - reach, size // 2 + reach + 1, dilation)
    dilated = kernel.new_zeros(*kernel.shape[:2], size, size)
    dilated[..., taps, taps] = kernel
    return dilated


class DilatedReparamConv2d(nn.Module):
    """`BN(DWk(x))` plus `BN(DW(x))` for smaller dilated kernels: UniRepLKNet's mixer, one convolution when fused.

    Shape: `[B, C, H, W]` to the same.

    Args:
        dim: channels.
        kernel_size: of the large kernel, odd.
        branches: (kernel size, dilation) of the smaller ones, which must lie inside the large one; UniRepLKNet's where
            not given.
        large_kernel: `implicit_gemm` for the large-kernel CUDA package; the small ones are PyTorch's in any case.
    """

    def __init__(
        self,
        dim: int,
        kernel_size: int = 13,
        branches: tuple[tuple[int, int], ...] | None = None,
        large_kernel: str | None = None,
        device=None,
        dtype=None,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        if branches is None and kernel_size not in DILATED_BRANCHES:
            known = ", ".join(map(str, DILATED_BRANCHES))
            raise ValueError(f"kernel_size {kernel_size}: branches are defined for {known}; give them for others")
        branches = DILATED_BRANCHES[kernel_size] if branches is None else branches
        for size, dilation in branches:
            if size % 2 == 0 or (size - 1) * dilation + 1 > kernel_size:
                raise ValueError(
                    f"a branch of kernel {size} and dilation {dilation}: expected an odd kernel that spans at most "
                    f"{kernel_size}, the size of the large one"
                )
        self.conv = DepthwiseConv2d(dim, kernel_size, large_kernel, **dd)
        self.norm = nn.BatchNorm2d(dim, **dd)
        self.branches = nn.ModuleDict(
            {
                f"k{size}d{dilation}": nn.Conv2d(
                    dim, dim, size, padding=size // 2 * dilation, dilation=dilation, groups=dim, bias=False, **dd
                )
                for size, dilation in branches
            }
        )
        self.norms = nn.ModuleDict({name: nn.BatchNorm2d(dim, **dd) for name in self.branches})

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        for conv, norm in zip(self.branches.values(), self.norms.values()):  # noqa: B905  a script knows no `strict`
            out = out + norm(conv(x))
        return out

    @torch.no_grad()
    def fuse(self, norm: nn.BatchNorm2d | None = None) -> FusedDepthwiseConv2d:
        """One large convolution with bias, with the batch norm that follows folded in, if given."""
        scale, bias = batch_norm_affine(self.norm, self.conv.weight)
        kernel = self.conv.weight * scale[:, None, None, None]
        for name, conv in self.branches.items():
            scale, shift = batch_norm_affine(self.norms[name], conv.weight)
            dilated = dilate_kernel(conv.weight, conv.dilation[0], self.conv.kernel_size[0])
            kernel, bias = kernel + dilated * scale[:, None, None, None], bias + shift
        scale, shift = batch_norm_affine(norm, kernel)
        return FusedDepthwiseConv2d(kernel * scale[:, None, None, None], bias * scale + shift, self.conv.large_kernel)


def find_implicit_gemm() -> type[nn.Conv2d] | None:
    """The package's convolution, `cls(channels, kernel_size, bias=...)`, or None where it cannot be imported."""
    try:
        from depthwise_conv2d_implicit_gemm import DepthWiseConv2dImplicitGEMM
    except ImportError:
        return None
    return DepthWiseConv2dImplicitGEMM


def check_large_kernel(name: str | None) -> str | None:
    """A name of `LARGE_KERNELS` whose package is there, or None for PyTorch's own convolution."""
    if name is None:
        return None
    if name not in LARGE_KERNELS:
        raise ValueError(f"large_kernel {name!r}: expected None or one of {', '.join(LARGE_KERNELS)}")
    if find_implicit_gemm() is None:
        raise ImportError(
            f"large_kernel {name!r} needs the CUDA package {PACKAGE}, which cannot be imported here; "
            "leave large_kernel out for PyTorch's own convolution"
        )
    return name


@cache
def _implicit_gemm(channels: int, kernel_size: int) -> nn.Conv2d:
    with torch.device("meta"):  # its own weight is never used
        return find_implicit_gemm()(channels, kernel_size, bias=False)


def large_kernel_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A depthwise convolution with stride 1 and padding kernel // 2, by the package.

    Its kernels read NCHW memory, so that a channels-last map is copied before and after. An NCHW one is not.

    Args:
        x: `[B, C, H, W]` on a CUDA device.
        weight: `[C, 1, k, k]`.
        bias: `[C]`.
    """
    conv = _implicit_gemm(weight.shape[0], weight.shape[-1])
    out = torch.func.functional_call(conv, {"weight": weight}, (x.contiguous(),))
    if not x.is_contiguous():
        out = out.contiguous(memory_format=torch.channels_last)
    return out if bias is None else out + bias[:, None, None]

"""The large-kernel CUDA convolution of RepLKNet and UniRepLKNet, where its package is installed and asked for."""

from functools import cache

import torch
import torch.nn as nn
from torch import Tensor

__all__ = ["LARGE_KERNELS", "check_large_kernel", "find_implicit_gemm", "large_kernel_conv2d"]

PACKAGE = "depthwise_conv2d_implicit_gemm"
LARGE_KERNELS = ("implicit_gemm",)


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

    Its kernels read NCHW memory, so that a channels-last map is copied before and after.

    Args:
        x: `[B, C, H, W]` on a CUDA device.
        weight: `[C, 1, k, k]`.
        bias: `[C]`.
    """
    conv = _implicit_gemm(weight.shape[0], weight.shape[-1])
    out = torch.func.functional_call(conv, {"weight": weight}, (x.contiguous(),))
    out = out.contiguous(memory_format=torch.channels_last)
    return out if bias is None else out + bias[:, None, None]

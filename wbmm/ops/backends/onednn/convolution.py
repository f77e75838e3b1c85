"""The windowed product as a depthwise convolution of each window by itself: the table is the kernel."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from wbmm.ops.windows import Window, is_channels_last, merge_batch, partition_batch

from .linear import takes_onednn

__all__ = [
    "is_convolvable",
    "kernel_size",
    "pack_conv",
    "pack_kernel",
    "packed_conv2d",
    "prefers_convolution",
    "table_to_kernel",
    "windowed_convolution",
]

# A matrix grows with the fourth power of the window's side, a table with the second. From this side on, oneDNN's
# depthwise convolution is faster than the product with the matrix, for any number of windows: `wbmm bench paths`.
LEAST_SIDE = 7
# oneDNN convolves faster with kernels of at least this width: narrower ones get columns of zeros. Measured there too.
LEAST_WIDTH = 15


def is_convolvable(window: Window) -> bool:
    """Whether windows of this size are faster as convolutions where those are oneDNN's: all but small ones."""
    return min(window) >= LEAST_SIDE


def prefers_convolution(x: Tensor, window: Window) -> bool:
    """Whether windows of one table are faster as convolutions here: on a CPU, in eager execution."""
    return is_convolvable(window) and takes_onednn(x)


def kernel_size(window: Window) -> list[int]:
    """Height and width of the kernel of a window."""
    return [2 * window[0] - 1, max(2 * window[1] - 1, LEAST_WIDTH)]


def table_to_kernel(table: Tensor, window: Window) -> Tensor:
    """A table `[C, (2wh-1)(2ww-1)]` as the kernel of a cross-correlation, zeros at its sides if it is narrow."""
    columns = kernel_size(window)[1] // 2 - (window[1] - 1)
    return F.pad(table.view(-1, 1, 2 * window[0] - 1, 2 * window[1] - 1), (columns, columns))


def pack_conv(weight: Tensor, geometry: tuple, shape: list[int]) -> Tensor:
    """The weight of a convolution in the order in which oneDNN reads it for maps of a shape.

    Args:
        geometry: padding, stride, dilation and groups.
    """
    return torch.ops.mkldnn._reorder_convolution_weight(weight.detach(), *geometry, shape)


def packed_conv2d(x: Tensor, packed: Tensor, bias: Tensor | None, geometry: tuple) -> Tensor:
    """A convolution with a weight of `pack_conv`, without gradients."""
    return torch.ops.mkldnn._convolution_pointwise(x, packed, bias, *geometry, "none", [], "")


def pack_kernel(kernel: Tensor, window: Window) -> Tensor:
    """A kernel of `table_to_kernel` in the order in which oneDNN reads it, for whole windows."""
    return pack_conv(kernel, _geometry(kernel), [1, kernel.shape[0], *window])


def windowed_convolution(
    x: Tensor, kernel: Tensor, window: Window, bias: Tensor | None = None, packed: Tensor | None = None
) -> Tensor:
    """Convolve each window by itself, with zeros around it; windows that the edge cuts are convolved as they are.

    Args:
        x: `[B, C, H, W]`, any H and W.
        kernel: of `table_to_kernel`.
        bias: `[C]`.
        packed: of `pack_kernel`, where no gradients are wanted. PyTorch would put the kernel into that order at every
            call, which for few windows takes a third of the time.

    Returns:
        `[B, C, H, W]`, in the memory format of `x`.
    """
    layout = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    regions = list(itertools.product(*(_spans(size, side) for size, side in zip(x.shape[-2:], window, strict=True))))
    if len(regions) == 1:
        return _convolve(x, kernel, window, bias, packed).contiguous(memory_format=layout)
    out = torch.empty_like(x, memory_format=layout)
    for rows, columns in regions:
        out[..., rows, columns] = _convolve(x[..., rows, columns], kernel, window, bias, packed)
    return out


def _spans(size: int, side: int) -> list[slice]:
    """The whole windows along one axis, and what is left of the last one."""
    whole = size - size % side
    return [span for span in (slice(0, whole), slice(whole, size)) if span.start < span.stop]


def _convolve(x: Tensor, kernel: Tensor, window: Window, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    """A map of whole windows, or of cut ones alone along an axis, which need the middle of the kernel only."""
    h, w = min(window[0], x.shape[2]), min(window[1], x.shape[3])
    windows = partition_batch(x, (h, w))
    if packed is not None and (h, w) == window:
        out = packed_conv2d(windows, packed, bias, _geometry(kernel))
    else:
        kernel = _middle(_middle(kernel, 2, h - 1), 3, max(w - 1, LEAST_WIDTH // 2))
        padding, *_, groups = _geometry(kernel)
        out = F.conv2d(windows, kernel, bias, padding=padding, groups=groups)
    return merge_batch(out, x.shape, (h, w))


def _geometry(kernel: Tensor) -> tuple[list[int], list[int], list[int], int]:
    """Padding, stride, dilation and groups of a convolution that keeps the size of a window."""
    return [side // 2 for side in kernel.shape[2:]], [1, 1], [1, 1], kernel.shape[0]


def _middle(kernel: Tensor, dim: int, reach: int) -> Tensor:
    return kernel.narrow(dim, kernel.shape[dim] // 2 - reach, 2 * reach + 1)

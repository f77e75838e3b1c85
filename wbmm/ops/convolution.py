"""The windowed product as a depthwise convolution of each window by itself: the table is the kernel."""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import takes_onednn
from .windows import Window, grid_size, is_channels_last, merge_batch, partition_batch

__all__ = ["prefers_convolution", "table_to_kernel", "windowed_convolution"]

# A matrix grows with the fourth power of the window's side, a table with the second. oneDNN's depthwise convolution is
# faster than the product with the matrix for large windows, and where windows are too few to pay for reading it:
# docs/speed.md has the measurement.
LARGE_SIDE = 10
LEAST_SIDE, FEW_WINDOWS = 7, 8


def prefers_convolution(x: Tensor, window: Window) -> bool:
    """Whether windows of one table are faster as convolutions: large ones, or few, on a CPU, in eager execution."""
    if not takes_onednn(x) or min(window) < LEAST_SIDE:
        return False
    return min(window) >= LARGE_SIDE or x.shape[0] * math.prod(grid_size(*x.shape[-2:], window)) <= FEW_WINDOWS


def table_to_kernel(table: Tensor, window: Window) -> Tensor:
    """A table `[C, (2wh-1)(2ww-1)]` as the kernel `[C, 1, 2wh-1, 2ww-1]` of a cross-correlation."""
    return table.view(-1, 1, 2 * window[0] - 1, 2 * window[1] - 1)


def windowed_convolution(x: Tensor, kernel: Tensor, window: Window, bias: Tensor | None = None) -> Tensor:
    """Convolve each window by itself, with zeros around it; windows that the edge cuts are convolved as they are.

    Args:
        x: `[B, C, H, W]`, any H and W.
        kernel: `[C, 1, 2wh-1, 2ww-1]`.
        bias: `[C]`.

    Returns:
        `[B, C, H, W]`, in the memory format of `x`.
    """
    layout = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    regions = list(itertools.product(*(_spans(size, side) for size, side in zip(x.shape[-2:], window, strict=True))))
    if len(regions) == 1:
        return _convolve(x, kernel, window, bias).contiguous(memory_format=layout)
    out = torch.empty_like(x, memory_format=layout)
    for rows, columns in regions:
        out[..., rows, columns] = _convolve(x[..., rows, columns], kernel, window, bias)
    return out


def _spans(size: int, side: int) -> list[slice]:
    """The whole windows along one axis, and what is left of the last one."""
    whole = size - size % side
    return [span for span in (slice(0, whole), slice(whole, size)) if span.start < span.stop]


def _convolve(x: Tensor, kernel: Tensor, window: Window, bias: Tensor | None) -> Tensor:
    """A map of whole windows, or of cut ones alone along an axis, which need the middle of the kernel only."""
    (wh, ww), (h, w) = window, (min(window[0], x.shape[2]), min(window[1], x.shape[3]))
    kernel = kernel[..., wh - h : wh + h - 1, ww - w : ww + w - 1]
    out = F.conv2d(partition_batch(x, (h, w)), kernel, bias, padding=(h - 1, w - 1), groups=x.shape[1])
    return merge_batch(out, x.shape, (h, w))

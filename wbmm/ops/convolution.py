"""The windowed product as a depthwise convolution of each window by itself: the table is the kernel."""

import math

import torch.nn.functional as F
from torch import Tensor

from .linear import takes_onednn
from .windows import Window, grid_size, merge_batch, partition_batch

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
    """Convolve each window by itself, with zeros around it.

    Args:
        x: `[B, C, nh*wh, nw*ww]`, whole windows.
        kernel: `[C, 1, 2wh-1, 2ww-1]`.
        bias: `[C]`.

    Returns:
        `[B, C, nh*wh, nw*ww]`, channels-last memory.
    """
    padding = (window[0] - 1, window[1] - 1)
    out = F.conv2d(partition_batch(x, window), kernel, bias, padding=padding, groups=x.shape[1])
    return merge_batch(out, x.shape, window)

"""The windowed product as a depthwise convolution of each window by itself: the table is the kernel."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import takes_onednn
from .windows import Window, is_channels_last, merge_batch, partition_batch

__all__ = ["prefers_convolution", "table_to_kernel", "windowed_convolution"]

# A matrix grows with the fourth power of the window's side, a table with the second. From this side on, oneDNN's
# depthwise convolution is faster than the product with the matrix, for any number of windows: `wbmm bench paths`.
LEAST_SIDE = 7
# oneDNN convolves two to three times as fast with kernels of at least this width: narrower ones get columns of zeros.
LEAST_WIDTH = 15


def prefers_convolution(x: Tensor, window: Window) -> bool:
    """Whether windows of one table are faster as convolutions: all but small ones, on a CPU, in eager execution."""
    return min(window) >= LEAST_SIDE and takes_onednn(x)


def table_to_kernel(table: Tensor, window: Window) -> Tensor:
    """A table `[C, (2wh-1)(2ww-1)]` as the kernel `[C, 1, 2wh-1, K]` of a cross-correlation, zeros at its sides."""
    columns = max(LEAST_WIDTH // 2 - (window[1] - 1), 0)
    return F.pad(table.view(-1, 1, 2 * window[0] - 1, 2 * window[1] - 1), (columns, columns))


def windowed_convolution(x: Tensor, kernel: Tensor, window: Window, bias: Tensor | None = None) -> Tensor:
    """Convolve each window by itself, with zeros around it; windows that the edge cuts are convolved as they are.

    Args:
        x: `[B, C, H, W]`, any H and W.
        kernel: of `table_to_kernel`.
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
    h, w = min(window[0], x.shape[2]), min(window[1], x.shape[3])
    reach = h - 1, max(w - 1, LEAST_WIDTH // 2)
    kernel = _middle(_middle(kernel, 2, reach[0]), 3, reach[1])
    out = F.conv2d(partition_batch(x, (h, w)), kernel, bias, padding=reach, groups=x.shape[1])
    return merge_batch(out, x.shape, (h, w))


def _middle(kernel: Tensor, dim: int, reach: int) -> Tensor:
    return kernel.narrow(dim, kernel.shape[dim] // 2 - reach, 2 * reach + 1)

"""The windowed operator on a CPU: depthwise convolutions of each window, and training with a written-out backward pass.

A table is the kernel of a convolution of each window by itself, so nothing of the matrix's size is read.

In training, with windows `X[C, N, d]` and the gradient `G[C, N, d]` of the result, a table's gradient is `X.T @ G`
summed over the pairs of positions of each offset. That matrix `[C, d, d]`, 49 MB for 320 channels of a 14x14 window, is
made for a few channels at a time. Windows of one table are convolved, from 7x7 on, so that its own matrix is not built.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from wbmm.ops import reference
from wbmm.ops.backends import gradients_with_graph
from wbmm.ops.profile import thresholds
from wbmm.ops.tables import collapse_hierarchical, collapse_matrix, expand, zero_offset
from wbmm.ops.windows import (
    Window,
    crop,
    is_channels_last,
    merge_batch,
    merge_windows,
    pad_to_windows,
    partition_batch,
    partition_windows,
)

from .linear import takes_onednn

__all__ = [
    "convolve_whole",
    "is_convolvable",
    "kernel_size",
    "pack_conv",
    "pack_kernel",
    "packed_conv2d",
    "prefers_convolution",
    "table_to_kernel",
    "windowed_convolution",
    "windowed_training",
]


def is_convolvable(window: Window, dtype: torch.dtype = torch.float32) -> bool:
    """Whether windows of this size are faster as convolutions where those are oneDNN's: all but small ones.

    A matrix grows with the fourth power of the window's side, a table with the second.
    """
    return min(window) >= thresholds(dtype).least_side


def prefers_convolution(x: Tensor, window: Window) -> bool:
    """Whether windows of one table are faster as convolutions here: on a CPU, in eager execution."""
    return is_convolvable(window, x.dtype) and takes_onednn(x)


def kernel_size(window: Window, dtype: torch.dtype = torch.float32) -> list[int]:
    """Height and width of the kernel of a window. With narrow kernels oneDNN is slower: they get columns of zeros."""
    return [2 * window[0] - 1, max(2 * window[1] - 1, thresholds(dtype).least_width)]


def table_to_kernel(table: Tensor, window: Window) -> Tensor:
    """A table `[C, (2wh-1)(2ww-1)]` as the kernel of a cross-correlation, zeros at its sides if it is narrow."""
    columns = kernel_size(window, table.dtype)[1] // 2 - (window[1] - 1)
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
        kernel = _middle(
            _middle(kernel, 2, h - 1), 3, max(w - 1, min(thresholds(x.dtype).least_width, kernel.shape[3]) // 2)
        )
        out = _conv2d(windows, kernel, bias)
    return merge_batch(out, x.shape, (h, w))


def convolve_whole(x: Tensor, kernel: Tensor, window: Window, bias: Tensor | None) -> Tensor:
    """Convolve each window of a map of whole windows by itself: without a branch on sizes, for a compiler."""
    return merge_batch(_conv2d(partition_batch(x, window), kernel, bias), x.shape, window)


def _conv2d(windows: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    padding, *_, groups = _geometry(kernel)
    return F.conv2d(windows, kernel, bias, padding=padding, groups=groups)


def _geometry(kernel: Tensor) -> tuple[list[int], list[int], list[int], int]:
    """Padding, stride, dilation and groups of a convolution that keeps the size of a window."""
    return [side // 2 for side in kernel.shape[2:]], [1, 1], [1, 1], kernel.shape[0]


def _middle(kernel: Tensor, dim: int, reach: int) -> Tensor:
    return kernel.narrow(dim, kernel.shape[dim] // 2 - reach, 2 * reach + 1)


def windowed_training(
    x: Tensor, tables: list[Tensor], window: Window, shortcuts: int = 0, padding_mode: str = "zeros"
) -> Tensor:
    """`reference.windowed` of one table, or of a global and a local one, with gradients, in eager mode.

    Args:
        x: `[B, C, H, W]`, any H and W.
        tables: `[C, (2wh-1)(2ww-1)]`, and with a hierarchical layer `[C, (wh-1)(ww-1)]`.
        shortcuts: how many times the input is added to the product.

    Returns:
        `[B, C, H, W]`, in the memory format of `x`.
    """
    if len(tables) == 1 and padding_mode == "zeros":
        (table,), whole = tables, window
        window = (min(whole[0], x.shape[2]), min(whole[1], x.shape[3]))
        tables = [table if window == whole else _middle_of_table(table, whole, window)]
    out = _WindowedProduct.apply(pad_to_windows(x, window, padding_mode), window, shortcuts, *tables)
    return crop(out, *x.shape[-2:])


def _middle_of_table(table: Tensor, window: Window, smaller: Window) -> Tensor:
    """The offsets that a map has which is smaller than the window: others meet the zeros around it alone."""
    rows, columns = (whole - side for whole, side in zip(window, smaller, strict=True))
    grid = table.view(-1, 2 * window[0] - 1, 2 * window[1] - 1)
    return F.pad(grid, (-columns, -columns, -rows, -rows)).flatten(1)


class _WindowedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, window, shortcuts, *tables):
        ctx.window, ctx.shortcuts = window, shortcuts
        ctx.convolve = len(tables) == 1 and prefers_convolution(x, window)
        ctx.save_for_backward(x, *tables)
        if ctx.convolve:
            return _convolve_windows(x, tables[0], window, shortcuts)
        windows = partition_windows(x, window)
        return _merge(_multiply(windows, expand(list(tables), window), shortcuts), x, window)

    @staticmethod
    def backward(ctx, grad):
        with torch.autocast("cpu", enabled=False):  # it may be on for the backward pass alone
            return _WindowedProduct._gradients(ctx, grad)

    @staticmethod
    def _gradients(ctx, grad):
        x, *tables = ctx.saved_tensors
        window, shortcuts, wanted = ctx.window, ctx.shortcuts, ctx.needs_input_grad
        if torch.is_grad_enabled():  # the gradients are themselves to be differentiated
            return _plain_gradients(x, tables, window, shortcuts, wanted, grad)
        dx = None
        g = None if ctx.convolve and not any(wanted[3:]) else partition_windows(grad, window)
        if wanted[0] and ctx.convolve:
            dx = _convolve_windows(grad, tables[0].flip(1), window, shortcuts)
        elif wanted[0]:
            dx = _merge(_multiply(g, expand(tables, window).transpose(1, 2), shortcuts), x, window)
        if not any(wanted[3:]):
            return dx, None, None, *(None for _ in tables)
        return dx, None, None, *_table_gradients(partition_windows(x, window), g, tables, window)


def _convolve_windows(x: Tensor, table: Tensor, window: Window, shortcuts: int) -> Tensor:
    """The windowed operator as a convolution, with the shortcuts in its kernel, or apart where that would cost bits."""
    if x.element_size() < 4:
        out = windowed_convolution(x, table_to_kernel(table, window), window)
        return out.add_(x, alpha=shortcuts) if shortcuts else out
    table = table.clone()
    table[:, zero_offset(window)] += shortcuts
    return windowed_convolution(x, table_to_kernel(table, window), window)


def _multiply(windows: Tensor, matrix: Tensor, shortcuts: int) -> Tensor:
    return torch.baddbmm(windows, windows, matrix, beta=shortcuts)


def _merge(windows: Tensor, like: Tensor, window: Window) -> Tensor:
    batch, _, height, width = like.shape
    return merge_windows(windows, (batch, height, width), window, is_channels_last(like))


def _table_gradients(windows: Tensor, grad: Tensor, tables: list[Tensor], window: Window) -> list[Tensor]:
    """Gradients of the tables from windows and the gradient of the result, both `[C, N, d]`; summed in float32."""
    area, dtype = windows.shape[-1], torch.promote_types(windows.dtype, torch.float32)
    step = max(thresholds(windows.dtype).matrix_bytes // (area * area * windows.element_size()), 1)
    parts = []
    for x, g in zip(windows.split(step), grad.split(step), strict=True):
        matrix = torch.baddbmm(x[:, :1, :1], x.transpose(1, 2), g, beta=0).to(dtype)
        parts.append((collapse_matrix(matrix, window),) if len(tables) == 1 else collapse_hierarchical(matrix, window))
    return [torch.cat(part).to(windows.dtype) for part in zip(*parts, strict=True)]


def _plain_gradients(x, tables, window, shortcuts, wanted, grad):
    """The same by autograd, with a graph."""
    out = reference.windowed(x, tables, window, None, shortcuts)
    dx, *rest = gradients_with_graph(out, [x, *tables], (wanted[0], *wanted[3:]), grad)
    return dx, None, None, *rest

"""The windowed product in training on a CPU, with a backward pass written out.

With windows `X[C, N, d]` and the gradient `G[C, N, d]` of the result, a table's gradient is `X.T @ G` summed over the
pairs of positions of each offset. That matrix `[C, d, d]`, 49 MB for 320 channels of a 14x14 window, is made for a few
channels at a time. Windows of one table are convolved, from 7x7 on, so that its own matrix is not built.
"""

import torch
from torch import Tensor

from wbmm.ops import reference
from wbmm.ops.tables import collapse_hierarchical, collapse_matrix, expand, zero_offset
from wbmm.ops.windows import Window, crop, is_channels_last, merge_windows, pad_to_windows, partition_windows

from .convolution import prefers_convolution, table_to_kernel, windowed_convolution

__all__ = ["windowed_training"]

BLOCK_BYTES = 2**22  # of the matrix's gradient


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
    out = _WindowedProduct.apply(pad_to_windows(x, window, padding_mode), window, shortcuts, *tables)
    return crop(out, *x.shape[-2:])


class _WindowedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, window, shortcuts, *tables):
        ctx.window, ctx.shortcuts = window, shortcuts
        ctx.convolve = len(tables) == 1 and prefers_convolution(x, window)
        ctx.save_for_backward(x, *tables)
        if ctx.convolve:
            return windowed_convolution(x, _kernel(tables[0], window, shortcuts), window)
        windows = partition_windows(x, window)
        return _merge(_multiply(windows, expand(tables, window), shortcuts), x, window)

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
            dx = windowed_convolution(grad, _kernel(tables[0], window, shortcuts).flip(2, 3), window)
        elif wanted[0]:
            dx = _merge(_multiply(g, expand(tables, window).transpose(1, 2), shortcuts), x, window)
        if not any(wanted[3:]):
            return dx, None, None, *(None for _ in tables)
        return dx, None, None, *_table_gradients(partition_windows(x, window), g, tables, window)


def _kernel(table: Tensor, window: Window, shortcuts: int) -> Tensor:
    """The table as a kernel, with the shortcuts in it: nothing is lost by that in float32."""
    table = table.clone()
    table[:, zero_offset(window)] += shortcuts
    return table_to_kernel(table, window)


def _multiply(windows: Tensor, matrix: Tensor, shortcuts: int) -> Tensor:
    return torch.baddbmm(windows, windows, matrix, beta=shortcuts)


def _merge(windows: Tensor, like: Tensor, window: Window) -> Tensor:
    batch, _, height, width = like.shape
    return merge_windows(windows, (batch, height, width), window, is_channels_last(like))


def _table_gradients(windows: Tensor, grad: Tensor, tables: list[Tensor], window: Window) -> list[Tensor]:
    """Gradients of the tables from windows and the gradient of the result, both `[C, N, d]`."""
    area = windows.shape[-1]
    step = max(BLOCK_BYTES // (area * area * windows.element_size()), 1)
    parts = []
    for x, g in zip(windows.split(step), grad.split(step), strict=True):
        matrix = torch.baddbmm(x[:, :1, :1], x.transpose(1, 2), g, beta=0)
        parts.append((collapse_matrix(matrix, window),) if len(tables) == 1 else collapse_hierarchical(matrix, window))
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def _plain_gradients(x, tables, window, shortcuts, wanted, grad):
    """The same by autograd, with a graph."""
    out = reference.windowed(x, tables, window, None, shortcuts)
    inputs = [x, *tables]
    asked = [tensor for tensor, wants in zip(inputs, (wanted[0], *wanted[3:]), strict=True) if wants]
    found = iter(torch.autograd.grad(out, asked, grad, create_graph=True))
    dx, *rest = (next(found) if wants else None for wants in (wanted[0], *wanted[3:]))
    return dx, None, None, *rest

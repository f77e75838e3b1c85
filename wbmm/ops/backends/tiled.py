"""The windowed operator in tiles of its matrix, which is never whole: large windows in bounded memory, on any device.

With output positions counted backwards, row a of a window's positions has the weights `table[a + h, b + w]`: the matrix
of some rows is an `F.unfold` of as many rows of the table, and its gradient goes back by `F.fold`. A tile has some rows
of output positions and, where a single row of all channels is too large, some of the channels.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from wbmm.ops import reference
from wbmm.ops.backends import LARGE_MATRIX, Backend, Call, gradients_with_graph
from wbmm.ops.tables import Window, scales_of
from wbmm.ops.windows import crop, is_channels_last, merge_windows, pad_to_windows, partition_windows

__all__ = ["Tiled"]

TILE_BYTES = 2**25


class Tiled(Backend):
    """Any device. By itself only for large matrices: small ones are faster as one product."""

    name = "tiled"
    operators = frozenset(("windowed",))

    def can_run(self, call: Call) -> str | None:
        if call.weights[0].ndim == 3:
            return "it works on tables, and this layer holds the matrix itself"
        if not call.x.is_floating_point():
            return f"it computes with floating-point numbers, and the map is {call.x.dtype}"
        return None

    def better_elsewhere(self, call: Call) -> str | None:
        if call.matrix_bytes() <= LARGE_MATRIX:
            return f"the matrix takes at most {LARGE_MATRIX // 2**20} MB, and is faster as a whole"
        return None

    def windowed(self, x, tables, window, bias, shortcuts, padding_mode, grad, kept) -> Tensor:
        x, bias = reference.to_autocast_type(x), None if bias is None else reference.to_autocast_type(bias)
        tables = [reference.to_autocast_type(table) for table in tables]
        with torch.autocast(x.device.type, enabled=False):
            padded = pad_to_windows(x, window, padding_mode)
            out = _Tiles.apply(padded, window, *tables)
            if shortcuts:
                out = torch.add(out, padded, alpha=shortcuts)
            return crop(out if bias is None else out + bias[:, None, None], *x.shape[-2:])


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, window, *tables):
        ctx.window = window
        ctx.save_for_backward(x, *tables)
        parts = [_multiply(x, table, scale) for table, scale in _pairs(tables, window)]
        return parts[0] if len(parts) == 1 else parts[0].add_(parts[1])

    @staticmethod
    def backward(ctx, grad):
        x, *tables = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        with torch.autocast(grad.device.type, enabled=False):  # it may be on for the backward pass alone
            if torch.is_grad_enabled():  # the gradients are themselves to be differentiated
                return _plain_gradients(x, tables, ctx.window, wanted, grad)
            dx, dtables = None, []
            for i, (table, scale) in enumerate(_pairs(tables, ctx.window)):
                if wanted[0]:
                    part = _multiply(grad, table.flip(1), scale)  # the matrix transposed: offsets with the other sign
                    dx = part if dx is None else dx.add_(part)
                dtables.append(_table_gradient(x, grad, table, scale) if wanted[2 + i] else None)
        return dx, None, *dtables


def _pairs(tables: tuple[Tensor, ...], window: Window) -> Iterator[tuple[Tensor, Window]]:
    return zip(tables, scales_of(len(tables), window), strict=True)


def _tiles(table: Tensor, window: Window) -> Iterator[tuple[slice, slice]]:
    """Channels and rows of output positions, counted backwards, of each tile."""
    wh, ww = window
    row = wh * ww * ww * table.element_size()  # of one channel
    channels = max(min(TILE_BYTES // row, len(table)), 1)
    rows = max(min(TILE_BYTES // (row * channels), wh), 1)
    for c in range(0, len(table), channels):
        for a in range(0, wh, rows):
            yield slice(c, c + channels), slice(a, min(a + rows, wh))


def _multiply(x: Tensor, table: Tensor, window: Window) -> Tensor:
    """Each window of a map of whole windows times the table's matrix, in the map's memory format."""
    wh, ww = window
    windows = partition_windows(x, window)
    out = torch.empty_like(windows)
    grid = table.view(-1, 1, 2 * wh - 1, 2 * ww - 1)
    for channels, rows in _tiles(table, window):
        tile = F.unfold(grid[channels, :, rows.start : rows.stop + wh - 1], (wh, ww))  # [c, d, outputs]
        start, stop = wh * ww - rows.stop * ww, wh * ww - rows.start * ww
        out[channels, :, start:stop] = torch.bmm(windows[channels], tile).flip(2)
    return merge_windows(out, (x.shape[0], *x.shape[-2:]), window, is_channels_last(x))


def _table_gradient(x: Tensor, grad: Tensor, table: Tensor, window: Window) -> Tensor:
    """The gradient of a table, summed in float32 at least."""
    wh, ww = window
    windows, grads = partition_windows(x, window), partition_windows(grad, window).flip(2)
    total = torch.zeros(len(table), 1, 2 * wh - 1, 2 * ww - 1, device=table.device, dtype=_sum_type(table.dtype))
    for channels, rows in _tiles(table, window):
        tile = torch.bmm(windows[channels].transpose(1, 2), grads[channels, :, rows.start * ww : rows.stop * ww])
        seen = slice(rows.start, rows.stop + wh - 1)
        size = (seen.stop - seen.start, 2 * ww - 1)
        total[channels, :, seen] += F.fold(tile.to(total.dtype), size, (wh, ww))
    return total.view(table.shape).to(table.dtype)


def _sum_type(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _plain_gradients(x, tables, window, wanted, grad):
    """The same by autograd, with a graph; this needs the matrix."""
    out = reference.windowed(x, tables, window)
    dx, *rest = gradients_with_graph(out, [x, *tables], (wanted[0], *wanted[2:]), grad)
    return dx, None, *rest

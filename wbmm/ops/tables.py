"""Tables over the offsets inside a window, and their expansion to matrices.

A table `[C, (2wh-1)(2ww-1)]` holds one weight per channel and offset (dh, dw) = input position - output position. Its
matrix `[C, d, d]`, d = wh*ww, has rows for input positions and columns for output positions: `Y = X @ M`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .obstacles import is_eager

Window = tuple[int, int]


def num_offsets(window: Window) -> int:
    """Offsets between two positions of a window: the length of its table."""
    return (2 * window[0] - 1) * (2 * window[1] - 1)


def zero_offset(window: Window) -> int:
    """Where the offset (0, 0) stands in a table."""
    return num_offsets(window) // 2


def _build_index(window: Window) -> Tensor:
    wh, ww = window
    h = torch.arange(wh, device="cpu").repeat_interleave(ww)
    w = torch.arange(ww, device="cpu").repeat(wh)
    dh = h[:, None] - h[None, :] + wh - 1
    dw = w[:, None] - w[None, :] + ww - 1
    return dh * (2 * ww - 1) + dw


_indices: dict[Window, Tensor] = {}  # layers on a CPU share them


def relative_index(window: Window, device: torch.device | None = None) -> Tensor:
    """Table position of every (input, output) pair of a window.

    Returns:
        `I[d, d]` int64, `I[i, j] = (h_i - h_j + wh - 1)(2ww - 1) + (w_i - w_j + ww - 1)`.
    """
    if torch.jit.is_scripting():
        return _build_index(window).to(device)
    else:  # noqa: RET505  what is scripted must stand in the other branch
        window = (window[0], window[1])
        index = _indices.get(window)
        if index is None:
            index = _build_index(window)
            if is_eager(index) and not index.is_meta:  # torch.device("meta") may be the default
                with torch.inference_mode(False):  # or who trains after an inference could not use it
                    index = _indices[window] = index.clone()
        return index.to(device)


def expand_table(table: Tensor, window: Window, index: Tensor | None = None) -> Tensor:
    """Expand a table to its matrix.

    Args:
        table: `[C, (2wh-1)(2ww-1)]`.
        window: (wh, ww).
        index: `relative_index(window)` on the table's device, where the caller already has it.

    Returns:
        `M[C, d, d]` with `M[c, i, j] = table[c, I[i, j]]`.
    """
    d = window[0] * window[1]
    # A skeleton on the meta device, of which `torch.func.functional_call` takes the code, has no index with values.
    if index is None or (index.is_meta and not table.is_meta):
        index = relative_index(window, table.device)
    return table.index_select(1, index.reshape(-1)).view(-1, d, d)


def expand_hierarchical(
    table: Tensor, local_table: Tensor, window: Window, index: Tensor | None = None, local_index: Tensor | None = None
) -> Tensor:
    """Expand a global table and the table of its four local windows to one matrix.

    Args:
        table: `[C, (2wh-1)(2ww-1)]` over the global window.
        local_table: `[C, (wh-1)(ww-1)]` over the local window (wh/2, ww/2).
        window: the global window (wh, ww), both even.
        index: `relative_index(window)`, where the caller already has it.
        local_index: the same for the local window.

    Returns:
        `M[C, d, d]`, d = wh*ww: the global matrix with the local one added on its four diagonal blocks.
    """
    lh, lw = window[0] // 2, window[1] // 2
    local = expand_table(local_table, (lh, lw), local_index)
    # The local matrix as one 2x2 grid of sub-windows on either side; `same` keeps the pairs inside one sub-window.
    same = torch.eye(2, dtype=local.dtype, device=local.device)
    blocks = (
        local.view(-1, 1, lh, 1, lw, 1, lh, 1, lw)
        * same.view(1, 2, 1, 1, 1, 2, 1, 1, 1)
        * same.view(1, 1, 1, 2, 1, 1, 1, 2, 1)
    )
    return expand_table(table, window, index) + blocks.reshape(-1, 4 * lh * lw, 4 * lh * lw)


def expand(tables: list[Tensor], window: Window, index: list[Tensor] | None = None) -> Tensor:
    """The matrix `[C, d, d]` of one table, or of a global and a local one; a matrix stays what it is.

    Args:
        tables: as in `expand_table` or `expand_hierarchical`, or the matrix alone.
        window: (wh, ww).
        index: `relative_index` of each table's window, where the caller already has them.
    """
    if tables[0].ndim == 3:
        return tables[0]
    if len(tables) == 1:
        return expand_table(tables[0], window, None if index is None else index[0])
    local_index = None if index is None else index[1]
    return expand_hierarchical(tables[0], tables[1], window, None if index is None else index[0], local_index)


def scales_of(tables: int, window: Window) -> tuple[Window, ...]:
    """The window of each table of a layer that has so many."""
    return (window, (window[0] // 2, window[1] // 2))[:tables]


def collapse_matrix(matrix: Tensor, window: Window) -> Tensor:
    """The adjoint of `expand_table`: for each offset, the sum of a matrix `[C, d, d]` over the pairs that have it."""
    table = matrix.new_zeros(matrix.shape[0], num_offsets(window))
    return table.index_add_(1, relative_index(window, matrix.device).reshape(-1), matrix.flatten(1))


def collapse_hierarchical(matrix: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """The adjoint of `expand_hierarchical`: the sums over the whole window, and over its four quarters."""
    lh, lw = window[0] // 2, window[1] // 2
    quarters = matrix.view(-1, 2, lh, 2, lw, 2, lh, 2, lw)
    local = torch.einsum("cahbwaibj->chwij", quarters).reshape(-1, lh * lw, lh * lw)
    return collapse_matrix(matrix, window), collapse_matrix(local, (lh, lw))


def identity_table(channels: int, window: Window, **factory) -> Tensor:
    """The identity shortcut as a table: 1 at the zero offset. Returns `[C, (2wh-1)(2ww-1)]`."""
    table = torch.zeros(channels, num_offsets(window), **factory)
    table[:, zero_offset(window)] = 1
    return table


def kernel_to_table(kernel: Tensor, window: Window) -> Tensor:
    """A depthwise kernel, zero-padded at the window's edge, as a table.

    Taps at offsets that no two positions of the window have are inert and dropped.

    Args:
        kernel: `[C, 1, kh, kw]`, both odd. No flip: PyTorch's convolution is a cross-correlation.
        window: (wh, ww).

    Returns:
        `[C, (2wh-1)(2ww-1)]`.
    """
    kh, kw = kernel.shape[-2:]
    if not torch.jit.is_scripting():  # noqa: SIM102  a script must not see the rest
        if isinstance(kh, int) and (kh % 2 == 0 or kw % 2 == 0):  # under fx the sizes are proxies
            raise ValueError(f"a {kh}x{kw} kernel has no centre: both sides must be odd to be a table over offsets")
    ph, pw = window[0] - 1 - kh // 2, window[1] - 1 - kw // 2
    return F.pad(kernel.squeeze(1), [pw, pw, ph, ph]).flatten(1)  # a negative amount crops


def resize_table(table: Tensor, old: Window, new: Window) -> Tensor:
    """Interpolate a table to another window, its centre staying at the zero offset.

    The weights are scaled by the ratio of the numbers of offsets: a constant table keeps its sum, which is what a
    constant map sees; others keep it approximately.

    Args:
        table: `[C, (2wh-1)(2ww-1)]` over `old`.

    Returns:
        The table over `new`.
    """
    grid = table.view(1, -1, 2 * old[0] - 1, 2 * old[1] - 1)
    size = (2 * new[0] - 1, 2 * new[1] - 1)
    resized = F.interpolate(grid.float(), size=size, mode="bicubic", align_corners=True)
    area = (grid.shape[-2] * grid.shape[-1]) / (size[0] * size[1])
    return (resized * area).flatten(2).squeeze(0).to(table.dtype)

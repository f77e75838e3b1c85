"""Windows of an NCHW map, step by step."""

import torch
import torch.nn.functional as F
from torch import Tensor

Window = tuple[int, int]


def offset_index(window: Window) -> Tensor:
    """`[d, d]`: where a table holds the weight from input position i (row) to output position j (column)."""
    rows, columns = torch.meshgrid(torch.arange(window[0]), torch.arange(window[1]), indexing="ij")
    rows, columns = rows.flatten(), columns.flatten()
    down = rows[:, None] - rows[None, :] + window[0] - 1
    right = columns[:, None] - columns[None, :] + window[1] - 1
    return down * (2 * window[1] - 1) + right


def pad(x: Tensor, window: Window, mode: str) -> Tensor:
    """A map with whole windows, enlarged at the bottom and right."""
    bottom, right = -x.shape[2] % window[0], -x.shape[3] % window[1]
    if bottom or right:
        x = F.pad(x, (0, right, 0, bottom), mode="constant" if mode == "zeros" else mode)
    return x


def partition(x: Tensor, window: Window) -> Tensor:
    """`[B, C, H, W]` to `[C, N, d]`."""
    batch, channels, height, width = x.shape
    x = x.reshape(batch, channels, height // window[0], window[0], width // window[1], window[1])
    return x.permute(1, 0, 2, 4, 3, 5).reshape(channels, -1, window[0] * window[1])


def reverse(windows: Tensor, shape: torch.Size, window: Window) -> Tensor:
    """`[C, N, d]` to the map of whole windows, `shape` = `[B, C, H, W]`."""
    batch, channels, height, width = shape
    x = windows.reshape(channels, batch, height // window[0], width // window[1], window[0], window[1])
    return x.permute(1, 0, 2, 4, 3, 5).reshape(shape)


def multiply(x: Tensor, matrix: Tensor, window: Window, padding_mode: str) -> Tensor:
    """Each channel of each window times the channel's matrix `[C, d, d]`."""
    padded = pad(x, window, padding_mode)
    out = reverse(torch.bmm(partition(padded, window), matrix), padded.shape, window)
    return out[:, :, : x.shape[2], : x.shape[3]]

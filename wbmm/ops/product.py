"""The operator: a batched matrix product inside windows."""

import torch
from torch import Tensor

from .windows import Window, merge_windows, pad_to_windows, partition_windows


def windowed_product(
    x: Tensor,
    matrix: Tensor,
    window: Window,
    bias: Tensor | None = None,
    shortcuts: int = 0,
    padding_mode: str = "zeros",
    channels_last: bool = True,
) -> Tensor:
    """Multiply each channel of each window with the channel's matrix.

    Args:
        x: `[B, C, H, W]`, any H and W.
        matrix: `[C, d, d]`, d = wh*ww; rows are input positions.
        window: (wh, ww).
        bias: `[C]`, of a fused layer; it excludes `shortcuts`, which are then in the matrix.
        shortcuts: how many times the input is added to the product. Kept apart from the matrix in training: in
            bfloat16 a table entry next to the 1 of the shortcut would lose its low bits.
        padding_mode: how a map is padded to whole windows.
        channels_last: the memory format of the result.

    Returns:
        `[B, C, H, W]`.
    """
    batch, _, height, width = x.shape
    windows = partition_windows(pad_to_windows(x, window, padding_mode), window)
    if shortcuts:
        out = torch.baddbmm(windows, windows, matrix, beta=shortcuts)
    elif bias is not None:
        out = torch.baddbmm(bias[:, None, None], windows, matrix)
    else:
        out = torch.bmm(windows, matrix)
    return merge_windows(out, (batch, height, width), window, channels_last)

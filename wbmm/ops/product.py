"""The operator: a batched matrix product inside windows."""

import torch
from torch import Tensor

from .windows import Window, check_map, is_channels_last, merge_windows, pad_to_windows, partition_windows


def windowed_product(
    x: Tensor,
    matrix: Tensor,
    window: Window,
    bias: Tensor | None = None,
    shortcuts: int = 0,
    padding_mode: str = "zeros",
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

    Returns:
        `[B, C, H, W]`, in the memory format of `x`.
    """
    check_map(x, matrix.shape[0])
    if torch.compiler.is_exporting() and any(isinstance(side, torch.SymInt) for side in x.shape[-2:]):
        return opaque_product(x, matrix, list(window), bias, shortcuts, padding_mode)
    batch, _, height, width = x.shape
    windows = partition_windows(pad_to_windows(x, window, padding_mode), window)
    if shortcuts:
        out = torch.baddbmm(windows, windows, matrix, beta=shortcuts)
    elif bias is not None:
        out = torch.baddbmm(bias[:, None, None], windows, matrix)
    else:
        # Not bmm, which on a CPU is fifty times slower for a single window.
        out = torch.baddbmm(matrix[:, :1, :1], windows, matrix, beta=0)
    return merge_windows(out, (batch, height, width), window, is_channels_last(x))


@torch.library.custom_op("wbmm::windowed_product", mutates_args=())
def opaque_product(
    x: Tensor, matrix: Tensor, window: list[int], bias: Tensor | None, shortcuts: int, padding_mode: str
) -> Tensor:
    """`windowed_product` as one node of an exported graph with dynamic H or W; the result is contiguous.

    `torch.export` cannot prove that a padded side always divides into windows, and would pin the size that it saw.
    """
    return windowed_product(x, matrix, tuple(window), bias, shortcuts, padding_mode).contiguous()


@opaque_product.register_fake
def _(x, matrix, window, bias, shortcuts, padding_mode):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)

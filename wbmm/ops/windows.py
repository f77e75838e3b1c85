"""Maps to windows and back: padding to whole windows, partition, merge and crop.

What is traced has no Python branch on H or W, so that compiling, fx and export see one graph for every size. Eager
execution skips a padding by nothing, which would be a copy.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .obstacles import is_eager, is_transformed

Window = tuple[int, int]

PADDING_MODES = ("zeros", "reflect", "replicate")


def to_window(window: int | tuple[int, int]) -> Window:
    """A window as (wh, ww), from an int or a pair; anything else is an error."""
    pair = (window, window) if isinstance(window, int) else window
    if (
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and all(isinstance(side, int) and not isinstance(side, bool) and side >= 1 for side in pair)
    ):
        return pair[0], pair[1]
    raise ValueError(f"window size {window!r}: expected a positive int or a pair of them, such as 7 or (7, 14)")


def check_map(x: Tensor, channels: int) -> None:
    """An error for anything but a map `[B, C, H, W]` with so many channels."""
    if is_eager(x) and (x.ndim != 4 or x.shape[1] != channels):
        raise ValueError(f"input of shape {tuple(x.shape)}: expected [batch, {channels}, height, width]")


def grid_size(height: int, width: int, window: Window) -> tuple[int, int]:
    """How many windows cover a map, in each direction."""
    return (height + window[0] - 1) // window[0], (width + window[1] - 1) // window[1]


def pad_to_windows(x: Tensor, window: Window, mode: str = "zeros") -> Tensor:
    """Pad a map at the bottom and right to whole windows.

    Args:
        x: `[B, C, H, W]`.
        mode: one of `PADDING_MODES`. `reflect` needs a map larger than the padding.

    Returns:
        `[B, C, nh*wh, nw*ww]`.
    """
    height, width = x.shape[-2:]
    nh, nw = grid_size(height, width, window)
    bottom, right = nh * window[0] - height, nw * window[1] - width
    if is_eager(x) and bottom == 0 and right == 0:
        return x
    if mode == "zeros":
        return F.pad(x, [0, right, 0, bottom])
    if not torch.jit.is_scripting() and mode == "reflect":
        _check_reflection((height, width), (bottom, right), window)
    return F.pad(x, [0, right, 0, bottom], mode=mode)


def zeros_added(x: Tensor, window: Window, mode: str = "zeros") -> Tensor | None:
    """Where `pad_to_windows` adds zeros to a map: `[1, 1, nh*wh, nw*ww]`, 1 there and 0 elsewhere; None if nowhere."""
    ones = torch.ones_like(x[:1, :1])
    padded = pad_to_windows(ones, window, mode)
    if mode != "zeros" or (is_eager(x) and padded.shape == ones.shape):
        return None
    return 1 - padded


def _check_reflection(size: tuple[int, int], missing: tuple[int, int], window: Window) -> None:
    """An error where a map is too small to be mirrored."""
    if not isinstance(size[0], int) or (missing[0] < size[0] and missing[1] < size[1]):
        return
    raise ValueError(
        f"cannot reflect a {size[0]}x{size[1]} map to whole {window[0]}x{window[1]} windows: {missing[0]} rows and "
        f"{missing[1]} columns are needed, and at most {size[0] - 1} and {size[1] - 1} can be mirrored. "
        "Use a larger input, a smaller window, or padding_mode='zeros' or 'replicate'."
    )


def partition_windows(x: Tensor, window: Window) -> Tensor:
    """Cut a map of whole windows into windows, one copy from either memory format.

    Args:
        x: `[B, C, nh*wh, nw*ww]`, contiguous or channels-last.

    Returns:
        `[C, N, d]`, N = B*nh*nw, d = wh*ww.
    """
    wh, ww = window
    batch, channels, height, width = x.shape
    nh, nw = height // wh, width // ww
    if is_eager(x) and is_channels_last(x):  # the same windows by the NHWC view, so that the gradient is NHWC too
        x = x.permute(0, 2, 3, 1).reshape(batch, nh, wh, nw, ww, channels).permute(5, 0, 1, 3, 2, 4)
    else:
        x = x.reshape(batch, channels, nh, wh, nw, ww).permute(1, 0, 2, 4, 3, 5)
    # With a single window the reshape is a view, whose strides send a batched product to a loop over channels.
    return x.reshape(channels, batch * nh * nw, wh * ww).contiguous()


def merge_windows(windows: Tensor, size: tuple[int, int, int], window: Window, channels_last: bool = True) -> Tensor:
    """Put windows back in place and crop what the padding added.

    Args:
        windows: `[C, N, d]`.
        size: (B, H, W) of the map, H and W before padding.
        channels_last: the memory format of the result.

    Returns:
        `[B, C, H, W]`.
    """
    wh, ww = window
    batch, height, width = size
    nh, nw = grid_size(height, width, window)
    channels = windows.shape[0]
    x = windows.reshape(channels, batch, nh, nw, wh, ww)
    if channels_last:
        x = x.permute(1, 2, 4, 3, 5, 0).reshape(batch, nh * wh, nw * ww, channels).contiguous()
        return crop(x.permute(0, 3, 1, 2), height, width)
    x = x.permute(1, 0, 2, 4, 3, 5).reshape(batch, channels, nh * wh, nw * ww).contiguous()
    return crop(x, height, width)


def partition_batch(x: Tensor, window: Window) -> Tensor:
    """Cut a map of whole windows into a batch of windows: `[B, C, nh*wh, nw*ww]` to `[N, C, wh, ww]`, channels-last."""
    wh, ww = window
    batch, channels, height, width = x.shape
    x = x.permute(0, 2, 3, 1).reshape(batch, height // wh, wh, width // ww, ww, channels)
    # A view of one row of windows would not count as channels-last, and be converted twice.
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, wh, ww, channels).contiguous().permute(0, 3, 1, 2)


def merge_batch(windows: Tensor, shape: torch.Size, window: Window) -> Tensor:
    """The inverse of `partition_batch`: `shape` is the map's, its memory channels-last."""
    wh, ww = window
    batch, channels, height, width = shape
    x = windows.permute(0, 2, 3, 1).reshape(batch, height // wh, width // ww, wh, ww, channels)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(batch, height, width, channels).permute(0, 3, 1, 2)


def crop(x: Tensor, height: int, width: int) -> Tensor:
    """Drop rows at the bottom and columns at the right; the memory format stays."""
    bottom, right = x.shape[-2] - height, x.shape[-1] - width
    if is_eager(x) and bottom == 0 and right == 0:
        return x
    # A negative pad crops without a slice: a slice traced at a padded size fails its guard at an unpadded one.
    return F.pad(x, [0, -right, 0, -bottom])


def is_channels_last(x: Tensor) -> bool:
    """Whether a map is physically NHWC; a map that is both (C = 1, or H = W = 1) counts as contiguous."""
    if not torch.jit.is_scripting() and not isinstance(x, Tensor):
        return True  # an fx proxy has no memory format; the models use this one
    # Of the view, because `torch.func.vmap` knows no query for another memory format.
    return x.permute(0, 2, 3, 1).is_contiguous() and not x.is_contiguous()


def to_channels_last(x: Tensor) -> Tensor:
    """A map in channels-last memory."""
    if not torch.jit.is_scripting():  # noqa: SIM102  a script must not see the rest
        if is_eager(x) and is_transformed():  # vmap knows no conversion to another memory format
            return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    return x.contiguous(memory_format=torch.channels_last)

"""What `torch.compile` sees in inference on a CPU, where the reference would be slower than eager execution.

- In `as_convolutions`, for frozen weights (`wbmm.optimize` compiles so): convolutions. Linears are 1x1 ones and windows
  are convolved one by one. The compiler packs their weights for oneDNN, and merges what stands between them. Linears it
  would multiply by MKL. Height and width must be constants: PyTorch 2.12 gets strides wrong where they are not.
- Otherwise it would pack weights at every call. It gets two operators of our own, which run the backend `onednn`: the
  windowed product and the feed-forward part, with packed weights and cache-sized blocks.

There is no graph break. For other batch sizes a model is compiled once more, and with convolutions again from 16 images
or windows on: PyTorch chooses their implementation by that number. PyTorch 2.9 cannot tell compiling from exporting and
gets the reference.

An operator of PyTorch takes tensors and numbers, no Python object, so a layer's `Kept` goes by its number.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference
from .backends.onednn import OneDNN
from .backends.onednn.linear import computes
from .backends.onednn.windowed import convolve_whole, is_convolvable, kernel_size
from .kept import Kept, find_kept
from .tables import Window, scales_of
from .windows import crop, pad_to_windows

__all__ = ["as_convolutions", "compiler_takes", "gated_ffn", "windowed"]

_backend = OneDNN()
_types = tuple(dtype for dtype in (torch.float32, torch.bfloat16) if computes(dtype))

torch.library.define(
    "wbmm::windowed",
    "(Tensor x, Tensor[] tables, int[] window, Tensor? bias, int shortcuts, str padding_mode, int kept) -> Tensor",
)
torch.library.define(
    "wbmm::gated_ffn",
    "(Tensor x, Tensor? gate, Tensor? shortcut, Tensor w1, Tensor b1, Tensor gamma, float eps, Tensor w2, Tensor? b2, "
    "int kept) -> Tensor",
)


def compiler_takes(x: Tensor, weight: Tensor, kept: Kept | None) -> bool:
    """Whether a compiler gets the operators of this file: for inference on a CPU, in a type that oneDNN computes."""
    return (
        torch.compiler.is_compiling()
        and not torch.compiler.is_exporting()  # files hold operators that everybody has
        and not torch.is_grad_enabled()
        and kept is not None
        and x.device.type == "cpu"
        and x.dtype in _types
        and x.dtype == weight.dtype
        and not torch.is_autocast_enabled("cpu")
    )


_convolutions = False


@contextmanager
def as_convolutions() -> Iterator[None]:
    """What is compiled meanwhile is convolutions: for frozen weights, and maps of constant height and width."""
    global _convolutions
    before, _convolutions = _convolutions, True
    try:
        yield
    finally:
        _convolutions = before


@torch.compiler.assume_constant_result
def _convolves() -> bool:
    return _convolutions


@torch.compiler.assume_constant_result
def _kernel_width(side: int, dtype: torch.dtype) -> int:
    """Of the kernel of a window; 0 if the window is faster multiplied. The profile is no part of a graph."""
    return kernel_size((side, side), dtype)[1] if is_convolvable((side, side), dtype) else 0


def windowed(
    x: Tensor, tables: list[Tensor], window: Window, bias: Tensor | None, shortcuts: int, padding_mode: str, kept: Kept
) -> Tensor:
    """As `reference.windowed`."""
    scales = scales_of(len(tables), window)
    if not _convolves() or not all(_kernel_width(min(scale), x.dtype) for scale in scales):
        return torch.ops.wbmm.windowed(x, tables, list(window), bias, shortcuts, padding_mode, kept.number)
    padded = pad_to_windows(x, window, padding_mode)
    out = shortcuts * padded if shortcuts else None
    for table, scale in zip(tables, scales, strict=True):
        kernel = table.view(-1, 1, 2 * scale[0] - 1, 2 * scale[1] - 1)
        margin = max(0, _kernel_width(scale[1], x.dtype) - kernel.shape[3]) // 2
        part = convolve_whole(padded, F.pad(kernel, (margin, margin)), scale, bias)
        out, bias = part if out is None else out + part, None
    return crop(out, *x.shape[-2:])


def gated_ffn(x: Tensor, gate: Tensor | None, shortcut: Tensor | None, weights: tuple, kept: Kept) -> Tensor:
    """As `reference.gated_ffn` without norm and scale; the weights are w1, b1, gamma, eps, w2, b2."""
    if not _convolves():
        return torch.ops.wbmm.gated_ffn(x, gate, shortcut, *weights, kept.number)
    w1, b1, gamma, eps, w2, b2 = weights
    fc1, fc2 = partial(_pointwise, weight=w1, bias=b1), partial(_pointwise, weight=w2, bias=b2)
    grn = partial(reference.grn, gamma=gamma, beta=None, eps=eps)
    return reference.gated_ffn(x, fc1, grn, fc2, gate, shortcut=shortcut)


def _pointwise(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear on `[B, H, W, C]`, as a convolution."""
    return reference.to_rows(F.conv2d(reference.from_rows(rows), weight[:, :, None, None], bias), None)


@torch.library.impl("wbmm::windowed", "cpu")
def _windowed(x, tables, window, bias, shortcuts, padding_mode, kept) -> Tensor:
    return _backend.windowed(x, tables, tuple(window), bias, shortcuts, padding_mode, False, find_kept(kept))


@torch.library.impl("wbmm::gated_ffn", "cpu")
def _gated_ffn(x, gate, shortcut, w1, b1, gamma, eps, w2, b2, kept) -> Tensor:
    return _backend.ffn(x, gate, shortcut, w1, b1, (gamma, None, eps), w2, b2, find_kept(kept))


@torch.library.register_fake("wbmm::windowed")
def _windowed_shape(x, tables, window, bias, shortcuts, padding_mode, kept) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("wbmm::gated_ffn")
def _gated_ffn_shape(x, gate, shortcut, w1, b1, gamma, eps, w2, b2, kept) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)

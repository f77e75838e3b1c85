"""What `torch.compile` sees in inference on a CPU: two operators of our own that run the backend `onednn`.

Compiled from the reference, a fused model is slower than in eager execution: PyTorch's compiler multiplies float32 by
MKL and writes the wide hidden layer out between kernels. As one operator each, the windowed product and the
feed-forward part keep their packed weights and cache-sized blocks, and the compiler fuses what stands between them.
There is no graph break, and no new compilation for another batch size. PyTorch 2.9 cannot tell compiling from exporting
here and gets the reference.

An operator of PyTorch takes tensors and numbers, no Python object, so a layer's `Kept` goes by its number.
"""

import torch
from torch import Tensor

from .backends.onednn import OneDNN
from .backends.onednn.linear import computes
from .kept import Kept, find_kept
from .tables import Window

__all__ = ["compiler_takes", "gated_ffn", "windowed"]

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


def windowed(
    x: Tensor, tables: list[Tensor], window: Window, bias: Tensor | None, shortcuts: int, padding_mode: str, kept: Kept
) -> Tensor:
    """As `reference.windowed`."""
    return torch.ops.wbmm.windowed(x, tables, list(window), bias, shortcuts, padding_mode, kept.number)


def gated_ffn(x: Tensor, gate: Tensor | None, shortcut: Tensor | None, weights: tuple, kept: Kept) -> Tensor:
    """As `reference.gated_ffn` without norm and scale; the weights are w1, b1, gamma, eps, w2, b2."""
    return torch.ops.wbmm.gated_ffn(x, gate, shortcut, *weights, kept.number)


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

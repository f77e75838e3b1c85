"""Linears on a CPU by oneDNN, with what follows them computed in the same kernel.

PyTorch multiplies float32 matrices on x86 by MKL. oneDNN, which it carries for convolutions, was faster at every shape
of the family that was measured (`wbmm bench paths`), and applies GELU or adds a map while the result is in registers.

These calls are private to PyTorch. The public way to the same kernels, compiling the reference with frozen weights,
takes 1.1 to 2.0 times as long for whole models: `scripts/compare_freezing.py`, figures in docs/design.md.
"""

import platform
from functools import cache
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor

from wbmm.ops.obstacles import obstacle

__all__ = [
    "computes",
    "has_onednn",
    "linear",
    "linear_add",
    "linear_gelu",
    "missing_call",
    "pack_weight",
    "takes_onednn",
]

_X86 = platform.machine() in ("x86_64", "AMD64")
# PyTorch's own, for its compiler; no other release need have them.
CALLS = (
    "_linear_pointwise.default",
    "_linear_pointwise.binary",
    "_reorder_linear_weight",
    "_convolution_pointwise",
    "_reorder_convolution_weight",
)


@cache
def missing_call() -> str | None:
    """The first of the private operators used here that this PyTorch does not have."""
    for name in CALLS:
        try:
            attrgetter(name)(torch.ops.mkldnn)
        except AttributeError:
            return name
    return None


def has_onednn() -> bool:
    """Whether oneDNN is there and switched on: on x86, by `torch.backends.mkldnn`."""
    return _X86 and torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available() and missing_call() is None


@cache
def has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 itself; emulated, it is slower than float32."""
    # Private as well: a PyTorch that does not say counts as a processor without.
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    told = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return asked is not None and told is not None and bool(asked()) and bool(told())


def computes(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes in a type here: float32 on x86, bfloat16 where the processor has instructions for it."""
    return has_onednn() and (dtype is torch.float32 or (dtype is torch.bfloat16 and has_bfloat16()))


def takes_onednn(*tensors: Tensor) -> bool:
    """Whether oneDNN multiplies these: float32 or bfloat16 on an x86 CPU, in eager execution.

    Dispatch modes, such as PyTorch's counter of operations, do not know its operators and see the canonical ones. So
    do autocast, which would compute in bfloat16, transforms of `torch.func` and forward-mode differentiation. A
    backward pass may run under any of them although its forward pass did not.
    """
    return (
        computes(tensors[0].dtype)
        and obstacle(*tensors) is None
        and not torch.is_autocast_enabled("cpu")
        and all(tensor.device.type == "cpu" and tensor.dtype is tensors[0].dtype for tensor in tensors)
    )


def pack_weight(weight: Tensor, rows: int) -> Tensor:
    """A weight `[out, in]` in the order in which oneDNN reads it for about `rows` rows, for the functions below."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    return weight.is_mkldnn or takes_onednn(x, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, without gradients; the weight may be packed, or a transposed view."""
    if _by_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`GELU(x @ weight.T + bias)`, without gradients; the weight may be packed."""
    if _by_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "gelu", [], "none")
    return F.gelu(F.linear(x, weight, bias))


def linear_add(x: Tensor, weight: Tensor, bias: Tensor, other: Tensor) -> Tensor:
    """`x @ weight.T + bias + other`, without gradients; the weight may be packed."""
    if _by_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, bias, "add")
    return F.linear(x, weight, bias).add_(other)

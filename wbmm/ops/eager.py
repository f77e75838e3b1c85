"""Tells plain eager execution from tracing of any kind.

Paths that depend on sizes or on stored results are for eager execution alone: compiling, exporting, tracing and fx must
see one canonical path.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_eager(*tensors: Tensor) -> bool:
    """Whether these are real tensors that nothing is tracing: no compile, export, jit trace, fx proxy, fake, meta."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return all(type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta for tensor in tensors)


def is_transformed() -> bool:
    """Whether `torch.func` or forward-mode differentiation is at work, which need operators that they know."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def differentiates_on_cpu(*tensors: Tensor) -> bool:
    """Whether plain autograd on a CPU, in float32 or float64, will ask for gradients, so that our own apply."""
    first = tensors[0]
    if not torch.is_grad_enabled() or not is_eager(*tensors) or torch.is_autocast_enabled(first.device.type):
        return False
    if is_transformed():
        return False
    return (
        first.device.type == "cpu"
        and first.dtype in (torch.float32, torch.float64)
        and all(tensor.dtype == first.dtype for tensor in tensors)
        and any(tensor.requires_grad for tensor in tensors)
    )

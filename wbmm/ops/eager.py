"""Tells plain eager execution from tracing and transforms of any kind, which must see the reference."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["is_eager", "is_transformed", "obstacle", "unusual", "wants_grad"]

_PLAIN = (Tensor, torch.nn.Parameter)
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)
_transforms = getattr(torch._C, "_are_functorch_transforms_active", None)


def is_eager(x: Tensor) -> bool:
    """Whether this is a real tensor that nothing is tracing: no compile, export, script, jit trace, fx, fake, meta."""
    if torch.jit.is_scripting():
        return False
    else:  # noqa: RET505  what is scripted must stand in the other branch
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return False
        return type(x) in _PLAIN and not x.is_meta


def is_transformed() -> bool:
    """Whether `torch.func` or forward-mode differentiation is at work, which need operators that they know."""
    return (_transforms is not None and _transforms()) or getattr(forward_ad, "_current_level", -1) >= 0


def obstacle(*tensors: Tensor) -> str | None:
    """What keeps every backend but the reference from running, or None; the first tensor is the map."""
    if torch.compiler.is_compiling():  # first: a compiler must not see the rest
        return "torch.compile and torch.export see the reference"
    if torch.jit.is_tracing():
        return "torch.jit.trace sees the reference"
    why = unusual(*tensors)
    if why is not None:
        return why
    if tensors[0].is_meta:
        return "a tensor on the meta device has no values"
    if _dispatch_modes is None or _transforms is None:
        return "this PyTorch does not tell whether it is transforming or recording what runs"
    if _dispatch_modes():
        return "a dispatch mode, such as PyTorch's counter of operations, must see operators that it knows"
    if is_transformed():
        return "torch.func and forward-mode differentiation need operators that they know"
    return None


def unusual(*tensors: Tensor) -> str | None:
    """The first tensor that is none of PyTorch's own two types, in a sentence."""
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return f"a {type(tensor).__name__} is not a plain tensor"
    return None


def wants_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for a gradient of any of these."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)

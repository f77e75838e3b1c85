"""What keeps a backend from a call: tracing, unusual tensors, child modules that somebody changed."""

import torch
import torch.nn as nn
import torch.nn.modules.module as torch_module
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["is_eager", "is_transformed", "obstacle", "reads_as_built", "unusual", "wants_grad"]

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


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = [getattr(torch_module, f"_global{name}", None) for name in _HOOKS]


def reads_as_built(**modules: tuple[object, type[nn.Module]]) -> str | None:
    """None if a backend may read these modules' weights instead of calling them, else the reason, a sentence.

    A module that was wrapped, quantised, parametrised or pruned has another type or a hook.

    Args:
        **modules: by name, each with its type when it was built; what is no module is not looked at.
    """
    for hooks in _GLOBAL_HOOKS:
        if hooks is None:
            return "this PyTorch does not tell whether there are hooks on all modules"
        if hooks:
            return "there is a hook on all modules"
    for name, (module, kind) in modules.items():
        if type(module) is not kind:
            if type(module) is tuple:
                continue
            return f"{name} is a {type(module).__name__}, not the {kind.__name__} that was built"
        own = module.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            return f"{name} has a hook"
        if "forward" in own:
            return f"{name} has another forward than it was built with"
    return None

"""What keeps backends from a call: tracing and transforms, tensors of another type, child modules that were changed.

`is_eager` and `is_transformed` are plain questions. `obstacle`, `unusual_tensor` and `changed_module` give None, or the
reason as a sentence.
"""

import torch
import torch.nn as nn
import torch.nn.modules.module as torch_module
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["NO_VALUES", "changed_module", "is_eager", "is_transformed", "obstacle", "unusual_tensor", "wants_grad"]

# On the meta device nothing is computed, so a backend that was asked for by name does not refuse it.
NO_VALUES = "a tensor on the meta device has no values"

_PLAIN = (Tensor, torch.nn.Parameter)
# Private, so that a PyTorch without them must be expected: then nothing but the reference runs.
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)
_transforms = getattr(torch._C, "_are_functorch_transforms_active", None)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = [getattr(torch_module, f"_global{name}", None) for name in _HOOKS]


def wants_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for a gradient of any of these."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def is_eager(x: Tensor) -> bool:
    """Whether nothing is tracing this tensor: no compile, export, script, jit trace, fx, fake tensors."""
    if torch.jit.is_scripting():
        return False
    else:  # noqa: RET505  what is scripted must stand in the other branch
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return False
        return type(x) in _PLAIN


def is_transformed() -> bool:
    """Whether `torch.func` or forward-mode differentiation is at work, which need operators that they know."""
    return (_transforms is not None and _transforms()) or getattr(forward_ad, "_current_level", -1) >= 0


def obstacle(*tensors: Tensor) -> str | None:
    """What keeps every backend but the reference from running here; the first tensor is the map."""
    if torch.compiler.is_compiling():  # first: a compiler must not see the rest
        return "torch.compile and torch.export see the reference"
    if torch.jit.is_tracing():
        return "torch.jit.trace sees the reference"
    why = unusual_tensor(*tensors)
    if why is not None:
        return why
    if tensors[0].is_meta:
        return NO_VALUES
    if _dispatch_modes is None or _transforms is None:
        return "this PyTorch does not tell whether it is transforming or recording what runs"
    if _dispatch_modes():
        return "a dispatch mode, such as PyTorch's counter of operations, must see operators that it knows"
    if is_transformed():
        return "torch.func and forward-mode differentiation need operators that they know"
    return None


def unusual_tensor(*tensors: Tensor) -> str | None:
    """The first tensor that is of neither of PyTorch's own two types."""
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return f"a {type(tensor).__name__} is not a plain tensor"
    return None


def changed_module(**modules: tuple[object, type[nn.Module]]) -> str | None:
    """The one rule for child modules: a backend may read their weights only if they are exactly what was built.

    A module that was wrapped, quantised, parametrised or pruned has another type or a hook.

    Args:
        **modules: by name, each with the type that it was built with; a tuple of weights is no module, and passes.
    """
    for hooks in _GLOBAL_HOOKS:
        if hooks is None:
            return "this PyTorch does not tell whether there are hooks on all modules"
        if hooks:
            return "there is a hook on all modules"
    for name, (module, kind) in modules.items():
        if type(module) is tuple:
            continue
        if type(module) is not kind:
            return f"{name} is a {type(module).__name__}, not the {kind.__name__} that was built"
        own = module.__dict__
        # Written out: this runs at every call, and a loop over `_HOOKS` is several times slower.
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            return f"{name} has a hook"
        if "forward" in own:
            return f"{name} has another forward than it was built with"
    return None

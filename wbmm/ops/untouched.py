"""The one rule for passing over a child module: only one that is exactly what was built."""

import torch.nn as nn
import torch.nn.modules.module as torch_module

__all__ = ["reads_as_built"]

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

"""WBMM: a vision backbone family on windowed batch matrix multiplication; importing it registers it with timm."""

import sys
from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:  # what `__getattr__` returns, for type checkers and editors
    from . import models
    from .deploy.optimize import optimize
    from .io.files import load_model, load_weights, save_model
    from .layers import HierarchicalWBMM2d, MultiKernelWBMM2d, WBMM2d
    from .models.fuse import fuse
    from .models.replace import replace_depthwise


def _is_the_command() -> bool:
    """Whether this process is `wbmm ...` or `python -m wbmm ...`, not a program that imports the package."""
    started = sys.argv[0] if getattr(sys, "argv", None) else ""
    if started == "-m":  # what Python puts there until it has found the module
        after = sys.orig_argv.index("-m") + 1 if "-m" in sys.orig_argv else len(sys.orig_argv)
        return sys.orig_argv[after : after + 1] == ["wbmm"]
    return PurePath(started).name in ("wbmm", "wbmm.exe")


_NAMES = {
    "HierarchicalWBMM2d": "wbmm.layers",
    "MultiKernelWBMM2d": "wbmm.layers",
    "WBMM2d": "wbmm.layers",
    "fuse": "wbmm.models.fuse",
    "load_model": "wbmm.io.files",
    "load_weights": "wbmm.io.files",
    "optimize": "wbmm.deploy.optimize",
    "replace_depthwise": "wbmm.models.replace",
    "save_model": "wbmm.io.files",
}


def __getattr__(name: str) -> Any:
    """The public names, imported at their first use."""
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


if not _is_the_command():  # whose subcommands import what they need: `wbmm --help` does not wait for torch
    import_module("wbmm.models")  # registers the family with timm

__all__ = [
    "HierarchicalWBMM2d",
    "MultiKernelWBMM2d",
    "WBMM2d",
    "__version__",
    "fuse",
    "load_model",
    "load_weights",
    "models",
    "optimize",
    "replace_depthwise",
    "save_model",
]

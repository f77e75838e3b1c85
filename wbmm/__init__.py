"""WBMM: a vision backbone family on windowed batch matrix multiplication; importing it registers it with timm."""

import sys
from pathlib import PurePath

from .version import __version__


def _is_the_command() -> bool:
    """Whether this process is `wbmm ...` or `python -m wbmm ...`, not a program that imports the package."""
    started = sys.argv[0] if getattr(sys, "argv", None) else ""
    if started == "-m":  # what Python puts there until it has found the module
        after = sys.orig_argv.index("-m") + 1 if "-m" in sys.orig_argv else len(sys.orig_argv)
        return sys.orig_argv[after : after + 1] == ["wbmm"]
    return PurePath(started).name in ("wbmm", "wbmm.exe")


if not _is_the_command():  # whose subcommands import what they need: `wbmm --help` does not wait for torch
    from wbmm.io.files import load_model, save_model
    from wbmm.io.weights import load_weights
    from wbmm.layers import HierarchicalWBMM2d, MultiKernelWBMM2d, WBMM2d
    from wbmm.models.fuse import fuse
    from wbmm.models.replace import replace_depthwise

__all__ = [
    "HierarchicalWBMM2d",
    "MultiKernelWBMM2d",
    "WBMM2d",
    "__version__",
    "fuse",
    "load_model",
    "load_weights",
    "models",
    "replace_depthwise",
    "save_model",
]

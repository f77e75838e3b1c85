"""WBMM: a vision backbone family on windowed batch matrix multiplication; importing it registers it with timm."""

from . import models
from .checkpoint import load_weights
from .deploy.files import load_model, save_model
from .deploy.fuse import fuse
from .layers import HierarchicalWBMM2d, MultiKernelWBMM2d, WBMM2d
from .replace import replace_depthwise
from .version import __version__

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

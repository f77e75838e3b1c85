"""WBMM: a vision backbone family on windowed batch matrix multiplication; importing it registers it with timm."""

from wbmm.io.files import load_model, save_model
from wbmm.io.weights import load_weights
from wbmm.layers import HierarchicalWBMM2d, MultiKernelWBMM2d, WBMM2d
from wbmm.models.fuse import fuse
from wbmm.models.replace import replace_depthwise

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

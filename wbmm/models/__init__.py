"""The family and the baselines, registered with timm on import."""

from .convnext import ConvNeXtWBMM
from .wbmm import WBMM

__all__ = ["WBMM", "ConvNeXtWBMM"]

"""Model families, registered with timm on import."""

from .wbmm import WBMM

__all__ = ["WBMM"]

"""Layers of the family; what has an inference form offers `fuse()`, which returns it."""

from .block import Block, FusedBlock
from .depthwise import DepthwiseConv2d, DilatedReparamConv2d, FusedDepthwiseConv2d
from .ffn import FeedForward, FusedFeedForward, GlobalResponseNorm
from .fused import DenseWBMM2d, FusedHierarchicalWBMM2d, FusedWBMM2d
from .mixers import HierarchicalWBMM2d, MultiKernelWBMM2d, WBMM2d
from .se import SqueezeExcite

__all__ = [
    "Block",
    "DenseWBMM2d",
    "DepthwiseConv2d",
    "DilatedReparamConv2d",
    "FeedForward",
    "FusedBlock",
    "FusedDepthwiseConv2d",
    "FusedFeedForward",
    "FusedHierarchicalWBMM2d",
    "FusedWBMM2d",
    "GlobalResponseNorm",
    "HierarchicalWBMM2d",
    "MultiKernelWBMM2d",
    "SqueezeExcite",
    "WBMM2d",
]

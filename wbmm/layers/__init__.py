"""Layers of the family; what has an inference form offers `fuse()`, which returns it."""

from wbmm.ops import GlobalResponseNorm
from wbmm.ops.modules import PackedConv2d

from .baselines import (
    FullConnection2d,
    FusedFullConnection2d,
    FusedHalfWBMM2d,
    FusedParallelWBMM2d,
    FusedSerialWBMM2d,
    FusedSLaKConv2d,
    FusedWindowAttention2d,
    HalfWBMM2d,
    ParallelWBMM2d,
    SerialWBMM2d,
    SLaKConv2d,
    WindowAttention2d,
)
from .block import Block, FeedForward, FusedBlock, FusedFeedForward, SqueezeExcite
from .depthwise import DepthwiseConv2d, DilatedReparamConv2d, FusedDepthwiseConv2d
from .mixers import DenseWBMM2d, FusedHierarchicalWBMM2d, FusedWBMM2d, HierarchicalWBMM2d, MultiKernelWBMM2d, WBMM2d

__all__ = [
    "Block",
    "DenseWBMM2d",
    "DepthwiseConv2d",
    "DilatedReparamConv2d",
    "FeedForward",
    "FullConnection2d",
    "FusedBlock",
    "FusedDepthwiseConv2d",
    "FusedFeedForward",
    "FusedFullConnection2d",
    "FusedHalfWBMM2d",
    "FusedHierarchicalWBMM2d",
    "FusedParallelWBMM2d",
    "FusedSLaKConv2d",
    "FusedSerialWBMM2d",
    "FusedWBMM2d",
    "FusedWindowAttention2d",
    "GlobalResponseNorm",
    "HalfWBMM2d",
    "HierarchicalWBMM2d",
    "MultiKernelWBMM2d",
    "PackedConv2d",
    "ParallelWBMM2d",
    "SLaKConv2d",
    "SerialWBMM2d",
    "SqueezeExcite",
    "WBMM2d",
    "WindowAttention2d",
]

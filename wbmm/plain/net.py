"""The whole net in the straightforward layout."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from wbmm.layers import Block
from wbmm.models import WBMM

from .block import PlainBlock, PlainFusedBlock
from .mixers import plain_conv

__all__ = ["PlainNet", "to_plain"]


class PlainLayerNorm(nn.Module):
    """LayerNorm over the channels of an NCHW map, from elementary operations."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.eps = norm.eps
        self.weight, self.bias = copy.deepcopy(norm.weight), copy.deepcopy(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class PlainStem(nn.Module):
    def __init__(self, stem: nn.Module) -> None:
        super().__init__()
        self.conv1, self.norm1 = plain_conv(stem.conv1), PlainLayerNorm(stem.norm1)
        self.conv2, self.norm2 = plain_conv(stem.conv2), PlainLayerNorm(stem.norm2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm2(self.conv2(F.gelu(self.norm1(self.conv1(x)))))


class PlainDownsample(nn.Module):
    def __init__(self, downsample: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = plain_conv(downsample.conv), PlainLayerNorm(downsample.norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class PlainStage(nn.Module):
    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        first = isinstance(stage.downsample, nn.Identity)
        self.downsample = nn.Identity() if first else PlainDownsample(stage.downsample)
        self.blocks = nn.Sequential(
            *(PlainBlock(block) if isinstance(block, Block) else PlainFusedBlock(block) for block in stage.blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.downsample(x))


class PlainNet(nn.Module):
    """The family in NCHW memory; it takes images in any memory format."""

    def __init__(self, model: WBMM) -> None:
        super().__init__()
        self.feature_info = copy.deepcopy(model.feature_info)
        self.stem = PlainStem(model.stem)
        self.stages = nn.Sequential(*(PlainStage(stage) for stage in model.stages))
        self.head = copy.deepcopy(model.head)

    def forward_features(self, x: Tensor) -> Tensor:
        return self.stages(self.stem(x.contiguous()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x))


def to_plain(model: WBMM) -> PlainNet:
    """A copy of a model in the straightforward layout, with the same weights, in the same mode.

    Parameters and statistics keep their names. Those of squeeze and excitation become 1x1 convolutions, and tables of a
    fused model become matrices. Activation checkpointing is not taken over.

    Args:
        model: of the WBMM family, with WBMM or a depthwise convolution (UniRepLKNet's among them) in its W blocks; in
            training form, or fused in either form.
    """
    if not isinstance(model, WBMM):
        raise ValueError(f"the straightforward layout is of the WBMM family alone; this is a {type(model).__name__}")
    return PlainNet(model).to(memory_format=torch.contiguous_format).train(model.training)

"""The block in the straightforward layout, in training form and fused. Names of parameters are those of the family."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from wbmm.layers import Block, FeedForward, FusedBlock, FusedFeedForward, SqueezeExcite

from .mixers import plain_mixer

__all__ = ["PlainBlock", "PlainFusedBlock"]


class PlainSqueezeExcite(nn.Module):
    """Two 1x1 convolutions on the pooled map."""

    def __init__(self, se: SqueezeExcite) -> None:
        super().__init__()
        self.fc1, self.fc2 = _pointwise(se.fc1), _pointwise(se.fc2)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.fc2(F.relu(self.fc1(F.adaptive_avg_pool2d(x, 1))))
        return x * torch.sigmoid(gate)


def _pointwise(linear: nn.Linear) -> nn.Conv2d:
    weight, bias = linear.weight, linear.bias
    conv = nn.Conv2d(linear.in_features, linear.out_features, 1, device=weight.device, dtype=weight.dtype)
    conv.load_state_dict({"weight": weight[:, :, None, None], "bias": bias})
    return conv


def response_norm(x: Tensor, eps: float) -> Tensor:
    """The norm of each channel over the map `[B, H, W, C]`, relative to their mean."""
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    return norm / (norm.mean(dim=-1, keepdim=True) + eps)


class PlainResponseNorm(nn.Module):
    def __init__(self, grn: nn.Module) -> None:
        super().__init__()
        self.eps = grn.eps
        self.gamma, self.beta = copy.deepcopy(grn.gamma), copy.deepcopy(grn.beta)

    def forward(self, x: Tensor) -> Tensor:
        return (self.gamma * response_norm(x, self.eps) + 1) * x + self.beta


class PlainFeedForward(nn.Module):
    """Linears on NHWC, batch norm on NCHW, a permute between them."""

    def __init__(self, ffn: FeedForward) -> None:
        super().__init__()
        self.fc1, self.fc2, self.norm = (copy.deepcopy(part) for part in (ffn.fc1, ffn.fc2, ffn.norm))
        self.grn = PlainResponseNorm(ffn.grn)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc2(self.grn(F.gelu(self.fc1(x.permute(0, 2, 3, 1)))))
        return self.norm(x.permute(0, 3, 1, 2))


class PlainFusedFeedForward(nn.Module):
    """As above, with the batch norm and GRN's beta in the second linear."""

    def __init__(self, ffn: FusedFeedForward) -> None:
        super().__init__()
        self.eps = ffn.eps
        self.fc1, self.gamma, self.fc2 = (copy.deepcopy(part) for part in (ffn.fc1, ffn.gamma, ffn.fc2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.fc1(x.permute(0, 2, 3, 1)))
        x = self.fc2((self.gamma * response_norm(x, self.eps) + 1) * x)
        return x.permute(0, 3, 1, 2)


class PlainBlock(nn.Module):
    """mixer, BN, SE, feed-forward, layer scale, drop path, add."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.mixer = plain_mixer(block.mixer)
        self.norm = copy.deepcopy(block.norm)
        self.se = nn.Identity() if block.se is None else PlainSqueezeExcite(block.se)
        self.ffn = PlainFeedForward(block.ffn)
        self.gamma = copy.deepcopy(block.gamma)
        self.drop_path = copy.deepcopy(block.drop_path)

    def forward(self, x: Tensor) -> Tensor:
        out = self.ffn(self.se(self.norm(self.mixer(x))))
        if self.gamma is not None:
            out = out * self.gamma[:, None, None]
        return x + self.drop_path(out)


class PlainFusedBlock(nn.Module):
    """mixer with bias, SE, feed-forward, add."""

    def __init__(self, block: FusedBlock) -> None:
        super().__init__()
        self.mixer = plain_mixer(block.mixer)
        self.se = nn.Identity() if block.se is None else PlainSqueezeExcite(block.se)
        self.ffn = PlainFusedFeedForward(block.ffn)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.se(self.mixer(x)))

"""The block: mixer, batch norm, squeeze and excitation, feed-forward part; and its fused form."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .ffn import FeedForward, FusedFeedForward

__all__ = ["Block", "FusedBlock", "SqueezeExcite"]


class SqueezeExcite(nn.Module):
    """A gate per sample and channel from the mean over the map: `[B, C, H, W]` to `[B, C]`.

    What follows multiplies with it, where that is cheapest.

    Args:
        dim: channels.
        ratio: the hidden width is `dim // ratio`.
    """

    def __init__(self, dim: int, ratio: int = 4, device=None, dtype=None) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, dim // ratio, device=device, dtype=dtype)
        self.fc2 = nn.Linear(dim // ratio, dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.fc2(F.relu(self.fc1(x.mean((2, 3))))))


class Block(nn.Module):
    """mixer, BN, SE, feed-forward, layer scale, drop path, add.

    Shape: `[B, C, H, W]` to the same; channels-last memory is the fast one.

    Args:
        mixer: the spatial mixer, with a `fuse(norm)`.
        dim: channels.
        ffn_ratio: width of the hidden layer over `dim`.
        se: squeeze and excitation after the mixer.
        ls_init_value: initial layer scale; None for no layer scale.
        drop_path: probability of skipping the block for a sample in training.
    """

    __jit_unused_properties__ = ("drop_path",)

    def __init__(
        self,
        mixer: nn.Module,
        dim: int,
        ffn_ratio: float = 4,
        se: bool = True,
        ls_init_value: float | None = 1e-6,
        drop_path: float = 0.0,
        device=None,
        dtype=None,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.mixer = mixer
        self.norm = nn.BatchNorm2d(dim, **dd)
        self.se = SqueezeExcite(dim, **dd) if se else None
        self.ffn = FeedForward(dim, ffn_ratio, drop_path, **dd)
        self.gamma = None if ls_init_value is None else nn.Parameter(torch.full((dim,), ls_init_value, **dd))

    @property
    def drop_path(self) -> nn.Module:
        """Of the feed-forward part, which computes it together with the addition."""
        return self.ffn.drop_path

    def __setattr__(self, name: str, value: object) -> None:
        if name == "drop_path":  # a module would be registered here, and never called
            self.ffn.drop_path = value
        else:
            super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.mixer(x))
        gate = None if self.se is None else self.se(out)
        # A copy: PyTorch's counter of operations fails in inference mode where a module is given a parameter.
        scale = None if self.gamma is None else self.gamma.clone()
        return self.ffn(out, gate, scale, x)

    def fuse(self) -> "FusedBlock":
        """The inference form: mixer and BN in one, GRN's beta, fc2, BN and layer scale in one."""
        fused = FusedBlock(self.mixer.fuse(self.norm), copy.deepcopy(self.se), self.ffn.fuse(self.gamma))
        return fused.train(self.training)


class FusedBlock(nn.Module):
    """mixer with bias, SE (if there is one), feed-forward, add."""

    def __init__(self, mixer: nn.Module, se: SqueezeExcite | None, ffn: FusedFeedForward) -> None:
        super().__init__()
        self.mixer = mixer
        self.se = se
        self.ffn = ffn

    def forward(self, x: Tensor) -> Tensor:
        out = self.mixer(x)
        # Gates are cheap where the feed-forward part applies them, so that it needs no second path without them.
        gate = out.new_ones(out.shape[:2]) if self.se is None else self.se(out)
        return self.ffn(out, gate, x)

"""Squeeze and excitation."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


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

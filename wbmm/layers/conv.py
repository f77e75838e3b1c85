"""The dense convolution of stem and downsampling layers."""

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.ops.linear import takes_onednn

from .packed import PackedWeights

__all__ = ["StridedConv2d"]


class StridedConv2d(PackedWeights, nn.Conv2d):
    """A convolution that, in inference on a CPU, keeps its weight in oneDNN's own order.

    PyTorch would put it into that order at every call, which for the last downsampling layer takes longer than the
    convolution of one image.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not takes_onednn(x, self.weight):
            return super().forward(x)
        geometry = self.padding, self.stride, self.dilation, self.groups
        (weight,) = self.packed(
            (self.weight,), lambda: (torch.ops.mkldnn._reorder_convolution_weight(self.weight, *geometry, x.shape),)
        )
        return torch.ops.mkldnn._convolution_pointwise(x, weight, self.bias, *geometry, "none", [], "")

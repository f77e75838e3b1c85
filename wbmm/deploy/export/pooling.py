"""Adaptive pooling of maps whose size is not a constant."""

import torch
import torch.nn as nn
from torch import Tensor

__all__ = ["ExactAdaptivePool", "replace_pooling"]


class ExactAdaptivePool(nn.Module):
    """`nn.AdaptiveAvgPool2d` for maps of any size, as two small matrix products.

    Its bins depend on the size of the map, which exporters want to be a constant. Here they are rows of a matrix that
    the graph builds from the size.
    """

    def __init__(self, output_size: tuple[int, int]) -> None:
        super().__init__()
        self.output_size = output_size

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (self._bins(side, bins, x) for side, bins in zip(x.shape[-2:], self.output_size, strict=True))
        return rows @ x @ columns.transpose(0, 1)

    @staticmethod
    def _bins(side: int, bins: int, like: Tensor) -> Tensor:
        """`[bins, side]`: bin i averages positions floor(i*side/bins) to ceil((i+1)*side/bins), the end excluded."""
        i = torch.arange(bins, device=like.device)[:, None]
        start = torch.div(i * side, bins, rounding_mode="floor")
        end = torch.div((i + 1) * side + bins - 1, bins, rounding_mode="floor")
        position = torch.arange(side, device=like.device)[None]
        inside = torch.logical_and(position >= start, position < end)
        return inside.to(like.dtype) / (end - start).to(like.dtype)


def replace_pooling(module: nn.Module) -> nn.Module:
    """Gives adaptive average pooling to more than one bin its exact form, in place."""
    for name, child in module.named_children():
        if isinstance(child, nn.AdaptiveAvgPool2d) and child.output_size not in (1, (1, 1)):
            size = child.output_size
            setattr(module, name, ExactAdaptivePool((size, size) if isinstance(size, int) else tuple(size)))
        else:
            replace_pooling(child)
    return module

"""What layers share that keep a packed copy of their weights in inference."""

from collections.abc import Callable

import torch.nn as nn
from torch import Tensor

from wbmm.ops.cache import WeightCache

__all__ = ["PackedWeights"]


class PackedWeights(nn.Module):
    """A module with a copy of its weights in another order, made once; dropped when they may have changed."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._packed = WeightCache()

    def packed(self, weights: tuple[Tensor, ...], build: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """`build()`, or what it gave before while the weights are the same."""
        return self._packed.get(weights, build)

    def train(self, mode: bool = True) -> "PackedWeights":
        self._packed.clear()
        return super().train(mode)

    def _apply(self, fn, recurse=True):
        self._packed.clear()
        return super()._apply(fn, recurse)

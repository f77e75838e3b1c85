"""What every windowed layer shares: its window, the index as a constant, and the matrix that is kept in inference."""

import torch.nn as nn
from torch import Tensor

from wbmm.ops import PADDING_MODES, MatrixCache, relative_index, windowed_product
from wbmm.ops.eager import differentiates_on_cpu
from wbmm.ops.product_training import product_training


class WindowLayer(nn.Module):
    """A layer whose matrix is expanded from tables. Subclasses give `tables()` and `build_matrix()`."""

    def __init__(self, dim: int, window: tuple[int, int], padding_mode: str = "zeros", device=None) -> None:
        super().__init__()
        if padding_mode not in PADDING_MODES:
            raise ValueError(f"padding_mode {padding_mode!r}: expected one of {', '.join(PADDING_MODES)}")
        self.dim = dim
        self.window = window
        self.padding_mode = padding_mode
        self.register_buffer("index", relative_index(window, device), persistent=False)
        self._cache = MatrixCache()

    def tables(self) -> tuple[Tensor, ...]:
        """The tensors that the matrix is built from."""
        raise NotImplementedError

    def build_matrix(self) -> Tensor:
        """`[C, d, d]` from the tables."""
        raise NotImplementedError

    def matrix(self) -> Tensor:
        """`[C, d, d]`: built anew in training, kept in inference."""
        if self.training:
            return self.build_matrix()
        return self._cache.get(self.tables(), self.build_matrix)

    def product(self, x: Tensor, **kwargs) -> Tensor:
        """`windowed_product` with this layer's matrix."""
        return windowed_product(x, self.matrix(), self.window, padding_mode=self.padding_mode, **kwargs)

    def trained_product(self, x: Tensor, shortcuts: int) -> Tensor:
        """The same for a layer of one table, or of two scales, that may be in training."""
        if differentiates_on_cpu(x, *self.tables()):
            return product_training(x, self.tables(), self.window, shortcuts, self.padding_mode)
        return self.product(x, shortcuts=shortcuts)

    def train(self, mode: bool = True) -> "WindowLayer":
        self._forget()
        return super().train(mode)

    def _apply(self, fn, recurse=True):
        self._forget()
        return super()._apply(fn, recurse)

    def _forget(self) -> None:
        self._cache.clear()

    def extra_repr(self) -> str:
        return f"{self.dim}, window={self.window[0]}x{self.window[1]}, padding_mode={self.padding_mode}"

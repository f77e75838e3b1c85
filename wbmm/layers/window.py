"""What every windowed layer shares: its window, and the matrix that its tables expand to."""

from torch import Tensor

from wbmm.ops import expand
from wbmm.ops.modules import Windowed


class WindowLayer(Windowed):
    """A layer whose matrix is expanded from tables. Subclasses give `tables()`, what `windowed` takes."""

    def __init__(
        self, dim: int, window: tuple[int, int], padding_mode: str = "zeros", tables: int = 1, device=None
    ) -> None:
        super().__init__(window, padding_mode, tables, device)
        self.dim = dim

    def build_matrix(self) -> Tensor:
        """`[C, d, d]` from the tables."""
        return expand(self.tables(), self.window, self.indices())

    def extra_repr(self) -> str:
        return f"{self.dim}, window={self.window[0]}x{self.window[1]}, padding_mode={self.padding_mode}"

"""A matrix built once in inference and never stale."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from .eager import is_eager

Built = TypeVar("Built")


def _key(table: Tensor) -> tuple:
    version = None if table.is_inference() else table._version
    return version, table.data_ptr(), table.dtype, table.device, tuple(table.shape)


class MatrixCache:
    """Holds the matrix of one layer, keyed on the tables it was built from.

    The key is each table's version counter, storage, dtype and device. A write through `.data` (as some EMA hooks do)
    leaves the counter alone, so on a CPU, where it costs microseconds, the tables' contents are compared as well. On a
    GPU that would wait for the device at every layer; there, switching between `train()` and `eval()` drops the matrix.

    With gradients on, or while compiling, exporting or tracing, the matrix is built anew. A copy or a pickle of the
    cache is empty.
    """

    def __init__(self) -> None:
        self._entry: tuple[tuple, tuple[Tensor, ...], object] | None = None

    @staticmethod
    def compared(table: Tensor) -> Tensor:
        """What of a table's content is compared on a CPU."""
        return table

    def get(self, tables: tuple[Tensor, ...], build: Callable[[], Built]) -> Built:
        """The matrix of `tables`: the one kept if they are unchanged, else `build()`."""
        if torch.is_grad_enabled() or not is_eager(*tables):
            return build()
        key = tuple(_key(table) for table in tables)
        entry = self._entry  # read once: replicas of nn.DataParallel share this object between threads
        if entry is not None and entry[0] == key and all(map(self._same_content, entry[1], tables)):
            return entry[2]
        matrix = build()
        # Holding the tables themselves on a GPU keeps their storage from being reused at the same address.
        kept = tuple(
            self.compared(table.detach()).clone() if table.device.type == "cpu" else table.detach() for table in tables
        )
        self._entry = (key, kept, matrix)
        return matrix

    def _same_content(self, kept: Tensor, table: Tensor) -> bool:
        return table.device.type != "cpu" or torch.equal(kept, self.compared(table))

    def clear(self) -> None:
        self._entry = None

    def __deepcopy__(self, memo: dict) -> "MatrixCache":
        return type(self)()

    def __reduce__(self) -> tuple:
        return type(self), ()


class WeightCache(MatrixCache):
    """The same for the large weights of linears, of which some entries are compared.

    A write through `.data` that changes a weight as a whole is seen at once, one to a few of its entries after the next
    `train()` or `eval()`.
    """

    @staticmethod
    def compared(table: Tensor) -> Tensor:
        step = table.numel() // 64 + 1
        if table.is_contiguous() or (table.ndim == 4 and table.is_contiguous(memory_format=torch.channels_last)):
            return table.as_strided(((table.numel() - 1) // step + 1,), (step,))  # as they lie in memory: no copy
        return table.reshape(-1)[::step]

"""A matrix built once in inference and never stale."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from .eager import is_eager

Built = TypeVar("Built")
SAMPLES = 64


def _key(table: Tensor) -> tuple:
    version = None if table.is_inference() else table._version
    return version, table.data_ptr(), table.dtype, table.device, tuple(table.shape), table.stride()


class MatrixCache:
    """Holds the matrix of one layer, keyed on the tables it was built from.

    The key is each table's version counter, storage, strides, dtype and device. A write through `.data` (as some EMA
    hooks do) leaves the counter alone, so on a CPU, where it costs microseconds, the tables' contents are compared as
    well. On a GPU that would wait for the device at every layer; there, switching between `train()` and `eval()` drops
    the matrix.

    With gradients on, or while compiling, exporting or tracing, the matrix is built anew. A copy or a pickle of the
    cache is empty.
    """

    def __init__(self) -> None:
        self._entry: tuple[tuple, list[Tensor], list[Callable[[], bool]], object] | None = None

    @staticmethod
    def guard(table: Tensor) -> Callable[[], bool]:
        """A function that tells whether a table on a CPU has the content that it has now."""
        kept = table.clone()
        return lambda: torch.equal(kept, table)

    def get(self, tables: tuple[Tensor, ...], build: Callable[[], Built]) -> Built:
        """The matrix of `tables`: the one kept if they are unchanged, else `build()`."""
        if torch.is_grad_enabled() or not is_eager(*tables):
            return build()
        key = tuple(_key(table) for table in tables)
        entry = self._entry  # read once: replicas of nn.DataParallel share this object between threads
        if entry is not None and entry[0] == key and all(same() for same in entry[2]):
            return entry[3]
        matrix = build()
        held = [table.detach() for table in tables]  # or another tensor could come to lie at the same address
        self._entry = (key, held, [self.guard(table) for table in held if table.device.type == "cpu"], matrix)
        return matrix

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
    def guard(table: Tensor) -> Callable[[], bool]:
        in_memory = table.permute(sorted(range(table.ndim), key=table.stride, reverse=True))
        if not in_memory.is_contiguous():  # no view can sample it
            return MatrixCache.guard(table)
        entries = in_memory.view(-1)[:: table.numel() // SAMPLES + 1]
        kept = entries.clone()
        return lambda: torch.equal(kept, entries)

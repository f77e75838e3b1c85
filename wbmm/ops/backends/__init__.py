"""Backends: other ways to compute what `wbmm.ops.reference` defines. `README.md` of `wbmm.ops` says how to add one."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Backend", "Call"]


@dataclass(slots=True)
class Call:
    """What is to be computed, for backends to tell whether they can.

    Attributes:
        operator: `windowed`, `gated_ffn` or `conv2d`.
        x: the map.
        weights: all other tensors; of `windowed`, the tables first.
        grad: whether autograd will ask for gradients.
        window: of `windowed`.
        tables: how many of the weights are tables.
    """

    operator: str
    x: Tensor
    weights: tuple[Tensor, ...]
    grad: bool
    window: tuple[int, int] | None = None
    tables: int = 0

    def matrix_bytes(self) -> int:
        """What the matrix of a windowed operator takes."""
        area = self.window[0] * self.window[1]
        return self.x.shape[1] * area * area * self.x.element_size()


class Backend:
    """A backend has a method for each of its operators, with the arguments of that in `dispatch.py` after the call."""

    name: str
    operators: frozenset[str]

    def can_run(self, call: Call) -> str | None:
        """None, or a sentence that says why this backend cannot run the call."""
        raise NotImplementedError

    def better_elsewhere(self, call: Call) -> str | None:
        """None, or a sentence that says why another backend is the better choice where this one is not asked for."""
        return None

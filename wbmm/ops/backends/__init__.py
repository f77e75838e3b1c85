"""Backends: other ways to compute what `wbmm.ops.reference` defines. `README.md` of `wbmm.ops` says how to add one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.ops.kept import Kept
from wbmm.ops.tables import Window

__all__ = ["LARGE_MATRIX", "Backend", "Call", "gradients_with_graph"]

LARGE_MATRIX = 2**28  # bytes; larger ones are never built whole. The largest of the family is 79 MB


@dataclass(slots=True)
class Call:
    """What is to be computed, for backends to tell whether they can.

    Attributes:
        operator: `windowed`, `gated_ffn`, `squeeze_excite` or `conv2d`.
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
    window: Window = (0, 0)
    tables: int = 0

    def matrix_bytes(self) -> int:
        """What the matrix of a windowed operator takes."""
        area = self.window[0] * self.window[1]
        return self.x.shape[1] * area * area * self.x.element_size()


class Backend:
    """Says whether it can run a call, and has a method for each of its operators.

    Those get what the functions of the same name in `dispatch.py` got, and two arguments more: whether autograd will
    ask for gradients, and where to keep what is made of the weights in inference (None: nowhere).
    """

    name: str
    operators: frozenset[str]

    def can_run(self, call: Call) -> str | None:
        """None, or a sentence that says why this backend cannot run the call."""
        raise NotImplementedError

    def better_elsewhere(self, call: Call) -> str | None:
        """None, or a sentence that says why another backend is the better choice where this one is not asked for."""
        return None

    def windowed(
        self,
        x: Tensor,
        tables: list[Tensor],
        window: Window,
        bias: Tensor | None,
        shortcuts: int,
        padding_mode: str,
        grad: bool,
        kept: Kept | None,
    ) -> Tensor:
        raise NotImplementedError

    def gated_ffn(
        self,
        x: Tensor,
        fc1: nn.Linear,
        grn: tuple[Tensor, Tensor | None, float],
        fc2: nn.Linear,
        gate: Tensor | None,
        norm: nn.Module | None,
        scale: Tensor | None,
        shortcut: Tensor | None,
        drop_path: nn.Module | None,
        grad: bool,
        kept: Kept | None,
    ) -> Tensor:
        """`grn` is its gamma, its beta, which may be missing, and its eps."""
        raise NotImplementedError

    def squeeze_excite(self, x: Tensor, fc1: nn.Linear, fc2: nn.Linear, grad: bool, kept: Kept | None) -> Tensor:
        raise NotImplementedError

    def conv2d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        grad: bool,
        kept: Kept | None,
    ) -> Tensor:
        raise NotImplementedError


def gradients_with_graph(
    out: Tensor, inputs: Sequence[Tensor | None], wanted: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """What autograd makes of `out`, to be differentiated again; None for an input whose gradient nobody wants."""
    asked = [tensor for tensor, wants in zip(inputs, wanted, strict=True) if wants]
    found = iter(torch.autograd.grad(out, asked, grad, create_graph=True) if asked else ())
    return [next(found) if wants else None for wants in wanted]

"""Compares what two forms of a model compute."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Comparison", "ExportError", "compare", "demand"]

Call = Callable[[Tensor], Tensor | Sequence[Tensor]]


class ExportError(ValueError):
    """A file does not compute what the model does; it was deleted."""


@dataclass(frozen=True)
class Comparison:
    """The outputs of two forms on one input.

    Attributes:
        what: which forms.
        images: what the input was, in words.
        shape: of the input.
        largest: absolute output value.
        difference: largest absolute one.
    """

    what: str
    images: str
    shape: tuple[int, ...]
    largest: float
    difference: float

    def within(self, tolerance: float) -> bool:
        """Relative to the largest value, where that is above 1. NaN is never within."""
        return self.difference <= tolerance * max(1.0, self.largest)

    def row(self) -> list[str]:
        return [
            self.what,
            "x".join(map(str, self.shape)),
            self.images,
            f"{self.largest:.3g}",
            f"{self.difference:.1e}",
        ]


def compare(what: str, images: str, x: Tensor, reference: Call, candidate: Call) -> Comparison:
    """Both forms on the same images."""
    with torch.inference_mode():
        expected, got = _as_list(reference(x)), _as_list(candidate(x))
    if [t.shape for t in expected] != [t.shape for t in got]:
        shapes = [[tuple(t.shape) for t in tensors] for tensors in (expected, got)]
        raise ExportError(f"{what}: outputs of shape {shapes[1]} instead of {shapes[0]} at {tuple(x.shape)}")
    largest = max(t.abs().max().item() for t in expected)
    # max() of floats would lose a NaN that does not come first.
    difference = torch.stack([(a.double() - b.double()).abs().max() for a, b in zip(expected, got, strict=True)])
    return Comparison(what, images, tuple(x.shape), largest, difference.max().item())


def demand(comparisons: Sequence[Comparison], tolerance: float) -> None:
    """Raises with the worst of them if any is beyond the tolerance."""
    bad = [c for c in comparisons if not c.within(tolerance)]
    if bad:
        worst = max(bad, key=lambda c: (c.difference != c.difference, c.difference))
        raise ExportError(
            f"{worst.what} differ by {worst.difference:.1e} at {'x'.join(map(str, worst.shape))} ({worst.images}; the "
            f"largest value is {worst.largest:.3g}), more than {tolerance:g} allows: nothing was written"
        )


def _as_list(outputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)

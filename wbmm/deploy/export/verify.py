"""The check of an exported file: the shapes it is tried at, the images, and the comparison of outputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wbmm.io.card import ModelCard

__all__ = ["MIN_SIDE", "Comparison", "ExportError", "Shapes", "check_tolerance", "compare_outputs", "sample"]

MIN_SIDE = 33  # the last map of a smaller image is one pixel, which torch.export takes for a constant
MAX_SIDE = 8192
OTHER_SIZES = ((224, 224), (256, 320), (250, 333))

Compute = Callable[[Tensor], Tensor | Sequence[Tensor]]


class ExportError(ValueError):
    """A file does not compute what the model does; it was deleted."""


@dataclass(frozen=True)
class Shapes:
    """The input of an exported file.

    Attributes:
        channels: of an image.
        size: (height, width) that the file is made for.
        batch: its batch size, where that is fixed.
        dynamic_batch, dynamic_size: whether the file takes any.
        smallest: the shortest side of an image where the size is dynamic.
    """

    channels: int
    size: tuple[int, int]
    batch: int = 1
    dynamic_batch: bool = False
    dynamic_size: bool = False
    smallest: int = MIN_SIDE

    def __post_init__(self) -> None:
        if min(self.size) < 1 or self.batch < 1:
            raise ValueError(f"size {self.size}, batch {self.batch}: each must be at least 1")
        if self.dynamic_size and min(self.size) < self.smallest:
            raise ValueError(
                f"a dynamic size starts at {self.smallest} px; {self.size[0]}x{self.size[1]} is smaller: "
                "give a larger --size H W, or leave --dynamic-size out"
            )

    @property
    def example(self) -> tuple[int, int, int, int]:
        """The shape to trace with. Where the batch size is dynamic it is 2: a tracer takes 1 for a constant."""
        size = (max(self.size[0], 64), max(self.size[1], 64) + 32) if self.dynamic_size else self.size
        return (2 if self.dynamic_batch else self.batch, self.channels, *size)

    def dims(self) -> dict[int, object] | None:
        """The dynamic dimensions as `torch.export` wants them."""
        free = {}
        if self.dynamic_batch:
            free[0] = torch.export.Dim("batch", min=1)
        if self.dynamic_size:
            free[2] = torch.export.Dim("height", min=self.smallest, max=MAX_SIDE)
            free[3] = torch.export.Dim("width", min=self.smallest, max=MAX_SIDE)
        return free or None

    def trials(self) -> list[tuple[int, int, int, int]]:
        """Shapes to compare at: several batch sizes and image sizes where they are dynamic."""
        batches = (1, 3) if self.dynamic_batch else (self.batch,)
        shapes = [(batch, self.channels, *self.size) for batch in batches]
        if self.dynamic_size:
            small = (self.smallest, self.smallest + 1)
            others = [size for size in (*OTHER_SIZES, small) if size != self.size and min(size) >= self.smallest]
            shapes += [(batches[i % len(batches)], self.channels, *size) for i, size in enumerate(others)]
        return shapes

    def describe(self) -> str:
        batch = "any" if self.dynamic_batch else str(self.batch)
        size = f"any from {self.smallest} px" if self.dynamic_size else "x".join(map(str, self.size))
        return f"batch {batch}, size {size}"


def sample(shape: tuple[int, int, int, int], card: ModelCard, seed: int = 0) -> dict[str, Tensor]:
    """Images to compare on, as a file with this card takes them: noise, and something smooth like a photograph."""
    generator = torch.Generator().manual_seed(seed)
    batch, channels, height, width = shape
    coarse = torch.rand(batch, channels, 5, 5, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)
    images = {"noise": torch.rand(shape, generator=generator), "smooth": smooth}
    if card.input == "uint8":
        return {name: (255 * image).round().byte() for name, image in images.items()}
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (card.mean, card.std))
    return {name: (image - mean) / std for name, image in images.items()}


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


def compare_outputs(what: str, images: str, x: Tensor, reference: Compute, candidate: Compute) -> Comparison:
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


def check_tolerance(comparisons: Sequence[Comparison], tolerance: float) -> None:
    """Raises with the worst comparison if any is beyond the tolerance."""
    bad = [c for c in comparisons if not c.within(tolerance)]
    if bad:
        worst = max(bad, key=lambda c: (c.difference != c.difference, c.difference))
        raise ExportError(
            f"{worst.what} differ by {worst.difference:.1e} at {'x'.join(map(str, worst.shape))} ({worst.images}; the "
            f"largest value is {worst.largest:.3g}), more than {tolerance:g} allows: nothing was written"
        )


def _as_list(outputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)

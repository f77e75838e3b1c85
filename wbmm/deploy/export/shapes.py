"""Which sides of the input are free, and the shapes at which a file is tried."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wbmm.deploy.card import ModelCard

__all__ = ["MIN_SIDE", "Shapes", "sample"]

MIN_SIDE = 33  # the last map of a smaller image is one pixel, which torch.export takes for a constant
MAX_SIDE = 8192
OTHER_SIZES = ((224, 224), (256, 320), (250, 333))


@dataclass(frozen=True)
class Shapes:
    """The input of an exported file.

    Attributes:
        channels: of an image.
        size: (height, width) that the file is made for.
        batch: its batch size, where that is fixed.
        dynamic_batch, dynamic_size: what is free.
        smallest: the shortest side that a free size may have.
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
                f"a free size starts at {self.smallest} px; {self.size[0]}x{self.size[1]} is smaller: "
                "give a larger --size H W, or leave --dynamic-size out"
            )

    @property
    def example(self) -> tuple[int, int, int, int]:
        """The shape to trace with: of a free batch size not 1, which a tracer takes for a constant."""
        size = (max(self.size[0], 64), max(self.size[1], 64) + 32) if self.dynamic_size else self.size
        return (2 if self.dynamic_batch else self.batch, self.channels, *size)

    def dims(self) -> dict[int, object] | None:
        """The free sides as `torch.export` wants them."""
        free = {}
        if self.dynamic_batch:
            free[0] = torch.export.Dim("batch", min=1)
        if self.dynamic_size:
            free[2] = torch.export.Dim("height", min=self.smallest, max=MAX_SIDE)
            free[3] = torch.export.Dim("width", min=self.smallest, max=MAX_SIDE)
        return free or None

    def trials(self) -> list[tuple[int, int, int, int]]:
        """Shapes to compare at: other batch sizes and other sizes where they are free."""
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

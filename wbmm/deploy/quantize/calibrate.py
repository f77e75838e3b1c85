"""Images to calibrate on, and others to decide on."""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wbmm.data.images import batches, find_images, open_labelled
from wbmm.data.sources import FileSource, Source, Subset
from wbmm.io.card import ModelCard
from wbmm.progress import progress_bar

__all__ = ["Calibration", "read_calibration"]


@dataclass
class Calibration:
    """Images as the model takes them.

    Attributes:
        images: `[n, C, H, W]`, for the ranges of activations.
        others: `[m, C, H, W]`, to choose layers on; the same ones where there are no others.
        apart: whether they are others.
        what: the others in words.
    """

    images: Tensor
    others: Tensor
    apart: bool
    what: str = ""

    def __post_init__(self) -> None:
        self.what = self.what or ("images that were not calibrated on" if self.apart else "the images calibrated on")

    def describe(self) -> str:
        return f"calibrated on {len(self.images)} images; layers chosen on {len(self.others)}, {self.what}"


def read_calibration(card: ModelCard, root: Path | None, source: str, split: str, count: int) -> Calibration:
    """Up to `count` images to calibrate on and as many others, spread evenly over what there is.

    Labels do not matter: a folder may hold images in any arrangement. If it has a folder `train`, that is taken, since
    what a model is evaluated on should not calibrate it. A bad image is named and left out.
    """
    if count < 1:
        raise ValueError(f"--n {count}: give 1 or more images")
    found = _open(card, root, source, split)
    if len(found) < count:
        print(f"note: {len(found)} images to calibrate on, not {count} (--n): that is all there is", file=sys.stderr)
    images = _read(card, Subset(found, _spread(len(found), 2 * count)))
    first = _spread(len(images), count)
    rest = np.setdiff1d(np.arange(len(images)), first)
    if len(rest) < count / 2:  # too few to decide anything on
        return Calibration(images[first], images[first], False)
    return Calibration(images[first], images[rest], True)


def _spread(size: int, count: int) -> np.ndarray:
    """At most `count` of `size` indices, evenly spread: sets are sorted by class."""
    return np.unique(np.linspace(0, size - 1, min(count, size)).round().astype(int))


def _open(card: ModelCard, root: Path | None, source: str, split: str) -> Source:
    if source != "folder":
        return open_labelled(card, root, source, split)
    if root is None:
        raise ValueError("give images to calibrate on: --calib DIR")
    if not root.is_dir():
        raise ValueError(f"--calib {root}: there is no such folder")
    return FileSource(find_images([root / split if (root / split).is_dir() else root]))


def _read(card: ModelCard, source: Source) -> Tensor:
    images = []
    with progress_bar(len(source), "calibration images") as advance:
        for part in batches(source, card, batch=16):
            for error in part.errors.values():
                print(f"skipped: {error}", file=sys.stderr)
            if part.images is not None:
                images.append(part.images)
            advance(len(part.indices) + len(part.errors))
    if not images:
        raise ValueError("none of the images to calibrate on can be read")
    return torch.cat(images)

"""An exported segmentor on whole pictures, resized and labelled as its configuration's test pipeline says.

Needs none of the mm packages. Pictures are resized by OpenCV, as mmcv does. Where OpenCV is not installed, bilinear
resizing is done by PyTorch, which rounds differently: single values of a picture then differ by one grey level.
"""

import logging
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from wbmm.deploy.runtime import open_runner
from wbmm.io.picture_pipeline import PicturePipeline

__all__ = ["ExportedSegmentor", "resize_picture"]

MOST_LOGITS = 1 << 26  # that are interpolated at a time

_logger = logging.getLogger(__name__)


class ExportedSegmentor:
    """A segmentor of `wbmm export` that takes pictures of any size.

    A file of one size gets a picture of another size scaled into it with its aspect ratio kept, and padded at the right
    and below. Then its labels differ from the checkpoint's; the first such picture is reported.

    Args:
        path: the file.
        device: `cpu` or `cuda`.

    Attributes:
        card: what the file says about itself.
        pictures: its test pipeline. Files that carry none squash pictures to their size.
    """

    def __init__(self, path: str | Path, device: str = "cpu") -> None:
        self.path = path
        self.runner = open_runner(path, device)
        self.card = self.runner.card
        if self.card.kind != "segmentor":
            raise ValueError(f"{path} is no segmentor but a {self.card.kind}: {self.card.describe()}")
        self.pictures = self.card.pictures or PicturePipeline(scale=(self.card.input_size[2], self.card.input_size[1]))
        self.told = False

    def labels(self, image: Image.Image) -> np.ndarray:
        """The class of each pixel of an RGB picture, `[H, W]`."""
        pixels = np.asarray(image.convert("L" if self.card.input_size[0] == 1 else "RGB"))
        width, height = self._fit(*image.size)
        small = resize_picture(pixels, (width, height), self.pictures.interpolation, self.pictures.backend)
        padded = self.pictures.padded(width, height) if self.runner.size is None else self.runner.size[::-1]
        logits = self.runner(self._input(small, padded))[:, :, :height, :width]
        return label_pixels(logits, image.size[::-1], self.pictures).numpy()

    def _fit(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of a resized picture: as the test pipeline says, or what fits into a file of one size."""
        sides = self.pictures.resized(width, height)
        if self.runner.size is None or self.pictures.padded(*sides) == self.runner.size[::-1]:
            return sides
        room = self.runner.size[1], self.runner.size[0]
        factor = min(1.0, *(most / side for most, side in zip(room, sides, strict=True)))
        fitted = tuple(max(1, int(side * factor + 0.5)) for side in sides)
        if not self.told:
            self.told = True
            _logger.warning(
                f"{self.path} takes {room[0]}x{room[1]} px alone, and the test pipeline makes {sides[0]}x{sides[1]} px "
                f"of a picture of {width}x{height}: it is padded, and its labels differ from the checkpoint's. "
                "Export with --dynamic-size for pictures of several sizes"
            )
        return fitted

    def _input(self, pixels: np.ndarray, size: tuple[int, int]) -> Tensor:
        """Bytes `[H, W]` or `[H, W, 3]` to what the file takes, `[1, C, H, W]`, padded to (width, height)."""
        x = torch.from_numpy(np.ascontiguousarray(pixels)).view(*pixels.shape[:2], -1).permute(2, 0, 1)
        padding = (0, size[0] - x.shape[2], 0, size[1] - x.shape[1])
        mean, std = (255 * torch.tensor(values).view(-1, 1, 1) for values in (self.card.mean, self.card.std))
        if self.card.input == "normalized":
            return F.pad((x.float() - mean) / std, padding, value=self.pictures.pad_value)[None]
        empty = (mean + self.pictures.pad_value * std).round().clamp(0, 255).to(torch.uint8)
        whole = empty.expand(-1, size[1], size[0]).clone()
        whole[:, : x.shape[1], : x.shape[2]] = x
        return whole[None]


def label_pixels(logits: Tensor, size: tuple[int, int], pictures: PicturePipeline) -> Tensor:
    """Logits `[1, classes, h, w]` to labels `[H, W]`: interpolated to the picture's size first, as mmseg does."""

    def enlarge(part: Tensor) -> Tensor:
        return F.interpolate(part, size=size, mode="bilinear", align_corners=pictures.align_corners)[0]

    if pictures.threshold is not None:
        return (enlarge(logits)[0].sigmoid() > pictures.threshold).long()
    step = max(1, MOST_LOGITS // (size[0] * size[1]))
    best, labels = enlarge(logits[:, :step]).max(0)
    for start in range(step, logits.shape[1], step):
        value, label = enlarge(logits[:, start : start + step]).max(0)
        labels = torch.where(value > best, label + start, labels)
        best = torch.maximum(best, value)
    return labels


def resize_picture(
    pixels: np.ndarray, size: tuple[int, int], interpolation: str = "bilinear", backend: str = "cv2"
) -> np.ndarray:
    """Bytes `[H, W]` or `[H, W, C]` to (width, height), as mmcv's Resize does.

    Args:
        pixels: the picture.
        size: (width, height).
        interpolation: `bilinear`, `nearest`, or with OpenCV `bicubic`, `area` and `lanczos`.
        backend: `cv2`, or `pillow` for a pipeline that asks for it.
    """
    if size == (pixels.shape[1], pixels.shape[0]):
        return pixels
    if backend == "pillow":
        return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling[interpolation.upper()]))
    try:
        import cv2
    except ImportError:
        return _resize_without_opencv(pixels, size, interpolation)
    codes = {"bicubic": "CUBIC", "bilinear": "LINEAR", "lanczos": "LANCZOS4"}
    code = getattr(cv2, f"INTER_{codes.get(interpolation, interpolation.upper())}")
    return cv2.resize(pixels, size, interpolation=code)


def _resize_without_opencv(pixels: np.ndarray, size: tuple[int, int], interpolation: str) -> np.ndarray:
    if interpolation != "bilinear":
        raise ValueError(
            f"{interpolation} resizing, which this file asks for, needs OpenCV: pip install opencv-python-headless"
        )
    x = torch.from_numpy(np.ascontiguousarray(pixels)).view(*pixels.shape[:2], -1).permute(2, 0, 1)[None].float()
    x = F.interpolate(x, size=size[::-1], mode="bilinear", align_corners=False)[0].round().to(torch.uint8)
    return x.permute(1, 2, 0).numpy().reshape(*size[::-1], *pixels.shape[2:])

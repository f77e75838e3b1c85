"""Exported segmentors and detectors on whole pictures, resized as their configuration's test pipeline says.

Needs none of the mm packages. Pictures are resized by OpenCV, as mmcv does. Where OpenCV is not installed, bilinear
resizing is done by PyTorch, which rounds differently: single values of a picture then differ by one grey level.
"""

import logging
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from wbmm.deploy.runtime import open_runner
from wbmm.io.picture_pipeline import PicturePipeline

__all__ = ["ExportedDetector", "ExportedSegmentor", "paste_masks", "resize_picture"]

MOST_LOGITS = 1 << 26  # that are interpolated at a time

_logger = logging.getLogger(__name__)


class _Exported:
    """A file of `wbmm export` that takes pictures of any size.

    A file of one size gets a picture of another size scaled into it with its aspect ratio kept, and padded at the right
    and below. Then its results differ from the checkpoint's; the first such picture is reported.

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
        self._check_kind()
        self.pictures = self.card.pictures or PicturePipeline(scale=(self.card.input_size[2], self.card.input_size[1]))
        self.told = False

    def _check_kind(self) -> None:
        raise NotImplementedError

    def _run(self, image: Image.Image) -> tuple[Tensor | list[Tensor], tuple[int, int]]:
        """What the file gives for an RGB picture, and (width, height) of the picture inside of its input."""
        pixels = np.asarray(image.convert("L" if self.card.input_size[0] == 1 else "RGB"))
        width, height = self._fit(*image.size)
        small = resize_picture(pixels, (width, height), self.pictures.interpolation, self.pictures.backend)
        padded = self.pictures.padded(width, height) if self.runner.size is None else self.runner.size[::-1]
        return self.runner(self._input(small, padded)), (width, height)

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
                f"of a picture of {width}x{height}: it is padded, and its results differ from the checkpoint's. "
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


class ExportedSegmentor(_Exported):
    """A segmentor of `wbmm export`."""

    def _check_kind(self) -> None:
        if self.card.kind != "segmentor":
            raise ValueError(f"{self.path} is no segmentor but a {self.card.kind}: {self.card.describe()}")

    def labels(self, image: Image.Image) -> np.ndarray:
        """The class of each pixel of an RGB picture, `[H, W]`."""
        logits, (width, height) = self._run(image)
        return label_pixels(logits[:, :, :height, :width], image.size[::-1], self.pictures).numpy()


class ExportedDetector(_Exported):
    """A whole detector of `wbmm export`."""

    def _check_kind(self) -> None:
        card = self.card
        if card.kind == "detector" and not card.num_classes:
            raise ValueError(
                f"{self.path} holds a detector's backbone and neck: it gives maps, and no boxes. Export the whole: "
                "wbmm export CHECKPOINT OUT --config CONFIG, without --neck"
            )
        if card.kind != "detector":
            raise ValueError(f"{self.path} is no detector but a {card.kind}: {card.describe()}")

    def find(self, image: Image.Image) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Boxes `[K, 4]` in pixels of the picture, labels `[K]`, scores `[K]`, and masks `[K, H, W]` or None."""
        outputs, (width, height) = self._run(image)
        boxes, labels, scores, *masks = (part[0] for part in outputs)
        factor = torch.tensor([width / image.width, height / image.height]).repeat(2)
        boxes = boxes / factor
        threshold = 0.5 if self.pictures.threshold is None else self.pictures.threshold
        pasted = paste_masks(masks[0], boxes, image.size[::-1], threshold).numpy() if masks else None
        return boxes.numpy(), labels.numpy(), scores.numpy(), pasted


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int], threshold: float) -> Tensor:
    """Probabilities on a grid over each box to booleans `[K, H, W]`, interpolated as mmdet does.

    Args:
        masks: `[K, h, w]`.
        boxes: `[K, 4]`, left, top, right, bottom in pixels.
        size: (height, width) of the picture.
        threshold: pixels from this probability on belong to the object.
    """
    height, width = size
    whole = torch.zeros(len(masks), height, width, dtype=torch.bool)
    for mask, box, out in zip(masks, boxes, whole, strict=True):
        left, top, right, bottom = box.tolist()
        x0, y0 = max(int(left) - 1, 0), max(int(top) - 1, 0)
        x1, y1 = min(math.ceil(right) + 1, width), min(math.ceil(bottom) + 1, height)
        if x1 <= x0 or y1 <= y0 or right <= left or bottom <= top:
            continue
        x = (torch.arange(x0, x1) + 0.5 - left) / (right - left) * 2 - 1
        y = (torch.arange(y0, y1) + 0.5 - top) / (bottom - top) * 2 - 1
        grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)[None]
        out[y0:y1, x0:x1] = F.grid_sample(mask[None, None], grid, align_corners=False)[0, 0] >= threshold
    return whole


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

"""timm's transforms, with the random numbers of each sample set by (seed, epoch, index)."""

import logging
import random
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor
from torch.utils.data import Dataset

from wbmm.io.card import image_transform

from .order import SAMPLE, hash64
from .settings import AugmentConfig, DataConfig
from .sources import BadImage, Source

__all__ = ["ByteTransform", "FinishBytes", "SampleDataset", "eval_transform", "seeded", "send", "train_transform"]

MODES = {1: "L", 3: "RGB"}
MOST_BAD_IN_A_ROW = 20

logger = logging.getLogger(__name__)


def train_transform(data: DataConfig, augment: AugmentConfig, as_bytes: bool = False):
    """timm's transform to a normalised tensor; or, for a GPU to finish, to what `ByteTransform` gives."""
    transform = transforms_imagenet_train(
        img_size=data.size,
        scale=tuple(augment.scale),
        ratio=tuple(augment.ratio),
        hflip=augment.hflip,
        color_jitter=augment.color_jitter or None,
        auto_augment=augment.auto,
        interpolation=data.interpolation,
        mean=tuple(data.mean),
        std=tuple(data.std),
        re_prob=augment.reprob,
        re_mode=augment.remode,
        normalize=not as_bytes,
    )
    _keep_a_bit(transform)
    if not as_bytes:
        return transform
    erasing = RandomErasing(augment.reprob, mode=augment.remode, device="cpu") if augment.reprob else None
    return ByteTransform(transform, erasing)


class ByteTransform:
    """Images as bytes, with the part that random erasing paints over them, as it works on normalised numbers.

    The random numbers are those of the transform that normalises: erasing is its last step.

    Args:
        transform: From a PIL image to a uint8 tensor [C, H, W].
        erasing: timm's, or None.
    """

    def __init__(self, transform, erasing: RandomErasing | None = None):
        self.transform, self.erasing = transform, erasing

    def __call__(self, image) -> tuple[Tensor, tuple[int, int, Tensor] | None]:
        """The bytes, and (top, left, painted [C, h, w]) or None."""
        image = self.transform(image)
        if self.erasing is None:
            return image, None
        canvas = self.erasing(torch.full(image.shape, torch.nan))
        painted = canvas[0].isnan().logical_not()
        rows, columns = painted.any(1).nonzero().flatten(), painted.any(0).nonzero().flatten()
        if not len(rows):
            return image, None
        top, left = int(rows[0]), int(columns[0])
        return image, (top, left, canvas[:, top : int(rows[-1]) + 1, left : int(columns[-1]) + 1].clone())


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; to a GPU through page-locked memory, so that the host need not wait."""
    if device.type == "cpu":
        return tensor
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


class FinishBytes:
    """Makes the model's input of a batch of `ByteTransform`, on its device, by the operations of the transform."""

    def __init__(self, data: DataConfig):
        self.mean, self.std = (torch.tensor(values).view(1, -1, 1, 1) for values in (data.mean, data.std))

    def __call__(self, images: Tensor, labels: Tensor, places: list, painted: Tensor) -> tuple[Tensor, Tensor]:
        """Images uint8 [B, C, H, W]; `places`: (image, top, left, height, width) of each part in `painted`."""
        if self.mean.device != images.device:
            self.mean, self.std = send(self.mean, images.device), send(self.std, images.device)
        images = images.float().div_(255).sub_(self.mean).div_(self.std)
        channels = images.shape[1]
        parts = painted.split([channels * height * width for *_, height, width in places])
        for (index, top, left, height, width), part in zip(places, parts, strict=True):
            images[index, :, top : top + height, left : left + width] = part.view(channels, height, width)
        return images, labels


def _keep_a_bit(transform) -> None:
    """Lets Posterize keep at least 1 bit: at the top level timm asks for 0, which recent versions of Pillow refuse."""
    for step in transform.transforms:
        policy = getattr(step, "policy", [])
        for op in [*getattr(step, "ops", []), *(op for part in policy for op in part)]:
            if op.name.startswith("Posterize"):
                op.level_fn = partial(_at_least_one_bit, op.level_fn)


def _at_least_one_bit(level_fn, level, hparams) -> tuple[int]:
    return (max(1, level_fn(level, hparams)[0]),)


def eval_transform(data: DataConfig, normalize: bool = True):
    """The transform that a model file describes, for the same settings."""
    size = (data.size, data.size)
    return image_transform(size, data.crop_pct, data.interpolation, data.mean, data.std, normalize)


@contextmanager
def seeded(seed: int):
    """The three generators that transforms draw from start at `seed` inside, and go on as before outside."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every CUDA device as well
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


class SampleDataset(Dataset):
    """Samples by (epoch, index), for DataLoader's workers: no state, so any worker gives the same sample.

    Args:
        source: The images.
        transform: Of a PIL image.
        channels: 1 or 3; images are converted.
        seed: The run's seed; None for evaluation.
        skip_bad: Whether a bad image is skipped (training takes the next good one, so that batches keep their size;
            evaluation leaves it out) instead of ending the run.
    """

    def __init__(self, source: Source, transform, channels: int, seed: int | None, skip_bad: bool):
        self.source, self.transform, self.mode = source, transform, MODES[channels]
        self.seed, self.skip_bad = seed, skip_bad

    def __getitem__(self, key: tuple[int, int]):
        epoch, index = key
        if self.seed is None:
            image, used = self._read(index, retries=0)
            return None if image is None else (self.transform(image), int(self.source.labels[used]))
        image, used = self._read(index, retries=MOST_BAD_IN_A_ROW)
        with seeded(int(hash64(self.seed, SAMPLE, epoch, index)[0] >> np.uint64(1))):
            return self.transform(image), int(self.source.labels[used])

    def _read(self, index: int, retries: int):
        for attempt in range(retries + 1):
            used = (index + attempt) % len(self.source)
            try:
                return self.source.image(used).convert(self.mode), used
            except BadImage as error:
                if not self.skip_bad:
                    raise BadImage(f"{error} (data.on_bad_image=skip leaves such images out)") from error
                logger.warning("skipped: %s", error)
        if retries:
            raise BadImage(f"{retries + 1} images in a row cannot be read, the last one is {self.source.name(used)}")
        return None, index

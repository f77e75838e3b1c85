"""Augmentation, with the random numbers of each sample set by (seed, epoch, index).

Images from disk go through timm's transforms one by one. Data sets that fit in memory take the fast path at the end of
this file: bytes in one tensor, whole batches augmented at once, no workers.
"""

import logging
import math
import os
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor
from torch.utils.data import Dataset

from wbmm.io.card import image_transform

from .order import COLOUR, ERASE, GEOMETRY, SAMPLE, hash64, uniform
from .settings import AugmentConfig, DataConfig
from .sources import BadImage, Source

__all__ = [
    "ByteTransform",
    "FinishBytes",
    "MemoryFetch",
    "SampleDataset",
    "augment_batch",
    "check_memory",
    "eval_transform",
    "load_images",
    "seeded",
    "send",
    "train_transform",
]

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


MEMORY_SHARE = 0.8


def load_images(cfg: DataConfig, source: Source) -> tuple[torch.Tensor, torch.Tensor]:
    """Decodes a set: images uint8 [N, C, size, size], resized and cut as for evaluation, and labels [N]."""
    size, channels = cfg.size, cfg.in_chans
    transform = eval_transform(cfg, normalize=False)
    dataset = SampleDataset(source, transform, channels, seed=None, skip_bad=cfg.on_bad_image == "skip")
    images = torch.empty(len(source), channels, size, size, dtype=torch.uint8)
    labels, count = [], 0
    for index in range(len(source)):
        sample = dataset[0, index]
        if sample is not None:
            images[count] = sample[0]
            labels.append(sample[1])
            count += 1
    return images[:count], torch.tensor(labels, dtype=torch.int64)


def check_memory(cfg: DataConfig, *sources: Source) -> None:
    """Refuses sets that, held by each process of this machine, would not leave it room to work."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    size, channels = cfg.size, cfg.in_chans
    wanted = sum(map(len, sources)) * channels * size * size * processes
    if wanted > MEMORY_SHARE * total:
        images = " + ".join(str(len(source)) for source in sources)
        raise ValueError(
            f"data.in_memory needs ({images}) images x {channels} x {size} x {size} bytes x {processes} "
            f"process{'' if processes == 1 else 'es'} = {wanted / 2**30:.3g} GiB; the machine has {total / 2**30:.3g} "
            f"GiB, of which {MEMORY_SHARE:.0%} may be used: set data.in_memory=false"
        )


class MemoryFetch:
    """Batches from a tensor of images; with `augment`, each sample's is set by (seed, epoch, index) as elsewhere."""

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        cfg: DataConfig,
        augment: AugmentConfig | None = None,
        seed: int = 0,
    ):
        self.images, self.labels, self.augment, self.seed = images, labels, augment, seed
        mean = torch.tensor(cfg.mean).view(1, -1, 1, 1)
        std = torch.tensor(cfg.std).view(1, -1, 1, 1)
        self.scale, self.offset = 1 / (255 * std), mean / std

    def __call__(self, epoch: int, batches: Iterable[np.ndarray]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in self.raw(epoch, batches):
            yield self.finish(*batch)

    def raw(self, epoch: int, batches: Iterable[np.ndarray]) -> Iterator[tuple]:
        """Bytes and labels, with the epoch and the indices that `finish` needs."""
        for indices in batches:
            chosen = torch.from_numpy(np.asarray(indices, dtype=np.int64))
            yield self.images[chosen], self.labels[chosen], epoch, indices

    def finish(self, images: torch.Tensor, labels: torch.Tensor, epoch: int, indices: np.ndarray):
        """Augments and normalises, where the images are."""
        images = images.float()
        if self.augment is not None:
            images = augment_batch(images, self.augment, self.seed, epoch, indices)
        if self.scale.device != images.device:
            self.scale, self.offset = send(self.scale, images.device), send(self.offset, images.device)
        images = images * self.scale - self.offset
        if self.augment is not None and self.augment.reprob > 0:
            erase(images, self.augment, self.seed, epoch, indices)
        return images, labels


def augment_batch(images: torch.Tensor, cfg: AugmentConfig, seed: int, epoch: int, indices) -> torch.Tensor:
    """Random resized crop, shift and flip as one resampling, then brightness and contrast; images in 0..255.

    `augment.scale` may go above 1: the image is then made smaller, on black.
    """
    if cfg.hflip > 0 or cfg.shift or cfg.scale != [1.0, 1.0] or cfg.ratio != [1.0, 1.0]:
        theta = _placements(cfg, images.shape[-1], seed, epoch, indices)
        # A GPU would multiply float32 in TF32, which is a tenth of a pixel off.
        theta = torch.from_numpy(theta) if images.is_cuda else torch.from_numpy(theta).float()
        grid = F.affine_grid(send(theta, images.device), list(images.shape), align_corners=False).float()
        images = F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    if cfg.color_jitter > 0:
        draws = [uniform(seed, COLOUR, epoch, indices, k) for k in range(2)]
        gains = [torch.from_numpy(1 + cfg.color_jitter * (2 * draw - 1)).float().view(-1, 1, 1, 1) for draw in draws]
        gains = [send(gain, images.device) for gain in gains]
        images = images * gains[0]
        centre = images.mean(dim=(1, 2, 3), keepdim=True)
        images = ((images - centre) * gains[1] + centre).clamp(0, 255)
    return images


def _placements(cfg: AugmentConfig, size: int, seed: int, epoch: int, indices) -> np.ndarray:
    """The 2 x 3 matrices from output to input coordinates, both from -1 to 1."""
    u = [uniform(seed, GEOMETRY, epoch, indices, k) for k in range(7)]
    area = cfg.scale[0] + (cfg.scale[1] - cfg.scale[0]) * u[0]
    ratio = np.exp(math.log(cfg.ratio[0]) + math.log(cfg.ratio[1] / cfg.ratio[0]) * u[1])
    wide, high = np.sqrt(area * ratio), np.sqrt(area / ratio)
    flip = np.where(u[2] < cfg.hflip, -1.0, 1.0)
    reach = 2 * cfg.shift / size
    theta = np.zeros((len(u[0]), 2, 3))
    theta[:, 0, 0], theta[:, 1, 1] = wide * flip, high
    theta[:, 0, 2] = np.abs(1 - wide) * (2 * u[3] - 1) + reach * (2 * u[5] - 1)
    theta[:, 1, 2] = np.abs(1 - high) * (2 * u[4] - 1) + reach * (2 * u[6] - 1)
    return theta


def erase(images: torch.Tensor, cfg: AugmentConfig, seed: int, epoch: int, indices) -> None:
    """Random erasing, in place on normalised images, with timm's areas (2 to 33 %) and shapes (0.3 to 3.3)."""
    height, width = images.shape[-2:]
    u = [uniform(seed, ERASE, epoch, indices, k) for k in range(5)]
    for i in np.flatnonzero(u[0] < cfg.reprob):
        area = (0.02 + (1 / 3 - 0.02) * u[1][i]) * height * width
        aspect = math.exp(math.log(0.3) * (1 - 2 * u[2][i]))
        h = min(round(math.sqrt(area * aspect)), height - 1)
        w = min(round(math.sqrt(area / aspect)), width - 1)
        top, left = int(u[3][i] * (height - h + 1)), int(u[4][i] * (width - w + 1))
        noise = _fill(cfg.remode, (images.shape[1], h, w), seed, epoch, indices[i])
        images[i, :, top : top + h, left : left + w] = send(noise, images.device)


def _fill(mode: str, shape: tuple, seed: int, epoch: int, index: int) -> torch.Tensor:
    if mode == "const":
        return torch.zeros(shape)
    if mode not in ("pixel", "rand"):
        raise ValueError(f"augment.remode is {mode!r}; valid: pixel, rand, const")
    count = math.prod(shape) if mode == "pixel" else shape[0]
    # Box and Muller: two uniform numbers make a normal one
    u, v = (uniform(seed, ERASE, epoch, int(index), 5 + k, np.arange(count)) for k in range(2))
    normal = torch.from_numpy(np.sqrt(-2 * np.log(1 - u)) * np.cos(2 * np.pi * v)).float()
    return normal.view(shape) if mode == "pixel" else normal.view(-1, 1, 1).expand(shape)

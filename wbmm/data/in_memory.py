"""The fast path for datasets that fit in memory: bytes in one tensor, augmentation on whole batches, no workers."""

import math
import os
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.nn.functional as F

from .augment import SampleDataset, eval_transform, send
from .order import COLOUR, ERASE, GEOMETRY, uniform
from .settings import AugmentConfig, DataConfig
from .sources import Source

__all__ = ["MemoryFetch", "augment_batch", "check_memory", "load_images"]

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

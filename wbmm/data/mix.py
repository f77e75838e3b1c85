"""timm's Mixup and CutMix, drawn from (seed, step, micro-batch, rank) instead of a running generator."""

import numpy as np
import torch
from timm.data.mixup import Mixup, mixup_target

from .order import MIX, hash64
from .settings import MixConfig

__all__ = ["BatchMixer"]


class BatchMixer:
    """Mixes a batch and returns soft targets; with mixup and cutmix at 0, label smoothing alone.

    Args:
        mix: What is mixed, and how.
        num_classes: Width of the targets.
        seed: Of the run.
        rank: Of this process.
    """

    def __init__(self, mix: MixConfig, num_classes: int, seed: int, rank: int = 0):
        self.seed, self.rank, self.num_classes = seed, rank, num_classes
        self.smoothing = mix.label_smoothing
        self.mixup = None
        if (mix.mixup > 0 or mix.cutmix > 0) and mix.prob > 0:
            self.mixup = Mixup(
                mixup_alpha=mix.mixup,
                cutmix_alpha=mix.cutmix,
                prob=mix.prob,
                switch_prob=mix.switch_prob,
                mode=mix.mode,
                label_smoothing=mix.label_smoothing,
                num_classes=num_classes,
            )

    def __call__(
        self, images: torch.Tensor, targets: torch.Tensor, step: int, micro: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Images [B, C, H, W] (changed in place) and targets [B] to images and soft targets [B, num_classes]."""
        if self.mixup is None:
            return images, mixup_target(targets, self.num_classes, smoothing=self.smoothing)
        state = np.random.get_state()
        np.random.seed(int(hash64(self.seed, MIX, step, micro, self.rank)[0] >> np.uint64(32)))
        try:
            return self.mixup(images, targets)
        finally:
            np.random.set_state(state)

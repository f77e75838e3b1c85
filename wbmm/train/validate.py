"""Validation during training, over all processes, each image counted exactly once."""

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from wbmm.data.classes import is_right

from .dist import World, all_sum, broadcast_buffers

__all__ = ["validate"]


@torch.no_grad()
def validate(
    model: nn.Module,
    loader,
    world: World,
    amp_dtype: torch.dtype | None = None,
    channels_last: bool = True,
    stop: Callable[[], bool] = lambda: False,
    exact: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float] | None:
    """Top-1 and top-5 accuracy (per cent) and mean cross-entropy over the whole validation set.

    Args:
        model: The bare model, not a DDP wrapper: the processes may have different numbers of batches.
        loader: Yields this process's disjoint share as `(images, targets)`; `size` is that of the whole set.
        stop: Asked before each batch; when true on any process the evaluation is abandoned.
        progress: Told after each batch how many images of how many are done, about: this process's times all.
        exact: Raise if the images counted are not the whole set (off where damaged images are skipped).

    Returns:
        The figures, the same on every process, or None if abandoned.
    """
    broadcast_buffers(model, world)
    model.eval()
    layout = torch.channels_last if channels_last else torch.contiguous_format
    counted, right, right5, loss, stopped = 0, 0, 0, torch.zeros((), dtype=torch.float64, device=world.device), False
    for images, targets in loader:
        if stop():
            stopped = True
            break
        images = images.to(world.device, non_blocking=True, memory_format=layout)
        targets = targets.to(world.device, non_blocking=True)
        with torch.autocast(world.device.type, amp_dtype, enabled=amp_dtype is not None):
            logits = model(images)
        logits = logits.float()
        counted += len(targets)
        progress(min(counted * world.size, loader.size), loader.size)
        right = right + is_right(logits, targets).sum()
        right5 = right5 + is_right(logits, targets, k=5).sum()
        loss += F.cross_entropy(logits, targets, reduction="sum").double()
    counted, right, right5, loss, stopped = all_sum([counted, right, right5, loss, stopped], world)
    if stopped:
        return None
    if exact and counted != loader.size:
        raise RuntimeError(f"evaluation counted {counted:.0f} images, but the validation set has {loader.size}")
    return {"loss": loss / counted, "top1": 100 * right / counted, "top5": 100 * right5 / counted}

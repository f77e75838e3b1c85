"""Hooks of the runner."""

import mmengine.dist
from mmengine.hooks import Hook

__all__ = ["BroadcastBuffersHook", "LabelRangeHook"]


class LabelRangeHook(Hook):
    """Stops training at the first label that is no class, with the file's name: on a GPU the loss would only abort.

    Args:
        num_classes: classes of the segmentor.
        ignore_index: the label of pixels that do not count.
    """

    def __init__(self, num_classes: int, ignore_index: int = 255) -> None:
        self.num_classes = num_classes
        self.ignore_index = ignore_index

    def before_train_iter(self, runner, batch_idx: int, data_batch: dict | None = None) -> None:
        for sample in (data_batch or {}).get("data_samples", []):
            labels = sample.gt_sem_seg.data
            wrong = labels[(labels != self.ignore_index) & ((labels < 0) | (labels >= self.num_classes))]
            if wrong.numel():
                raise ValueError(
                    f"{sample.metainfo.get('seg_map_path', 'an annotation')}: label {wrong.max().item()} with "
                    f"num_classes={self.num_classes}; labels must be below it, or {self.ignore_index} to be ignored"
                )


class BroadcastBuffersHook(Hook):
    """Gives all processes the first one's batch-norm statistics before validation: those are the ones saved."""

    priority = "VERY_HIGH"

    def before_val(self, runner) -> None:
        for buffer in runner.model.buffers():
            mmengine.dist.broadcast(buffer, src=0)

"""Makes the package known to mmengine, in the root registries: MMSegmentation and MMDetection both see them.

custom_imports = dict(imports=["wbmm.mm.register"], allow_failed_imports=False)
"""

from pathlib import Path

import mmengine.dist
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS

from wbmm.io.atomic import atomic_path

from .backbone import WBMMBackbone
from .layer_decay import LayerDecayConstructor
from .timm_backbone import TimmBackbone

__all__ = ["ATOMIC", "AtomicBackend", "BroadcastBuffersHook", "LabelRangeHook"]


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


ATOMIC = "wbmm.atomic"  # in a configuration: CheckpointHook(backend_args=dict(backend="wbmm.atomic"))


class AtomicBackend(LocalBackend):
    """The local file backend, writing under a temporary name first."""

    def put(self, obj: bytes, filepath: str | Path) -> None:
        Path(filepath).parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(filepath, force=True) as temporary:
            temporary.write_bytes(obj)


MODELS.register_module(module=WBMMBackbone)
MODELS.register_module(module=TimmBackbone)
OPTIM_WRAPPER_CONSTRUCTORS.register_module(module=LayerDecayConstructor, name="WBMMLayerDecay")
HOOKS.register_module(module=LabelRangeHook)
HOOKS.register_module(module=BroadcastBuffersHook)
register_backend(ATOMIC, AtomicBackend)

"""What mmengine knows of us, in its root registries, so that MMSegmentation and MMDetection both see it.

The backbones, layer decay, two hooks, and files that are written whole or not at all. In a configuration:

    custom_imports = dict(imports=["wbmm.mm.register"], allow_failed_imports=False)
"""

from pathlib import Path

import mmengine.dist
import torch.nn as nn
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import HOOKS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS

from wbmm.io.atomic import atomic_path
from wbmm.mm.backbone import TimmBackbone
from wbmm.models.layer_groups import layer_group, layer_scale, num_groups

from .backbone import WBMMBackbone
from .mm_checkpoint import PREFIX

__all__ = ["ATOMIC", "AtomicBackend", "BroadcastBuffersHook", "LabelRangeHook", "LayerDecayConstructor"]

ATOMIC = "wbmm.atomic"  # in a configuration: CheckpointHook(backend_args=dict(backend="wbmm.atomic"))
_BODY = "body."  # the model inside a TimmBackbone


class LayerDecayConstructor(DefaultOptimWrapperConstructor):
    """Parameter groups by layer, each with its learning rate, and without weight decay on 1-d parameters and biases.

    In a configuration:

        optim_wrapper = dict(constructor="WBMMLayerDecay", paramwise_cfg=dict(decay_rate=0.9, groups=12), ...)

    The groups are those of `wbmm.models.layer_groups`; whatever is not a layer of the backbone, its output norms
    included, counts as a head and learns at the full rate. `groups` is the number of the last one, by default what
    follows from the depths.
    """

    def _validate_cfg(self) -> None:
        unknown = sorted(set(self.paramwise_cfg) - {"decay_rate", "groups"})
        if unknown or "decay_rate" not in self.paramwise_cfg:
            raise ValueError(f"paramwise_cfg {dict(self.paramwise_cfg)!r}: expected decay_rate and, optionally, groups")
        if self.base_lr is None or self.base_wd is None:
            raise ValueError("layer decay needs the optimiser's lr and weight_decay")

    def add_params(self, params: list[dict], module: nn.Module, prefix: str = "", is_dcn_module=None) -> None:
        """Appends the groups of a whole model to `params`."""
        depths = getattr(getattr(module, "backbone", None), "depths", None)
        if depths is None:
            raise ValueError(
                "layer decay needs a model with a backbone of ours, in stages of blocks; "
                f"{type(module).__name__} has none"
            )
        rate, last = self.paramwise_cfg["decay_rate"], self.paramwise_cfg.get("groups") or num_groups(depths)
        groups: dict[tuple[int, bool], dict] = {}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            inner = name.removeprefix(PREFIX).removeprefix(_BODY) if name.startswith(PREFIX) else "head"
            layer, decay = layer_group(inner, depths, last), parameter.ndim > 1 and not name.endswith(".bias")
            scale = layer_scale(inner, depths, rate, last)
            group = groups.setdefault(
                (layer, decay),
                {
                    "params": [],
                    "lr": self.base_lr * scale,
                    "weight_decay": self.base_wd if decay else 0.0,
                    "layer": layer,
                    "lr_scale": scale,
                },
            )
            group["params"].append(parameter)
        ordered = [groups[key] for key in sorted(groups)]
        params.extend(ordered)
        print_log("\n".join(["layer decay:", *map(_describe, ordered)]), logger="current")


def _describe(group: dict) -> str:
    return (
        f"  group {group['layer']:2d}: {len(group['params']):3d} tensors, "
        f"lr x {group['lr_scale']:.4f}, weight decay {group['weight_decay']:g}"
    )


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

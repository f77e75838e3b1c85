"""What mmengine knows of us, in its root registries, so that MMSegmentation and MMDetection both see it.

The backbones, layer decay, three hooks, and files that are written whole or not at all. In a configuration:

    custom_imports = dict(imports=["wbmm.mm.register"], allow_failed_imports=False)
"""

from pathlib import Path

import mmengine.dist
import numpy as np
import torch.nn as nn
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import HOOKS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from PIL import Image, ImageOps

from wbmm.io.atomic import atomic_path
from wbmm.models.layer_groups import layer_group, layer_scale, num_groups
from wbmm.text import printable

from .backbone import TimmBackbone, WBMMBackbone
from .mm_checkpoint import PREFIX
from .pictures import class_colours, distinct_colours, draw_examples, draw_objects

__all__ = ["ATOMIC", "AtomicBackend", "BroadcastBuffersHook", "LabelRangeHook", "LayerDecayConstructor", "MosaicHook"]

ATOMIC = "wbmm.atomic"  # in a configuration: CheckpointHook(backend_args=dict(backend="wbmm.atomic"))
_BODY = "body."  # the model inside a TimmBackbone
NO_BLOCKS = (0, 0, 0, 0)  # of a backbone without stages of blocks, where all layers learn at one rate
OPACITY = 0.6  # of labels in the pictures of MosaicHook
MOST_NAMES = 40  # in their legend
LEAST_SCORE = 0.3  # of a detection that is drawn


class LayerDecayConstructor(DefaultOptimWrapperConstructor):
    """Parameter groups by layer, each with its learning rate, and without weight decay on 1-d parameters and biases.

    In a configuration:

        optim_wrapper = dict(constructor="WBMMLayerDecay", paramwise_cfg=dict(decay_rate=0.9, groups=12), ...)

    The groups are those of `wbmm.models.layer_groups`; whatever is not a layer of the backbone, its output norms
    included, counts as a head and learns at the full rate. `groups` is the number of the last one, by default what
    follows from the depths. A backbone without stages of blocks needs the rate 1.
    """

    def _validate_cfg(self) -> None:
        unknown = sorted(set(self.paramwise_cfg) - {"decay_rate", "groups"})
        if unknown or "decay_rate" not in self.paramwise_cfg:
            raise ValueError(f"paramwise_cfg {dict(self.paramwise_cfg)!r}: expected decay_rate and, optionally, groups")
        if self.base_lr is None or self.base_wd is None:
            raise ValueError("layer decay needs the optimiser's lr and weight_decay")

    def add_params(self, params: list[dict], module: nn.Module, prefix: str = "", is_dcn_module=None) -> None:
        """Appends the groups of a whole model to `params`."""
        depths, rate = getattr(getattr(module, "backbone", None), "depths", None), self.paramwise_cfg["decay_rate"]
        if depths is None and rate != 1:
            raise ValueError(
                f"layer decay (decay_rate {rate}) needs a backbone in stages of blocks, as ours and ConvNeXt are; "
                f"that of {type(module).__name__} has none: set decay_rate to 1"
            )
        depths = depths or NO_BLOCKS
        last = self.paramwise_cfg.get("groups") or num_groups(depths)
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


class MosaicHook(Hook):
    """Draws pictures of the test set with their labels, once as annotated and once as predicted.

    Args:
        file: where the sheet is written.
        count: how many pictures, spread over the set.
    """

    priority = "LOW"

    def __init__(self, file: str, count: int = 6) -> None:
        self.file, self.count = Path(file), count
        self.rows: list = []
        self.legend: list = []

    def before_test(self, runner) -> None:
        self.rows = []

    def after_test_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        step = max(1, len(runner.test_dataloader) // self.count)
        if batch_idx % step or len(self.rows) >= self.count:
            return
        sample = outputs[0]
        path = sample.metainfo.get("img_path")
        if path is None or not Path(path).is_file():
            return
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file).convert("RGB")
        meta = runner.test_dataloader.dataset.metainfo
        classes, palette = list(meta.get("classes") or ()), meta.get("palette")
        if "pred_sem_seg" in sample:
            pair = _paint_labels(image, sample, classes, palette)
            colours = class_colours(len(classes), palette)
            self.legend = [(printable(n), tuple(c)) for n, c in zip(classes, colours, strict=True)][:MOST_NAMES]
        else:
            pair = _paint_objects(image, sample, classes)
        if pair is not None:
            self.rows.append(pair)

    def after_test(self, runner) -> None:
        if not self.rows or runner.rank:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        draw_examples(self.rows, ("annotated", "predicted"), self.legend).save(self.file)
        print_log(f"{len(self.rows)} pictures, annotated and predicted: {self.file}", logger="current")


def _paint_labels(image: Image.Image, sample, classes: list[str], palette) -> tuple[Image.Image, Image.Image] | None:
    pair = []
    for name in ("gt_sem_seg", "pred_sem_seg"):
        if name not in sample:
            return None
        labels = getattr(sample, name).data[0].cpu().numpy()
        if labels.shape != (image.height, image.width):
            return None
        colours = class_colours(max(len(classes), int(labels.max()) + 1 if not classes else 0), palette)
        known = labels < len(colours)
        painted = np.where(known[..., None], colours[np.where(known, labels, 0)], np.asarray(image))
        pair.append(Image.blend(image, Image.fromarray(painted.astype(np.uint8)), OPACITY))
    return tuple(pair)


def _paint_objects(image: Image.Image, sample, classes: list[str]) -> tuple[Image.Image, Image.Image] | None:
    pair = []
    for name in ("gt_instances", "pred_instances"):
        found = sample.get(name)
        if found is None:
            return None
        scores = found.scores.cpu().numpy() if "scores" in found else None
        keep = np.flatnonzero(scores >= LEAST_SCORE) if scores is not None else np.arange(len(found.labels))
        boxes = getattr(found.bboxes, "tensor", found.bboxes).cpu().numpy()[keep]
        labels = found.labels.cpu().numpy()[keep]
        names = [classes[label] if label < len(classes) else str(label) for label in labels]
        if scores is not None:
            names = [f"{text} {score:.2f}" for text, score in zip(names, scores[keep], strict=True)]
        masks = _masks(found, keep, image)
        pair.append(draw_objects(image, boxes, names, distinct_colours(len(boxes)), masks))
    return tuple(pair)


def _masks(found, keep: np.ndarray, image: Image.Image) -> np.ndarray | None:
    """`[N, H, W]` of booleans, if there are masks of the picture's size."""
    masks = found.get("masks")
    if masks is None:
        return None
    masks = masks.to_ndarray() if hasattr(masks, "to_ndarray") else masks.cpu().numpy()
    return masks[keep].astype(bool) if masks.shape[1:] == (image.height, image.width) else None


MODELS.register_module(module=WBMMBackbone)
MODELS.register_module(module=TimmBackbone)
OPTIM_WRAPPER_CONSTRUCTORS.register_module(module=LayerDecayConstructor, name="WBMMLayerDecay")
HOOKS.register_module(module=LabelRangeHook)
HOOKS.register_module(module=BroadcastBuffersHook)
HOOKS.register_module(module=MosaicHook)
register_backend(ATOMIC, AtomicBackend)

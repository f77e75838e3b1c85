"""Truth beside prediction: a sheet of some pictures at the end of testing."""

from pathlib import Path

import numpy as np
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.registry import HOOKS
from PIL import Image, ImageOps

from wbmm.text import printable

from .pictures import class_colours, distinct_colours, draw_mosaic, draw_objects

__all__ = ["MosaicHook"]

OPACITY = 0.6
MOST_NAMES = 40  # in the legend
LEAST_SCORE = 0.3  # of a detection that is drawn


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
            pair = _labels(image, sample, classes, palette)
            colours = class_colours(len(classes), palette)
            self.legend = [(printable(n), tuple(c)) for n, c in zip(classes, colours, strict=True)][:MOST_NAMES]
        else:
            pair = _objects(image, sample, classes)
        if pair is not None:
            self.rows.append(pair)

    def after_test(self, runner) -> None:
        if not self.rows or runner.rank:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        draw_mosaic(self.rows, ("annotated", "predicted"), self.legend).save(self.file)
        print_log(f"{len(self.rows)} pictures, annotated and predicted: {self.file}", logger="current")


def _labels(image: Image.Image, sample, classes: list[str], palette) -> tuple[Image.Image, Image.Image] | None:
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


def _objects(image: Image.Image, sample, classes: list[str]) -> tuple[Image.Image, Image.Image] | None:
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


HOOKS.register_module(module=MosaicHook)

"""Data checked before training: every image and annotation is there, and the labels are the model's classes."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from mmengine.config import Config
from mmengine.registry import DATASETS, DefaultScope
from PIL import Image

from .coco import check_annotations, picture_size

__all__ = ["check_detection_data", "check_labels", "check_segmentation_data", "follow_ignore_index"]

IGNORED = 255  # the label of pixels that do not count, in mmseg
SAMPLE = 100  # images and annotations that are read; a hook watches the labels of the rest in training
_FOLDERS = ("img_path", "seg_map_path")
_CHANNELS = {"color": 3, "color_ignore_orientation": 3, "grayscale": 1}  # of mmcv's LoadImageFromFile
# Transforms that know it.
_IGNORE_KEYS = {"RandomCrop": "ignore_index", "RandomRotate": "seg_pad_val", "RandomMosaic": "seg_pad_val"}


def follow_ignore_index(cfg: Config) -> int:
    """The label of pixels that do not count, as a head or a data set of the configuration says; 255 if none does.

    Everything that knows such a label gets it: heads, data sets, metrics, padding and cropping. Two settings that
    differ are a `ValueError`.
    """
    decode, auxiliary = cfg.model.decode_head, cfg.model.get("auxiliary_head") or []
    heads = [*_as_list(decode), *_as_list(auxiliary)]
    loaders = [cfg[name] for name in ("train_dataloader", "val_dataloader", "test_dataloader") if cfg.get(name)]
    sets = [entry for loader in loaders for entry in _dicts(loader) if "data_prefix" in entry]
    said = {entry["ignore_index"]: entry for entry in (*heads, *sets) if entry.get("ignore_index") is not None}
    if len(said) > 1:
        texts = " and ".join(f"{value} in {entry.get('type', 'a data set')}" for value, entry in said.items())
        raise ValueError(f"ignore_index is {texts}: it must be the same everywhere")
    value = next(iter(said), IGNORED)
    if value == IGNORED:
        return value
    for entry in (*heads, *sets):
        entry["ignore_index"] = value
    for name in ("val_evaluator", "test_evaluator"):
        for metric in _as_list(cfg.get(name) or []):
            if metric.type == "IoUMetric":
                metric["ignore_index"] = value
    for step in (step for loader in loaders for step in _dicts(loader)):
        if step.get("type") in _IGNORE_KEYS:
            step[_IGNORE_KEYS[step["type"]]] = value
        elif step.get("type") == "Pad":
            given = step.get("pad_val", 0)
            step["pad_val"] = {"img": 0, **(given if isinstance(given, dict) else {"img": given}), "seg": value}
    preprocessor = cfg.model.get("data_preprocessor") or cfg.get("data_preprocessor")
    if preprocessor:
        preprocessor["seg_pad_val"] = value
    return value


def _as_list(value: object) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]


def _dicts(config: object) -> Iterator[dict]:
    """Every dict inside of a configuration."""
    if isinstance(config, dict):
        yield config
    for value in config.values() if isinstance(config, dict) else config if isinstance(config, list | tuple) else ():
        yield from _dicts(value)


def check_segmentation_data(cfg: Config, parts: Sequence[str] = ("train", "val"), everything: bool = False) -> str:
    """Checks the data of a configuration; one sentence on what is there.

    Raises a `ValueError` with the first thing wrong. Data sets wrapped in others are left to mmengine, and so are
    images without annotations, of which predictions are written.

    Args:
        cfg: the configuration.
        parts: which of its data.
        everything: read every image and annotation, not a sample of them.
    """
    num_classes = _classes_of_heads(cfg)
    names = [name for name in ("train", "val", "test") if cfg.get(f"{name}_dataloader")]
    sets = {name: cfg[f"{name}_dataloader"].dataset for name in names}
    sets = {name: dataset for name, dataset in sets.items() if "data_prefix" in dataset}
    folders = {
        tuple(Path(dataset.get("data_root") or "", dataset["data_prefix"].get(key, "")) for key in _FOLDERS)
        for dataset in sets.values()
    }
    own_folders = len({masks for _, masks in folders}) == len(folders)
    counts = []
    for part, dataset in sets.items():
        evaluators = _as_list(cfg.get(f"{part}_evaluator") or [])
        if part not in parts or any(metric.get("format_only") for metric in evaluators):
            continue
        with DefaultScope.overwrite_default_scope("mmseg"):
            count = _check_segmentation_set(dataset, num_classes, own_folders, everything)
        _check_channels(cfg, dataset)
        counts.append(f"{count} images for {part}")
    return f"data: {', '.join(counts)}, {num_classes} classes"


def _classes_of_heads(cfg: Config) -> int:
    """The number of classes that every head of a segmentor has."""
    heads = [*_as_list(cfg.model.decode_head), *_as_list(cfg.model.get("auxiliary_head") or [])]
    counts = {head["num_classes"]: head["type"] for head in heads}
    if len(counts) > 1:
        texts = " and ".join(f"{count} in {name}" for count, name in counts.items())
        raise ValueError(f"num_classes is {texts}: every head of a segmentor has the same classes")
    return next(iter(counts))


def _check_channels(cfg: Config, dataset: dict) -> None:
    """Raises if images are loaded with other channels than the backbone takes."""
    wanted = cfg.model.backbone.get("in_chans", 3)
    load = next((step for step in dataset.get("pipeline") or [] if step["type"] == "LoadImageFromFile"), {})
    given = _CHANNELS.get(load.get("color_type", "color"))
    if load and given not in (None, wanted):
        raise ValueError(
            f"model.backbone.in_chans is {wanted}, but LoadImageFromFile gives {given} channels: set its color_type "
            "('color', 'grayscale', or 'unchanged' for what the files have)"
        )


def _check_segmentation_set(config: dict, num_classes: int, own_folder: bool, everything: bool) -> int:
    """How many images there are; with `own_folder`, no other data set has its annotations beside these."""
    root, prefix = Path(config.get("data_root") or ""), config["data_prefix"]
    for key in _FOLDERS:
        folder = root / prefix.get(key, "")
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; set data_root, or dataset.data_prefix.{key}")
    listed = root / config["ann_file"] if config.get("ann_file") else None
    if listed is not None and not listed.exists():
        raise ValueError(f"there is no file {listed}; leave dataset.ann_file out to take every image")
    # Not serialised: mmengine fails on an empty data set there, and says nothing of it.
    dataset = DATASETS.build({**config, "pipeline": [], "serialize_data": False})
    if len(dataset) == 0 and listed is not None:
        raise ValueError(f"{listed} lists no image")
    if len(dataset) == 0:
        folder = root / prefix["img_path"]
        raise ValueError(f"no image ends with {dataset.img_suffix!r} in {folder}{_endings(folder, 'img_suffix')}")
    classes = dataset.metainfo.get("classes")
    if isinstance(classes, str):
        raise ValueError(f"metainfo.classes is the text {classes!r}: write a tuple of names, ({classes!r},) for one")
    if classes is not None and len(classes) != num_classes:
        raise ValueError(
            f"the model has {num_classes} classes (decode_head.num_classes), the data set names {len(classes)}"
        )
    if dataset.reduce_zero_label and dataset.ignore_index != IGNORED:
        raise ValueError(
            f"ignore_index {dataset.ignore_index} with reduce_zero_label: mmseg gives unlabelled pixels {IGNORED} there"
        )
    infos = [dataset.get_data_info(i) for i in range(len(dataset))]
    missing = [info for info in infos if not os.path.isfile(info["seg_map_path"])]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(infos)} images have no annotation; the first is {missing[0]['img_path']}, "
            f"for which {missing[0]['seg_map_path']} is missing"
            + (_endings(root / prefix["seg_map_path"], "seg_map_suffix") if len(missing) == len(infos) else "")
        )
    if own_folder and not os.path.isfile(dataset.ann_file or ""):  # which lists a part of the folder
        _check_lone_masks(root / prefix["seg_map_path"], dataset, infos)
    chosen = infos[:: 1 if everything else max(1, len(infos) // SAMPLE)]
    counting = [_check_pair(info, num_classes, dataset) for info in chosen]
    if not any(counting):
        raise ValueError(f"every pixel of the annotations in {root / prefix['seg_map_path']} is ignored")
    return len(infos)


def _endings(folder: Path, setting: str) -> str:
    """What the names in a folder end with, for a message about a suffix that none of them has."""
    found = Counter(path.suffix for path in folder.rglob("*") if path.is_file() and path.suffix)
    if not found:
        return "; there are no files in it"
    texts = ", ".join(f"{count} with {suffix!r}" for suffix, count in found.most_common(3))
    return f"; the files there end otherwise ({texts}): set dataset.{setting}, which minds capital letters"


def _check_pair(info: dict, num_classes: int, dataset) -> bool:
    """Raises unless an image and its annotation can be read, are of one size, and the labels are classes.

    Returns whether any pixel counts.
    """
    size, _ = picture_size(info["img_path"])
    picture_size(info["seg_map_path"])
    with Image.open(info["seg_map_path"]) as mask:
        labels, kind = np.asarray(mask), mask.format
    if kind == "JPEG":
        raise ValueError(f"{info['seg_map_path']} is a JPEG file, which changes labels near edges: masks must be PNG")
    check_labels(labels, info["seg_map_path"], num_classes, dataset.ignore_index, dataset.reduce_zero_label)
    if labels.shape[::-1] != size:
        raise ValueError(
            f"{info['img_path']} is {size[0]}x{size[1]}, its annotation {info['seg_map_path']} "
            f"{labels.shape[1]}x{labels.shape[0]} (width x height)"
        )
    ignored = labels == dataset.ignore_index
    return not (ignored | (labels == 0) if dataset.reduce_zero_label else ignored).all()


def _check_lone_masks(folder: Path, dataset, infos: list[dict]) -> None:
    """Raises if an annotation has no image."""
    known = {os.path.realpath(info["seg_map_path"]) for info in infos}
    masks = sorted(folder.rglob(f"*{dataset.seg_map_suffix}"))
    lone = [mask for mask in masks if os.path.realpath(mask) not in known]
    if lone:
        raise ValueError(
            f"{len(lone)} of {len(masks)} annotations in {folder} have no image ending with {dataset.img_suffix!r}; "
            f"the first is {lone[0].name}"
        )


def check_labels(
    labels: np.ndarray, path: str, num_classes: int, ignore_index: int = IGNORED, reduce_zero_label: bool = False
) -> None:
    """Raises if a label map holds something else than classes.

    Args:
        labels: `[H, W]`, as stored.
        path: for the message.
        num_classes: classes of the model.
        ignore_index: the label of pixels that do not count.
        reduce_zero_label: 0 stands for "unlabelled", and class c is stored as c + 1.
    """
    if labels.ndim != 2:
        raise ValueError(f"{path}: an annotation has one channel of labels; this one has the shape {labels.shape}")
    largest = num_classes if reduce_zero_label else num_classes - 1
    wrong = [value for value in np.unique(labels).tolist() if value > largest and value != ignore_index]
    if wrong:
        lowest = "1 (0 is unlabelled)" if reduce_zero_label else "0"
        raise ValueError(
            f"{path}: label {wrong[-1]} with num_classes={num_classes}; labels go from {lowest} to {largest}, "
            f"and {ignore_index} is ignored"
        )


def check_detection_data(cfg: Config, parts: Sequence[str] = ("train", "val"), everything: bool = False) -> str:
    """Checks the data of a configuration, where they are in COCO's format; a line for each part of them.

    Raises a `ValueError` with the first thing wrong: a count of classes that the heads do not share, a class that the
    files do not have (mmdet would renumber the others in silence), a missing image, an object that cannot be read.

    Args:
        cfg: the configuration.
        parts: which of its data.
        everything: open every image, not a sample of them.
    """
    lines = []
    for part in parts:
        dataset = (cfg.get(f"{part}_dataloader") or {}).get("dataset") or {}
        while "dataset" in dataset:
            dataset = dataset.dataset  # of a wrapper
        if not dataset.get("ann_file") or "data_prefix" not in dataset:
            continue
        classes = (dataset.get("metainfo") or {}).get("classes") or _classes_of(dataset.type)
        classes = (classes,) if isinstance(classes, str) else classes
        if classes is not None:
            _check_heads(cfg.model, len(classes))
        root = Path(dataset.get("data_root") or "")
        folder = root / dataset.data_prefix.get("img", "")
        masks = _uses_masks(cfg, part, dataset)
        report = check_annotations(root / dataset.ann_file, folder, classes, everything, part != "train", masks)
        _check_channels(cfg, dataset)
        _check_evaluator(cfg, part, root / dataset.ann_file)
        lines.append(f"data for {part}: {report}")
        lines += [f"  {remark}" for remark in report.remarks]
    return "\n".join(lines)


def _uses_masks(cfg: Config, part: str, dataset: dict) -> bool:
    """Whether a part of the data is read, or scored, with masks."""
    read = any(step.get("with_mask") for step in dataset.get("pipeline") or [] if step["type"] == "LoadAnnotations")
    metrics = [
        name for metric in _as_list(cfg.get(f"{part}_evaluator") or []) for name in _as_list(metric.get("metric"))
    ]
    return read or "segm" in metrics


def _check_evaluator(cfg: Config, part: str, ann_file: Path) -> None:
    """Raises if the metrics of a part read another annotation file than its data set."""
    for metric in _as_list(cfg.get(f"{part}_evaluator") or []):
        said = metric.get("ann_file")
        if said and os.path.realpath(said) != os.path.realpath(ann_file):
            raise ValueError(
                f"{part}_evaluator.ann_file is {said}, but {part}_dataloader reads {ann_file}: they must be the same"
            )


def _classes_of(dataset: str) -> tuple[str, ...] | None:
    from mmdet.registry import DATASETS as MMDET_DATASETS

    with DefaultScope.overwrite_default_scope("mmdet"):
        found = MMDET_DATASETS.get(dataset)
    if found is None:
        raise ValueError(f"mmdet knows no data set {dataset!r}; data in COCO's format are a 'CocoDataset'")
    return found.METAINFO.get("classes")


def _check_heads(model: object, count: int, where: str = "model") -> None:
    """Raises if a head has another number of classes than the data; the RPN knows objects alone."""
    entries = model.items() if isinstance(model, dict) else enumerate(model) if isinstance(model, list) else ()
    for key, value in entries:
        name = f"{where}.{key}"
        if key == "num_classes" and value != count:
            raise ValueError(f"{name} is {value}, but the data set names {count} classes")
        if key != "rpn_head":
            _check_heads(value, count, name)

"""What can be wrong with a dataset, found before the first step: each error is one sentence."""

import os
from pathlib import Path

import numpy as np

from ..config import DataConfig, TrainConfig

__all__ = ["check_config", "check_sets", "class_folders", "root_folder", "split_folder"]

SYNONYMS = {"train": ("training",), "val": ("validation", "valid"), "validation": ("val", "valid")}


def root_folder(cfg: DataConfig) -> Path:
    """`data.root` as a folder that exists."""
    if not cfg.root:
        raise ValueError(f"data.source {cfg.source!r} reads a folder: give it as data.root=/path/to/data")
    root = Path(cfg.root).expanduser()
    if not root.is_dir():
        raise ValueError(f"data.root {str(root)!r} is not a folder")
    return root


def split_folder(root: Path, split: str) -> Path:
    """`root/split`, or its usual other name. There is no falling back to `root`: it would hold both splits."""
    for name in (split, *SYNONYMS.get(split, ())):
        if (root / name).is_dir():
            return root / name
    present = sorted(path.name for path in root.iterdir() if path.is_dir())
    raise ValueError(f"no folder {split!r} in {root}; it has: {', '.join(present[:10]) or 'no folders'}")


def class_folders(folder: Path) -> None:
    """Every folder in a split is a class and must hold an image."""
    from timm.data.readers.img_extensions import is_img_extension

    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    if not classes:
        raise ValueError(f"{folder} has no class folders: a folder dataset is split/class/image")
    empty = [path.name for path in classes if not _holds_image(path, is_img_extension)]
    if empty:
        raise ValueError(f"{_count(empty, 'class folder')} in {folder} without an image: {_some(empty)}")


def check_sets(cfg: DataConfig, train, val) -> int:
    """Compares the training and the validation set and returns the number of classes."""
    for name, source in (("training", train), ("validation", val)):
        if not len(source):
            raise ValueError(f"the {name} set has no images")
        if source.labels.min() < 0:
            bad = int(np.argmin(source.labels))
            raise ValueError(f"the {name} set has a label below 0: {source.labels[bad]} for {source.name(bad)}")
    if train.class_names and val.class_names and train.class_names != val.class_names:
        _raise_different(set(train.class_names), set(val.class_names))
    classes = max(int(train.labels.max()) + 1, len(train.class_names or ()))
    if cfg.num_classes is not None:
        if classes > cfg.num_classes:
            raise ValueError(f"data.num_classes is {cfg.num_classes}, but the training set has {classes} classes")
        classes = cfg.num_classes
    if val.labels.max() >= classes:
        bad = int(np.argmax(val.labels))
        raise ValueError(
            f"the validation set has label {val.labels[bad]} ({val.name(bad)}), "
            f"but the training set's labels end at {classes - 1}"
        )
    return classes


def check_config(cfg: TrainConfig) -> None:
    """Settings of the data that contradict each other."""
    data, augment = cfg.data, cfg.augment
    if data.in_chans not in (1, 3):
        raise ValueError(f"data.in_chans is {data.in_chans}; images are read as 1 (grey) or 3 (RGB) channels")
    for name, values in (("mean", data.mean), ("std", data.std)):
        if len(values) != data.in_chans:
            raise ValueError(f"data.{name} has {len(values)} values for {data.in_chans} channels (data.in_chans)")
    if min(data.std) <= 0:
        raise ValueError(f"data.std must be above 0, got {data.std}")
    if not 0 < data.crop_pct <= 1:
        raise ValueError(f"data.crop_pct must be above 0 and at most 1, got {data.crop_pct}")
    for name, values in (("scale", augment.scale), ("ratio", augment.ratio)):
        if len(values) != 2 or not 0 < values[0] <= values[1]:
            raise ValueError(f"augment.{name} must be [low, high] with 0 < low <= high, got {values}")
    if data.in_memory and augment.auto:
        raise ValueError(
            f"augment.auto {augment.auto!r} works on single images, data.in_memory on batches: "
            "set augment.auto=null or data.in_memory=false"
        )
    if augment.shift and not data.in_memory:
        raise ValueError(f"augment.shift {augment.shift} is for data.in_memory=true alone")
    if (cfg.mix.mixup > 0 or cfg.mix.cutmix > 0) and cfg.batch % 2:
        raise ValueError(f"mixup and cutmix pair the images of a batch: batch must be even, got {cfg.batch}")


def _holds_image(folder: Path, is_image) -> bool:
    walk = os.walk(folder, followlinks=True)
    return any(is_image(os.path.splitext(name)[1].lower()) for _, _, files in walk for name in files)


def _raise_different(train: set[str], val: set[str]) -> None:
    parts = []
    if train - val:
        parts.append(f"in train alone: {_some(sorted(train - val))}")
    if val - train:
        parts.append(f"in val alone: {_some(sorted(val - train))}")
    raise ValueError(f"the classes of train and val differ ({'; '.join(parts) or 'the same names in another order'})")


def _count(items: list, noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

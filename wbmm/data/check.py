"""What can be wrong with a dataset, found before the first step: each error is one sentence."""

import logging
from pathlib import Path

import numpy as np

from wbmm.data.config import DataConfig
from wbmm.text import printable, some

__all__ = ["check_sets", "difference", "root_folder", "split_folder"]

SYNONYMS = {"train": ("training",), "val": ("validation", "valid"), "validation": ("val", "valid")}

_logger = logging.getLogger(__name__)


def root_folder(cfg: DataConfig) -> Path:
    """`data.root` as a folder that exists."""
    if not cfg.root:
        raise ValueError(f"data.source {cfg.source!r} reads a folder: give it as data.root=/path/to/data")
    try:
        root = Path(cfg.root).expanduser()
    except RuntimeError:
        raise ValueError(f"data.root {cfg.root!r}: there is no such user") from None
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


def difference(names: list[str], others: list[str], what: str, other: str) -> str:
    """A sentence on how two lists of class names differ, and at which number first."""
    longest = max(len(names), len(others))
    columns = [[f"'{printable(name)}'" for name in group] for group in (names, others)]
    columns = [[*column, *["missing"] * (longest - len(column))] for column in columns]
    pairs = zip(*columns, strict=True)
    place, (left, right) = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
    first = f"number {place} is {left} in {what} and {right} in {other}"
    alone = ((what, sorted(set(names) - set(others))), (other, sorted(set(others) - set(names))))
    parts = [f"in {where} alone: {some(found, 5)}" for where, found in alone if found]
    if not parts:
        return f"the classes of {what} and {other} are the same in another order: {first}"
    return f"{first}: the classes differ ({'; '.join(parts)})"


def check_sets(cfg: DataConfig, train, val) -> int:
    """Compares the training and the validation set and returns the number of classes."""
    for name, source in (("training", train), ("validation", val)):
        if not len(source):
            raise ValueError(f"the {name} set has no images")
        if source.labels.min() < 0:
            bad = int(np.argmin(source.labels))
            raise ValueError(f"the {name} set has a label below 0: {source.labels[bad]} for {source.name(bad)}")
    if train.class_names and val.class_names and train.class_names != val.class_names:
        raise ValueError(difference(train.class_names, val.class_names, "train", "val"))
    classes = _count_classes(cfg, train)
    if val.labels.max() >= classes:
        bad = int(np.argmax(val.labels))
        raise ValueError(
            f"the validation set has label {val.labels[bad]} ({val.name(bad)}), "
            f"but the training set's labels end at {classes - 1}"
        )
    return classes


def _count_classes(cfg: DataConfig, train) -> int:
    """How many classes the training set has, which must be as many as the configuration says."""
    names, classes, present = train.class_names, train.num_classes, np.unique(train.labels)
    largest = int(present[-1])
    if largest >= classes:
        bad = int(np.argmax(train.labels))
        raise ValueError(f"the training set names {classes} classes, but {train.name(bad)} has the label {largest}")
    if len(present) == 1:
        which = repr(names[largest]) if names else f"label {largest}"
        raise ValueError(
            f"the training set has only one class, {which}, for all of its {len(train)} images (the first is "
            f"{train.name(0)}): there is nothing to tell apart; a folder dataset is split/class/image"
        )
    if cfg.num_classes not in (None, classes):
        found = (
            f"{classes} classes ({some(names, 5)})" if names else f"labels up to {classes - 1}, so {classes} classes"
        )
        hint = "" if names or cfg.num_classes < classes else "; if there are more, name them all in classes.txt"
        raise ValueError(
            f"data.num_classes is {cfg.num_classes}, but the training set has {found}: "
            f"set data.num_classes={classes}, or null to count them{hint}"
        )
    if len(present) < classes:
        absent = np.setdiff1d(np.arange(classes), present).tolist()
        told = some([names[number] if names else str(number) for number in absent], 5)
        _logger.warning("the training set has no image of %d of its %d classes: %s", len(absent), classes, told)
    return classes

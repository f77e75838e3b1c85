"""Classes: whether those of a set, of two sets, and of a set and a model agree, and whether a prediction is right."""

import copy
import logging
import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from timm.data import ImageNetInfo
from torch import Tensor

from wbmm.text import printable, some

from .folders import natural_order
from .settings import DataConfig
from .sources import Source

__all__ = ["check_sets", "in_order_of", "in_words", "is_right"]

_logger = logging.getLogger(__name__)


def check_sets(cfg: DataConfig, train: Source, val: Source) -> int:
    """Compares the training and the validation set and returns the number of classes."""
    for name, source in (("training", train), ("validation", val)):
        if not len(source):
            raise ValueError(f"the {name} set has no images")
        if source.labels.min() < 0:
            bad = int(np.argmin(source.labels))
            raise ValueError(f"the {name} set has a label below 0: {source.labels[bad]} for {source.name(bad)}")
    if train.class_names and val.class_names and train.class_names != val.class_names:
        raise ValueError(_difference(train.class_names, val.class_names, "train", "val"))
    classes = _count_classes(cfg, train)
    if val.labels.max() >= classes:
        bad = int(np.argmax(val.labels))
        raise ValueError(
            f"the validation set has label {val.labels[bad]} ({val.name(bad)}), "
            f"but the training set's labels end at {classes - 1}"
        )
    return classes


def _count_classes(cfg: DataConfig, train: Source) -> int:
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


def in_order_of(source: Source, names: list[str] | None, whose: str) -> Source:
    """The source, once its classes are known to be those of a model, in that order; a difference is an error.

    Older models have the classes of a folder in timm's order, without regard to case and with numbers by their value.
    The labels are then numbered as the model's.

    Args:
        source: images with or without names of classes.
        names: the model's, if it has any.
        whose: the model, for the message.
    """
    mine = source.class_names
    if not names or not mine:
        return source
    names = [str(name) for name in names]
    if mine == names:
        return source
    keys = [natural_order(name) for name in names]
    if sorted(mine) != sorted(names) or mine != sorted(mine) or keys != sorted(keys):
        raise ValueError(_difference(mine, names, "the data", whose))
    _logger.warning("%s has its classes in timm's order, as older versions numbered them; so do the labels now", whose)
    place = {name: number for number, name in enumerate(names)}
    other = copy.copy(source)
    other.labels = np.array([place[name] for name in mine], dtype=np.int64)[source.labels]
    other.class_names = list(names)
    return other


def _difference(names: list[str], others: list[str], what: str, other: str) -> str:
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


def is_right(logits: Tensor, labels: Tensor, k: int = 1) -> Tensor:
    """`[N]`: whether the label of each image is among the `k` classes that `logits [N, classes]` are highest for."""
    best = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return (best == labels[:, None]).any(1)


def in_words(names: Sequence[str]) -> list[str]:
    """Names of classes for people: ImageNet's numbers, such as n01443537, as the first of their words."""
    return [_word(name) if re.fullmatch(r"n\d{8}", name) else printable(name) for name in names]


def _word(name: str) -> str:
    return _imagenet_words().get(name, name)


@lru_cache(maxsize=1)
def _imagenet_words() -> dict[str, str]:
    lists = (ImageNetInfo("imagenet-22k"), ImageNetInfo())  # neither has all names of the other
    pairs = ((name, info.label_name_to_description(name)) for info in lists for name in info.label_names())
    return {name: text.partition(",")[0] for name, text in pairs}

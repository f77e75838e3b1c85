"""Folders of pictures: which files are pictures, which class each belongs to, and the order of the classes."""

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from wbmm.text import some

__all__ = [
    "check_class_names",
    "class_images",
    "is_image",
    "list_images",
    "natural_order",
    "number_classes",
    "read_class_names",
    "some",
    "split_folder",
    "visible_folders",
]

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
SYNONYMS = {"train": ("training",), "val": ("validation", "valid"), "validation": ("val", "valid")}
ANNOTATIONS = "val_annotations.txt"  # Tiny ImageNet's validation set: `images/` and a class for each picture
MOST_TEXT = 2**26  # bytes of a list of names; ImageNet's validation set takes 2 MB

_logger = logging.getLogger(__name__)


def split_folder(root: Path, split: str) -> Path:
    """`root/split`, or its usual other name. There is no falling back to `root`: it would hold both splits."""
    for name in (split, *SYNONYMS.get(split, ())):
        if (root / name).is_dir():
            return root / name
    present = sorted(path.name for path in root.iterdir() if path.is_dir())
    raise ValueError(f"no folder {split!r} in {root}; it has: {', '.join(present[:10]) or 'no folders'}")


def is_image(name: str) -> bool:
    """Whether a file is a picture, by its name; `._cat.jpg` is what a Mac leaves beside one."""
    return name.lower().endswith(SUFFIXES) and not os.path.basename(name).startswith("._")


def natural_order(text: str) -> list:
    """Sorts numbers by value and ignores case, as timm does: the order of the images, not of the classes."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text.lower())]


def list_images(folder: str | Path) -> list[str]:
    """The pictures below a folder, however deep.

    Links are followed, and a folder that can be reached in several ways, such as through a loop of links, is listed
    once. FIFOs, sockets and devices are left out with one remark: to open them could wait for ever.
    """
    images, odd = _walk(Path(folder), Path(folder).resolve().parents)
    _remark_odd(odd)
    return images


def class_images(folder: Path, order: list[str] | None = None) -> tuple[list[str], np.ndarray, list[str]]:
    """The images of a split, their class numbers, and the names of the classes.

    The class of an image is the first folder below the split. Classes are numbered by `sorted()` of their names, as
    torchvision does.

    Args:
        folder: the split.
        order: names of the classes that number them instead.
    """
    annotated = (folder / ANNOTATIONS).is_file() and visible_folders(folder) == ["images"]
    found = _annotated(folder) if annotated else _by_folder(folder, order)
    images = [(image, name) for name, inside in found.items() for image in inside]
    images.sort(key=lambda pair: (natural_order(pair[0]), pair[0]))
    chosen, labels, names = number_classes([name for _, name in images], order, str(folder))
    return [images[index][0] for index in chosen], labels, names


def number_classes(classes: list[str], order: list[str] | None, where: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Numbers classes given by name: the indices of the images that have one, their labels, the names in order."""
    present = set(classes)
    names = order or sorted(present)
    others = sorted(present - set(names))
    if others:
        _logger.warning("left out of %s, as the class map does not name them: %s", where, some(others, 5))
    numbers = {name: place for place, name in enumerate(names)}
    labels = np.array([numbers.get(name, -1) for name in classes], dtype=np.int64)
    chosen = np.flatnonzero(labels >= 0)
    return chosen, labels[chosen], list(names)


def read_class_names(path: Path) -> list[str]:
    """The names in a text file, one a line, in the order of the labels."""
    names = [line.strip() for line in _read_text(path).rstrip().splitlines()]
    if not names:
        raise ValueError(f"{path} is empty: it should have the name of a class on each line")
    check_class_names(names, path)
    return names


def check_class_names(names: object, path: Path) -> None:
    """Raises unless these are names of classes: text, none empty, none twice."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: the names of the classes should be a list of texts, got {str(names)[:60]!r}")
    first: dict[str, int] = {}
    for place, name in enumerate(names):
        if not name:
            raise ValueError(f"{path}: class {place} has no name (line {place + 1} is empty)")
        if first.setdefault(name, place) != place:
            raise ValueError(f"{path}: classes {first[name]} and {place} have the same name, {name!r}")


def _by_folder(folder: Path, order: list[str] | None) -> dict[str, list[str]]:
    classes = visible_folders(folder)
    loose = [entry.name for entry in _entries(folder) if is_image(entry.name) and _kind(entry) != "folder"]
    if not classes:
        there = f"; {len(loose)} images lie in it without one" if loose else ""
        raise ValueError(f"{folder} has no class folders: a folder dataset is split/class/image{there}")
    if loose:
        _logger.warning("left out: %d images in %s itself, outside the class folders", len(loose), folder)
    found, odd, split = {}, [], folder.resolve()
    for name in classes:
        found[name], left = _walk(folder / name, (split, *split.parents))
        odd += left
    _remark_odd(odd)
    empty = [name for name, images in found.items() if not images and (order is None or name in order)]
    if empty:
        count = f"{len(empty)} class folder{'' if len(empty) == 1 else 's'}"
        raise ValueError(f"{count} in {folder} without an image: {some(empty, 5)}")
    return found


def _annotated(folder: Path) -> dict[str, list[str]]:
    """Tiny ImageNet's validation set: `images/NAME`, and lines `NAME<tab>CLASS<tab>...` in a file beside it."""
    file, classes = folder / ANNOTATIONS, {}
    for place, line in enumerate(_read_text(file).splitlines(), 1):
        name, tab, rest = line.partition("\t")
        if not tab or not name or not rest.partition("\t")[0]:
            raise ValueError(f"{file}, line {place}: expected a picture, a tab and its class, got {line[:60]!r}")
        classes[name] = rest.partition("\t")[0]
    images = {os.path.basename(image): image for image in list_images(folder / "images")}
    for names, what in ((images.keys() - classes, "without a line"), (classes.keys() - images, "without a picture")):
        if names:
            raise ValueError(f"{file} and the folder images beside it differ: {what}: {some(sorted(names), 5)}")
    found: dict[str, list[str]] = {}
    for name, image in images.items():
        found.setdefault(classes[name], []).append(image)
    return found


def visible_folders(folder: Path) -> list[str]:
    """The folders in a folder, in order, without those that a system or an editor leaves behind."""
    return [entry.name for entry in _entries(folder) if _kind(entry) == "folder" and not _is_left_behind(entry.name)]


def _is_left_behind(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _entries(folder: str | Path) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise ValueError(f"cannot read the folder {folder}: {error.strerror}") from None


def _walk(folder: Path, around: Iterable[Path]) -> tuple[list[str], list[str]]:
    """The pictures below a folder, and what is named like one but is neither a regular file nor a folder.

    Links back to the folders `around` it are not followed: they would list what is beside it.
    """
    images, odd, waiting = [], [], [str(folder)]
    seen = {_identity(place) for place in around}
    while waiting:
        place = waiting.pop()
        if (identity := _identity(place)) in seen:
            continue
        seen.add(identity)
        inside = []
        for entry in _entries(place):
            kind = _kind(entry)
            if kind == "folder":
                inside.append(entry.path)
            elif is_image(entry.name):
                (odd if kind == "odd" else images).append(entry.path)
        waiting += reversed(inside)
    return images, odd


def _kind(entry: os.DirEntry) -> str:
    """`folder`, `file` or `odd`. A link that leads nowhere is a file: whoever reads it names it."""
    try:
        if entry.is_dir():
            return "folder"
        return "file" if entry.is_file() or not os.path.exists(entry.path) else "odd"
    except OSError:  # a link to itself
        return "file"


def _identity(folder: str | Path) -> tuple[int, int]:
    try:
        status = os.stat(folder)
    except OSError as error:
        raise ValueError(f"cannot read the folder {folder}: {error.strerror}") from None
    return status.st_dev, status.st_ino


def _remark_odd(odd: list[str]) -> None:
    if odd:
        _logger.warning("left out, as they are no regular files (FIFO, socket or device): %s", some(odd, 3))


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    if path.stat().st_size > MOST_TEXT:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, too many for a list of names")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None

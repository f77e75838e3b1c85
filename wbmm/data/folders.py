"""Folders and lists of pictures: which files are pictures, the class of each, the order of classes, and kept splits."""

import csv
import hashlib
import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wbmm.io.atomic import replacing
from wbmm.text import some

__all__ = [
    "PictureList",
    "check_class_names",
    "class_images",
    "is_image",
    "list_images",
    "locate",
    "natural_order",
    "number_classes",
    "number_labels",
    "read_class_names",
    "read_list",
    "split_by_class",
    "split_folder",
    "visible_folders",
    "write_list",
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
        _logger.warning("skipped, as they are not regular files (FIFO, socket or device): %s", some(odd, 3))


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    if path.stat().st_size > MOST_TEXT:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, too many for a list of names")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None


COLUMNS = {
    "path": ("path", "file", "filename", "image", "image_path", "filepath"),
    "label": ("label", "class", "category", "target", "class_name"),
    "split": ("split", "set", "subset"),
}
LEAST_IN_CLASS = 2  # one to train on and one to validate on
MOST_BYTES = 2**30


@dataclass
class PictureList:
    """Pictures with the names of their classes.

    Attributes:
        paths: relative to the data's folder, or absolute.
        labels: one name a picture.
        splits: one a picture, `train` or `val` for instance; None where the list has no such column.
    """

    paths: list[str]
    labels: list[str]
    splits: list[str] | None = None

    def of_split(self, split: str) -> "PictureList":
        """The pictures of one split; it may have its usual other name."""
        if self.splits is None:
            raise ValueError(f"the list has no column split, so there is no split {split!r} in it")
        for name in (split, *SYNONYMS.get(split, ())):
            chosen = [place for place, other in enumerate(self.splits) if other == name]
            if chosen:
                return PictureList([self.paths[i] for i in chosen], [self.labels[i] for i in chosen])
        raise ValueError(f"the list has no split {split!r}; it has: {some(sorted(set(self.splits)), 5)}")

    @property
    def class_names(self) -> list[str]:
        """Every class of the list in order: by `sorted()`, or by value where all are whole numbers."""
        names = sorted(set(self.labels))
        return sorted(names, key=int) if all(name.isdecimal() for name in names) else names


def read_list(path: Path) -> PictureList:
    """Reads a CSV file with a column of paths, one of labels and, if it likes, one of splits.

    They go by their names in the first line (`path`, `label`, `split` or the usual others). Without such a line they
    are the first, the second and the third column.
    """
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, too many for a list of pictures")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file) if any(map(str.strip, row))]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8: {error}") from None
    if not rows:
        raise ValueError(f"{path} is empty: it should have lines such as path,label")
    columns, first = _columns(rows[0], path)
    for number, row in enumerate(rows[first:], first + 1):
        if len(row) <= max(columns.values()) or not row[columns["path"]] or not row[columns["label"]]:
            raise ValueError(f"{path}, line {number}: expected a path and a label, got {','.join(row)[:80]!r}")
    body = rows[first:]
    if not body:
        raise ValueError(f"{path} has a first line of names and no picture")
    take = {name: [row[place] for row in body] for name, place in columns.items()}
    return PictureList(take["path"], take["label"], take.get("split"))


def _columns(first_row: list[str], path: Path) -> tuple[dict[str, int], int]:
    """Where each column stands, and the number of the first line with a picture."""
    names = [cell.lower() for cell in first_row]
    found = {}
    for column, known in COLUMNS.items():
        place = next((names.index(name) for name in known if name in names), None)
        if place is not None:
            found[column] = place
    if {"path", "label"} <= found.keys():
        return found, 1
    if len(first_row) >= 2 and is_image(first_row[0]):
        return {"path": 0, "label": 1} | ({"split": 2} if len(first_row) > 2 else {}), 0
    raise ValueError(
        f"{path}: its first line is {','.join(first_row)[:80]!r}; expected the names of its columns, path and label "
        "(and split), or a picture and its label"
    )


def write_list(pictures: PictureList, path: Path) -> None:
    """Writes a list with its splits, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "split"])
        writer.writerows(zip(pictures.paths, pictures.labels, pictures.splits, strict=True))


def split_by_class(pictures: PictureList, share: float, seed: int) -> PictureList:
    """The same pictures with `share` of each class, and at least one, for validation.

    Which ones is a matter of the seed and of their paths alone: other pictures beside them, or another order, change
    nothing but the number that is drawn.
    """
    places: dict[str, list[int]] = {}
    for place, label in enumerate(pictures.labels):
        places.setdefault(label, []).append(place)
    few = [label for label, found in places.items() if len(found) < LEAST_IN_CLASS]
    if few:
        raise ValueError(
            f"too few pictures to hold some back for validation: {some(sorted(few), 5)} "
            f"{'has' if len(few) == 1 else 'have'} one alone; a class needs {LEAST_IN_CLASS}"
        )
    splits = ["train"] * len(pictures.paths)
    for found in places.values():
        count = min(max(1, round(share * len(found))), len(found) - 1)
        for place in sorted(found, key=lambda place: _draw(seed, pictures.paths[place]))[:count]:
            splits[place] = "val"
    return PictureList(pictures.paths, pictures.labels, splits)


def _draw(seed: int, path: str) -> bytes:
    return hashlib.sha256(f"{seed}:{path}".encode()).digest()


def locate(root: Path, paths: Sequence[str]) -> list[str]:
    """The paths below a folder; those that are not there are an error that names the first."""
    places = [str(root / path) for path in paths]
    absent = [place for place in places if not Path(place).exists()]
    if absent:
        raise ValueError(
            f"{len(absent)} of the {len(places)} pictures of the list do not exist, e.g. {some(absent, 2)}; "
            f"paths are relative to {root}"
        )
    return places


def number_labels(labels: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """`[N]`: the numbers of the classes."""
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers[label] for label in labels], dtype=np.int64)

"""Lists of pictures: a CSV file of paths and labels, and the split into training and validation that is kept as one."""

import csv
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wbmm.io.atomic import replacing
from wbmm.text import some

from .folders import SYNONYMS, is_image

__all__ = ["PictureList", "locate", "number_labels", "read_list", "split_by_class", "write_list"]

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
            "paths are relative to data.root"
        )
    return places


def number_labels(labels: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """`[N]`: the numbers of the classes."""
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers[label] for label in labels], dtype=np.int64)

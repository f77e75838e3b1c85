"""Masks of any kind, and lists of classes: which values or colours there are, and what they are called."""

import csv
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from wbmm.progress import progress_bar
from wbmm.text import printable

__all__ = ["ClassList", "Survey", "find_class_list", "read_classes", "read_mask", "survey_masks"]

CLASS_FILES = ("classes.json", "classes.txt", "labels.txt", "label_colors.txt", "class_dict.csv", "classes.csv")
MOST_VALUES = 256  # different labels: more are colours that were blurred, by JPEG or by scaling

Label = int | tuple[int, int, int]  # what a pixel of a mask holds


@dataclass
class ClassList:
    """Names of classes, and which value or colour each has in the masks.

    Attributes:
        names: in the order of the classes.
        labels: what a pixel of class i holds; None where that is i.
        ignore: what a pixel that does not count holds; None where nothing is said.
    """

    names: list[str]
    labels: list[Label] | None = None
    ignore: Label | None = None

    @property
    def plain(self) -> bool:
        """Whether class i has the label i."""
        return self.labels is None or self.labels == list(range(len(self.names)))


def find_class_list(root: Path) -> Path | None:
    """The list of classes in a folder, under one of the usual names."""
    return next((root / name for name in CLASS_FILES if (root / name).is_file()), None)


def read_classes(path: Path) -> ClassList:
    """A list of classes.

    JSON: `["sky", ...]`, `{"classes": [...], "ignore": 11}`, `{"sky": 0}` or `{"sky": [128, 128, 128]}`. Text: a name a
    line, or `R G B name`; a CSV file with the columns name, r, g, b.
    """
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    try:
        text = path.read_text(encoding="utf-8")
        found = _from_json(json.loads(text)) if path.suffix == ".json" else _from_text(text)
    except (json.JSONDecodeError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as a list of classes ({error})") from None
    if found is None or not found.names:
        raise ValueError(
            f"{path}: no list of classes; expected a name a line, 'R G B name', a CSV file with name, r, g, b, or JSON "
            '["a", "b"], {"a": 0} or {"a": [128, 0, 0]}'
        )
    twice = [name for name, count in Counter(found.names).items() if count > 1]
    if twice:
        raise ValueError(f"{path}: the class {printable(twice[0])!r} is there twice")
    return found


def _from_json(contents: object) -> ClassList | None:
    if isinstance(contents, dict) and isinstance(contents.get("classes"), list | dict):
        inner = _from_json(contents["classes"])
        ignore = contents.get("ignore", contents.get("ignore_index"))
        return inner and ClassList(inner.names, inner.labels, _label(ignore))
    if isinstance(contents, list) and all(isinstance(name, str) for name in contents):
        return ClassList(list(contents))
    if not isinstance(contents, dict):
        return None
    if all(isinstance(name, str) and str(key).isdecimal() for key, name in contents.items()):  # {"0": "sky"}
        pairs = sorted((int(key), name) for key, name in contents.items())
        return ClassList([name for _, name in pairs], [value for value, _ in pairs])
    labels = {name: _label(value) for name, value in contents.items()}
    if None in labels.values():
        return None
    numbers = all(isinstance(label, int) for label in labels.values())
    names = sorted(labels, key=labels.get) if numbers else list(labels)
    return ClassList(names, [labels[name] for name in names])


def _label(value: object) -> Label | None:
    if type(value) is int:
        return value
    if isinstance(value, list) and len(value) == 3 and all(type(part) is int and 0 <= part <= 255 for part in value):
        return tuple(value)
    return None


def _from_text(text: str) -> ClassList | None:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines:
        return None
    header = [cell.strip().lower() for cell in next(csv.reader(lines[:1]))]
    if {"name", "r", "g", "b"} <= set(header):
        rows = [dict(zip(header, row, strict=False)) for row in csv.reader(lines[1:])]
        return ClassList([row["name"].strip() for row in rows], [tuple(int(row[c]) for c in "rgb") for row in rows])
    coloured = [re.fullmatch(r"(\d{1,3})[\s,]+(\d{1,3})[\s,]+(\d{1,3})[\s,]+(\S.*)", line) for line in lines]
    if all(coloured):
        return ClassList([match[4] for match in coloured], [tuple(map(int, match.groups()[:3])) for match in coloured])
    return ClassList(lines)


def read_mask(path: str | Path) -> np.ndarray:
    """`[H, W]` of label numbers, or `[H, W, 3]` of colours."""
    try:
        with Image.open(path) as image:
            image.load()
            if image.mode in ("RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV"):
                return np.asarray(image.convert("RGB"))
            pixels = np.asarray(image.convert("L") if image.mode == "LA" else image)
    except Exception as error:  # PIL raises OSError, SyntaxError, DecompressionBombError, struct.error, ...
        raise ValueError(f"{path} is no readable image ({error})") from None
    if pixels.ndim != 2 or pixels.dtype.kind == "f":
        raise ValueError(f"{path}: a mask of shape {pixels.shape} and type {pixels.dtype}; expected labels or colours")
    return pixels.astype(np.int64)


@dataclass
class Survey:
    """What the pixels of some masks hold.

    Attributes:
        pixels: label or colour to the number of pixels.
        colours: whether these are colours.
        files: how many masks were read.
        example: a mask that holds the label, for messages.
    """

    pixels: Counter = field(default_factory=Counter)
    colours: bool = False
    files: int = 0
    example: dict = field(default_factory=dict)

    @property
    def labels(self) -> list[Label]:
        return sorted(self.pixels)


def survey_masks(paths: Sequence[Path], most: int | None = 400) -> Survey:
    """Reads masks, or about `most` of them spread over all, and counts what is in them."""
    chosen = paths if most is None else paths[:: max(1, len(paths) // most)]
    found, kinds = Survey(files=len(chosen)), {}
    with progress_bar(len(chosen), "masks") as advance:
        for path in chosen:
            mask = read_mask(path)
            kinds.setdefault(mask.ndim == 3, path)
            if len(kinds) > 1:
                raise ValueError(f"{kinds[True]} holds colours and {kinds[False]} numbers: masks must be of one kind")
            labels, counts = np.unique(pack_colours(mask).ravel(), return_counts=True)
            for label, count in zip(labels.tolist(), counts.tolist(), strict=True):
                key = unpack_colour(label) if mask.ndim == 3 else label
                found.pixels[key] += count
                found.example.setdefault(key, path)
            if len(found.pixels) > MOST_VALUES:
                raise ValueError(
                    f"{path}: more than {MOST_VALUES} different {'colours' if mask.ndim == 3 else 'values'} in the "
                    "masks up to this one. Were they saved as JPEG, or scaled? Masks need exact values, as in PNG files"
                )
            advance(1)
    found.colours = True in kinds
    return found


def pack_colours(mask: np.ndarray) -> np.ndarray:
    """`[H, W]` with a number a pixel: labels as they are, colours as red * 65536 + green * 256 + blue."""
    if mask.ndim == 2:
        return mask
    red, green, blue = (mask[..., i].astype(np.int64) for i in range(3))
    return (red << 16) + (green << 8) + blue


def unpack_colour(number: int) -> tuple[int, int, int]:
    return number >> 16, number >> 8 & 255, number & 255

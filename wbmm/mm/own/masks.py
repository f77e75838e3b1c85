"""A folder of images and masks: which belong together, what the masks hold, and what their classes are called."""

import csv
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from wbmm.data.folders import SUFFIXES, PictureList, split_by_class
from wbmm.progress import progress_bar
from wbmm.text import printable

__all__ = [
    "MOST_VALUES",
    "SAMPLE",
    "ClassList",
    "FoundMasks",
    "Pairs",
    "Survey",
    "find_class_list",
    "find_masks",
    "read_classes",
    "read_mask",
    "split_names",
    "survey_masks",
    "typical_size",
]

LAYOUTS = (
    "images/train with masks/train (or annotations, labels, ann_dir, ...), train/images with train/masks, train with "
    "trainannot or train_labels, images with masks (a part is then held back), or VOC's JPEGImages with "
    "SegmentationClass"
)
MASK_WORDS = re.compile(r"mask|annot|ann_dir|label|segmentationclass|target|(^|[/_-])gt")
SKIPPED = re.compile(r"segmentationobject|instance|visual|overlay|colou?r|unlabel")
PARTS = ("train", "val", "test")  # what a folder's name starts with
DEEPEST = 3  # folders below the root
SAMPLE = 50  # images whose size is looked at
CLASS_FILES = ("classes.json", "classes.txt", "labels.txt", "label_colors.txt", "class_dict.csv", "classes.csv")
MOST_VALUES = 256  # different labels: more are colours that were blurred, by JPEG or by scaling

Label = int | tuple[int, int, int]  # what a pixel of a mask holds


@dataclass
class Pairs:
    """Images and their masks.

    Attributes:
        images, masks: folders.
        img_suffix, mask_suffix: what follows the name that an image and its mask share.
        names: those names, sorted.
        lone_images: images without a mask.
        lone_masks: masks without an image.
    """

    images: Path
    masks: Path
    img_suffix: str
    mask_suffix: str
    names: list[str]
    lone_images: list[str] = field(default_factory=list)
    lone_masks: list[str] = field(default_factory=list)

    def mask_paths(self, names: list[str] | None = None) -> list[Path]:
        return [self.masks / f"{name}{self.mask_suffix}" for name in (self.names if names is None else names)]


@dataclass
class FoundMasks:
    """What a folder holds.

    Attributes:
        train, val: images and masks of each part; the same object where one folder holds both.
        lists: names of each part, where they share a folder; None where folders tell.
        how: how the parts were told apart, in words.
        test: images and masks of a third part, if there is one.
    """

    train: Pairs
    val: Pairs
    lists: dict[str, list[str]] | None
    how: str
    test: Pairs | None = None

    def names(self, part: str) -> list[str]:
        return self.lists[part] if self.lists else getattr(self, part).names


def find_masks(root: Path, held_back: float = 0.2) -> FoundMasks:
    """Looks for images and masks in a folder; what is missing is a `ValueError` that says which layouts are known.

    Args:
        root: the folder.
        held_back: share of the images for validation, where nothing tells which ones are; drawn by their names.
    """
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}")
    pairs = _pairs_of_parts(root)
    if not pairs:
        raise ValueError(f"no folder of images with a folder of masks beside it in {root}; known are {LAYOUTS}")
    if "train" not in pairs and None not in pairs:
        found = ", ".join(f"{pair.images} ({part})" for part, pair in pairs.items())
        raise ValueError(f"images with masks are in {found}, but there is nothing to train on; known are {LAYOUTS}")
    train = pairs.get("train") or pairs[None]
    if "train" in pairs and ("val" in pairs or "test" in pairs):
        val = pairs.get("val") or pairs["test"]
        how = f"folders {_name(train.images, root)} and {_name(val.images, root)}"
        return FoundMasks(train, val, None, how, pairs.get("test") if "val" in pairs else None)
    lists = _voc_lists(root, train)
    if lists:
        return FoundMasks(train, train, lists, "lists in ImageSets/Segmentation")
    lists = split_names(train.names, held_back)
    how = f"{len(lists['val'])} of {len(train.names)} are held back for validation, drawn by their names"
    return FoundMasks(train, train, lists, how)


def split_names(names: list[str], held_back: float) -> dict[str, list[str]]:
    """`train` and `val`: which names are held back is a matter of the names alone."""
    split = split_by_class(PictureList(names, ["image"] * len(names)), held_back, seed=0)
    return {part: [n for n, s in zip(names, split.splits, strict=True) if s == part] for part in ("train", "val")}


def _name(folder: Path, root: Path) -> str:
    return folder.relative_to(root).as_posix() if folder != root else "."


def _pairs_of_parts(root: Path) -> dict[str | None, Pairs]:
    """For each part, and None for folders of no part, the folders that match best."""
    folders = [folder for folder in _folders(root) if _count_images(folder)]
    images, masks = [], []
    for folder in folders:
        words = folder.relative_to(root).as_posix().lower()
        if not SKIPPED.search(words):
            (masks if MASK_WORDS.search(words) else images).append(folder)
    found: dict[str | None, Pairs] = {}
    for image_folder in images:
        part = _part(image_folder, root)
        candidates = [folder for folder in masks if _part(folder, root) == part] or [image_folder]
        for mask_folder in candidates:
            pair = _match(image_folder, mask_folder)
            if pair is not None and (part not in found or len(pair.names) > len(found[part].names)):
                found[part] = pair
    return found


def _folders(root: Path) -> list[Path]:
    found, level = [root], [root]
    for _ in range(DEEPEST):
        level = sorted(sub for folder in level for sub in folder.iterdir() if sub.is_dir() and sub.name[0] != ".")
        found += level
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in (*SUFFIXES, ".gif") and p.name[0] != ".")


def _count_images(folder: Path) -> int:
    return len(_files(folder))


def _part(folder: Path, root: Path) -> str | None:
    words = [word.lower() for word in folder.relative_to(root).parts]
    return next((part for part in PARTS if any(word.startswith(part) for word in words)), None)


def _match(images: Path, masks: Path) -> Pairs | None:
    """Images and masks whose names agree but for an ending, such as `_mask`; None if none do."""
    files = _files(images)
    if images == masks:  # photographs as JPEG, masks as PNG beside them
        files, others = ([p for p in files if (p.suffix.lower() == ".png") == png] for png in (False, True))
    else:
        others = _files(masks)
    if not files or not others:
        return None
    names = {path.stem for path in files}
    some_names = sorted(names)[:20]
    endings = {o.name.removeprefix(name) for name in some_names for o in others if o.name.startswith(name)}
    if not endings:
        return None
    have = {path.name for path in others}
    mask_suffix = max(endings, key=lambda ending: (sum(name + ending in have for name in names), -len(ending)))
    matched = {name for name in names if name + mask_suffix in have}
    suffixes = Counter(path.suffix for path in files if path.stem in matched)
    if len(suffixes) > 1:
        text = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common())
        raise ValueError(f"{images} holds images of several kinds ({text}): convert them to one, as mmseg reads one")
    suffix = next(iter(suffixes))
    return Pairs(
        images,
        masks,
        suffix,
        mask_suffix,
        sorted(matched),
        sorted(path.name for path in files if path.stem not in matched),
        sorted(name for name in have - {name + mask_suffix for name in matched} if name.endswith(mask_suffix)),
    )


def _voc_lists(root: Path, pair: Pairs) -> dict[str, list[str]] | None:
    for folder in (root, pair.images.parent):
        files = {part: folder / "ImageSets" / "Segmentation" / f"{part}.txt" for part in ("train", "val")}
        if all(file.is_file() for file in files.values()):
            return {part: file.read_text().split() for part, file in files.items()}
    return None


def typical_size(paths: list[Path]) -> tuple[int, int]:
    """(width, height) in the middle of the sizes of some images, the long side first where most are lying."""
    sizes = []
    for path in paths[:: max(1, len(paths) // SAMPLE)]:
        try:
            with Image.open(path) as image:
                sizes.append(image.size)
        except Exception as error:
            raise ValueError(f"{path} is no readable image ({error})") from None
    return tuple(sorted(size[side] for size in sizes)[len(sizes) // 2] for side in (0, 1))


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


def survey_masks(paths: Sequence[Path], most: int | None = 400, most_values: int = MOST_VALUES) -> Survey:
    """Reads masks, or about `most` of them spread over all, and counts what is in them.

    More than `most_values` different labels or colours are a `ValueError`.
    """
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
            if len(found.pixels) > most_values:
                raise ValueError(
                    f"{path}: more than {most_values} different {'colours' if mask.ndim == 3 else 'values'} in the "
                    "masks up to this one. Were they saved as JPEG, or scaled? Masks need exact values, as in PNG "
                    "files; tools/prepare_seg.py --rest nearest takes the nearest of a list of classes"
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

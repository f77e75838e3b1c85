"""A folder with annotations in COCO's format: which files they are, and where their images are."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from wbmm.io.atomic import atomic_path

from ..coco import read_annotations
from .masks import split_names

__all__ = ["FoundObjects", "find_objects", "typical_object", "write_split"]

DEEPEST = 2  # folders below the root
LAYOUTS = "annotations/train.json and annotations/val.json, or one JSON file, with images in train and val, or images"
PARTS = ("train", "val", "test")


@dataclass
class FoundObjects:
    """What a folder holds.

    Attributes:
        json: the annotation file of each part, `train` and `val`; the same one where it is to be split.
        images: the folder of the images of each part.
        contents: of the files, `read_annotations` of each part.
        split: names of images of each part, where one file holds both; None where files tell.
        how: how the parts were told apart, in words.
    """

    json: dict[str, Path]
    images: dict[str, Path]
    contents: dict[str, dict]
    split: dict[str, list[str]] | None
    how: str

    @property
    def classes(self) -> list[str]:
        return [str(category.get("name")) for category in self.contents["train"]["categories"]]


def find_objects(root: Path, held_back: float = 0.2) -> FoundObjects:
    """Looks for annotations in COCO's format; what is missing is a `ValueError` that says which layouts are known.

    Args:
        root: the folder.
        held_back: share of the images for validation, where one file holds all; drawn by their names.
    """
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}")
    contents = {path: found for path in _json_files(root) if (found := _annotations(path)) is not None}
    if not contents:
        raise ValueError(f"no JSON file in COCO's format (images, annotations, categories) in {root}; known: {LAYOUTS}")
    parts: dict[str | None, Path] = {}
    for path in contents:
        parts.setdefault(_part(path, root), path)
    train = parts.get("train") or parts.get(None)
    if train is None:
        names = ", ".join(str(path.relative_to(root)) for path in contents)
        raise ValueError(f"{root} has {names}, but nothing to train on; known: {LAYOUTS}")
    val = parts.get("val") or parts.get("test")
    split, how = None, ""
    if val is None:
        names = sorted(image["file_name"] for image in contents[train]["images"])
        split, val = split_names(names, held_back), train
        how = f"{len(split['val'])} of {len(names)} are held back for validation, drawn by their names"
    files = {"train": train, "val": val}
    how = how or f"{train.relative_to(root)} and {val.relative_to(root)}"
    images = {part: _images_of(root, path, contents[path], part) for part, path in files.items()}
    return FoundObjects(files, images, {part: contents[path] for part, path in files.items()}, split, how)


def _json_files(root: Path) -> list[Path]:
    found = []
    for depth in range(DEEPEST + 1):
        found += sorted(root.glob("*/" * depth + "*.json"))
    # COCO itself has captions and keypoints beside its instances.
    preferred = [path for path in found if path.name.startswith("instances")]
    return preferred or found


def _annotations(path: Path) -> dict | None:
    try:
        return read_annotations(path)
    except ValueError:
        return None


def _part(path: Path, root: Path) -> str | None:
    words = path.relative_to(root).with_suffix("").as_posix().lower().replace("-", "_").replace("/", "_").split("_")
    return next((part for part in PARTS if any(word.startswith(part) for word in words)), None)


def _images_of(root: Path, path: Path, contents: dict, part: str) -> Path:
    """The folder in which the images of a file are, tried by the first of them."""
    if not contents["images"]:
        raise ValueError(f"{path}: there are no images in it")
    first = contents["images"][0].get("file_name")
    stem = path.stem.removeprefix("instances_")
    names = dict.fromkeys([stem, part, "valid", "validation", "images", ".", "JPEGImages"])
    bases = [root, root / "images", path.parent, path.parent.parent]
    for folder in (base / name for base in bases for name in names):
        if first and (folder / first).is_file():
            return folder.resolve()
    raise ValueError(f"{path} names the image {first}, which is neither in {root / part} nor in {root / 'images'}")


def typical_object(found: FoundObjects, scale: tuple[int, int]) -> float:
    """The median of the sides of objects (square roots of their boxes' areas), in pixels of the scaled images."""
    contents = found.contents["train"]
    factors = {}
    for image in contents["images"]:
        sides = (image.get("width") or 1, image.get("height") or 1)
        factors[image["id"]] = min(max(scale) / max(sides), min(scale) / min(sides))
    sides = [
        (max(box[2], 0) * max(box[3], 0)) ** 0.5 * factors.get(annotation.get("image_id"), 1)
        for annotation in contents["annotations"]
        if isinstance(box := annotation.get("bbox"), list) and len(box) == 4
    ]
    return statistics.median(sides) if sides else 0.0


def write_split(found: FoundObjects, folder: Path) -> dict[str, Path]:
    """Writes an annotation file for each part of a split; returns them."""
    files = {}
    for part, names in found.split.items():
        contents, chosen = found.contents[part], set(names)
        images = [image for image in contents["images"] if image["file_name"] in chosen]
        ids = {image["id"] for image in images}
        objects = [entry for entry in contents["annotations"] if entry.get("image_id") in ids]
        files[part] = (folder / f"{part}.json").absolute()
        with atomic_path(files[part], force=True) as temporary:
            temporary.write_text(json.dumps({**contents, "images": images, "annotations": objects}))
    return files

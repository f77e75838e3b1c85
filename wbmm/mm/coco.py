"""Annotation files in COCO's format: read, and checked before training reads them."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from wbmm.fields import is_number
from wbmm.progress import progress_bar

__all__ = ["CocoReport", "check_annotations", "picture_size", "read_annotations"]

SAMPLE = 200  # images whose files are opened
ORIENTATION = 0x0112  # EXIF's tag
LEAST_BOXES, OVER_THE_EDGE = 3, 0.1  # from how many boxes, and from which share of them, their kind is doubted


@dataclass
class CocoReport:
    """What is in a file.

    Attributes:
        images, objects, crowds, categories: how many there are.
        empty: images without an object.
        remarks: what training leaves out or bears, a sentence each.
    """

    images: int
    objects: int
    crowds: int
    categories: int
    empty: int
    remarks: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.images} images ({self.empty} without objects), {self.objects} objects ({self.crowds} crowds) of "
            f"{self.categories} categories"
        )


def read_annotations(path: Path) -> dict:
    """The contents of an annotation file, with the three lists that it must have."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such annotation file")
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not readable JSON, perhaps cut off ({error})") from None
    for key in ("images", "annotations", "categories"):
        if not isinstance(contents, dict) or not isinstance(contents.get(key), list):
            raise ValueError(f"{path}: no list {key!r}; COCO's format has images, annotations and categories")
    return contents


def check_annotations(
    path: Path,
    folder: Path,
    classes: Sequence[str] | None = None,
    everything: bool = False,
    evaluated: bool = False,
    masks: bool = True,
) -> CocoReport:
    """Checks one annotation file and its folder of images; a `ValueError` names the first thing that is wrong.

    Args:
        path: the annotation file.
        folder: where its images are.
        classes: the names that the model has, if known; each must be a category of the file.
        everything: open every image to compare its size, not a sample of them.
        evaluated: COCO's metrics will read it, which fail on what training merely leaves out.
        masks: they are trained or tested on, so that every object needs one.
    """
    contents = read_annotations(path)
    images = _unique(contents["images"], path, "image")
    categories = _unique(contents["categories"], path, "category")
    _unique(contents["annotations"], path, "annotation")
    _check_categories(categories, path, classes)
    _check_images(images, path, folder, everything)
    remarks = _check_objects(contents["annotations"], images, categories, path, evaluated, masks)
    known = {number for number, category in categories.items() if classes is None or category["name"] in classes}
    unused = [annotation for annotation in contents["annotations"] if annotation["category_id"] not in known]
    if len(unused) == len(contents["annotations"]):
        raise ValueError(f"{path}: there are no objects in it, or none of the configuration's classes")
    if unused:
        remarks.append(f"{len(unused)} objects are of categories that are no classes of the configuration: left out")
    filled = {annotation["image_id"] for annotation in contents["annotations"]}
    return CocoReport(
        images=len(images),
        objects=len(contents["annotations"]),
        crowds=sum(bool(annotation.get("iscrowd")) for annotation in contents["annotations"]),
        categories=len(categories),
        empty=len(images.keys() - filled),
        remarks=remarks,
    )


def _unique(entries: list, path: Path, what: str) -> dict:
    """The entries by their ids."""
    if any(not isinstance(entry, dict) or "id" not in entry for entry in entries):
        raise ValueError(f"{path}: an entry of the {what} list has no id")
    twice = [number for number, count in Counter(entry["id"] for entry in entries).items() if count > 1]
    if twice:
        raise ValueError(f"{path}: {what} id {twice[0]} is there twice")
    return {entry["id"]: entry for entry in entries}


def _check_categories(categories: dict, path: Path, classes: Sequence[str] | None) -> None:
    if not categories:
        raise ValueError(f"{path}: there are no categories in it")
    names = [str(category.get("name")) for category in categories.values()]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{path}: the category name {twice[0]!r} is there twice")
    if classes is None:
        return
    missing = [name for name in classes if name not in names]
    if missing:
        raise ValueError(
            f"{path}: no category is called {missing[0]!r}, which is a class of the configuration; the file has "
            f"{', '.join(map(repr, names[:10]))}{' ...' if len(names) > 10 else ''}: set metainfo.classes to its names"
        )
    order = [name for name in names if name in classes]
    if order != list(classes):
        raise ValueError(
            f"{path}: its categories come in the order {', '.join(map(repr, order[:10]))}, the configuration's classes "
            f"in another ({', '.join(map(repr, list(classes)[:10]))}): MMDetection numbers them as the file does and "
            "names them as the configuration does, so give metainfo.classes in the file's order"
        )


def _check_images(images: dict, path: Path, folder: Path, everything: bool) -> None:
    if not images:
        raise ValueError(f"{path}: there are no images in it")
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}, where the images of {path.name} should be")
    for image in images.values():
        unusable = [key for key in ("file_name", "width", "height") if not image.get(key)]
        if unusable:
            raise ValueError(f"{path}: image {image['id']} has no {unusable[0]}")
    missing = [image["file_name"] for image in images.values() if not (folder / image["file_name"]).is_file()]
    if missing:
        raise ValueError(f"{len(missing)} of {len(images)} images of {path.name} are missing in {folder}; the first is "
                         f"{missing[0]}")  # fmt: skip
    entries = list(images.values())
    chosen = entries if everything else entries[:: max(1, len(entries) // SAMPLE)]
    with progress_bar(len(chosen), f"images of {path.stem}") as advance:
        for entry in chosen:
            _check_size(entry, folder / entry["file_name"])
            advance(1)


def picture_size(file: str | Path) -> tuple[tuple[int, int], bool]:
    """(width, height) of an image as the loaders of training give it, and whether its EXIF data turned it.

    The whole file is read: one that was cut off has a sound header.
    """
    try:
        with Image.open(file) as image:
            image.load()
            size, turned = image.size, image.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8)
    except Exception as error:  # PIL raises OSError, SyntaxError, DecompressionBombError, struct.error, ...
        raise ValueError(f"{file} is no readable image ({error})") from None
    return size[::-1] if turned else size, turned


def _check_size(entry: dict, file: Path) -> None:
    size, turned = picture_size(file)
    if size != (entry["width"], entry["height"]):
        why = ", once turned as its EXIF data say" if turned else ""
        raise ValueError(
            f"{file} is {size[0]}x{size[1]}{why}, but its annotations are for {entry['width']}x{entry['height']} "
            "(width x height)"
        )


def _check_objects(
    annotations: list, images: dict, categories: dict, path: Path, evaluated: bool, masks: bool
) -> list[str]:
    """Raises for objects that no loader could read; returns remarks on those that training leaves out."""
    odd: dict[str, list] = {}
    for annotation in annotations:
        name = f"{path}: annotation {annotation['id']}"
        if annotation.get("image_id") not in images:
            raise ValueError(f"{name} is of image {annotation.get('image_id')}, which is not in the file")
        if annotation.get("category_id") not in categories:
            raise ValueError(f"{name} is of category {annotation.get('category_id')}, which is not in the file")
        box = annotation.get("bbox")
        if not isinstance(box, list) or len(box) != 4 or not all(is_number(value) for value in box):
            raise ValueError(f"{name} has the box {box!r}; expected [left, top, width, height]")
        if not is_number(annotation.get("area")):
            raise ValueError(f"{name} has the area {annotation.get('area')!r}; COCO's metrics need that of the mask")
        if annotation.get("iscrowd") not in (0, 1):
            raise ValueError(f"{name} has iscrowd {annotation.get('iscrowd')!r}; expected 0, or 1 for a crowd")
        if annotation["id"] == 0:
            raise ValueError(f"{name}: COCO's metrics take the id 0 for no match; number annotations from 1")
        image = images[annotation["image_id"]]
        if masks:
            _check_mask(annotation, image, name, evaluated)
        problem = _problem(annotation, image, masks)
        if problem:
            odd.setdefault(problem, []).append(annotation["id"])
    _check_kind_of_boxes(annotations, images, path)
    return [f"{len(found)} objects {problem}; the first is annotation {found[0]}" for problem, found in odd.items()]


def _check_kind_of_boxes(annotations: list, images: dict, path: Path) -> None:
    """Raises if the boxes are by two corners: many then reach over the edge, and as corners every one is sound."""
    over, corners = 0, True
    for annotation in annotations:
        (left, top, third, fourth), image = annotation["bbox"], images[annotation["image_id"]]
        over += left + third > image["width"] + 1 or top + fourth > image["height"] + 1
        corners &= left <= third <= image["width"] + 1 and top <= fourth <= image["height"] + 1
    if corners and len(annotations) >= LEAST_BOXES and over > OVER_THE_EDGE * len(annotations):
        raise ValueError(
            f"{path}: {over} of {len(annotations)} boxes reach over the edge of their image, and all of them would fit "
            "as [left, top, right, bottom]; COCO's boxes are [left, top, width, height]"
        )


def _problem(annotation: dict, image: dict, masks: bool) -> str | None:
    """What training leaves out of an object, or bears."""
    left, top, width, height = annotation["bbox"]
    if width < 1 or height < 1:
        return "have a degenerate box (narrower or lower than a pixel): training leaves them out"
    if min(left + width, image["width"]) - max(left, 0) < 1 or min(top + height, image["height"]) - max(top, 0) < 1:
        return "have a box outside of their image: training leaves them out"
    if annotation["area"] <= 0:
        return "have no area: training leaves them out"
    mask = annotation["segmentation"] if masks else None
    if isinstance(mask, list) and any(len(part) < 6 for part in mask):
        return "have a polygon of two points: that part of the mask is left out"
    if left < -1 or top < -1 or left + width > image["width"] + 1 or top + height > image["height"] + 1:
        return "have a box that reaches over the edge of their image"
    return None


def _check_mask(annotation: dict, image: dict, name: str, evaluated: bool) -> None:
    """Raises unless the segmentation is polygons, as flat lists of coordinates, or a run-length code."""
    mask = annotation.get("segmentation")
    if not mask:
        raise ValueError(f"{name} has no segmentation, which masks are learned from; --boxes is for boxes alone")
    if isinstance(mask, dict):
        _check_run_lengths(mask, [image["height"], image["width"]], name)
    elif not isinstance(mask, list) or not all(isinstance(part, list) for part in mask):
        raise ValueError(f"{name}: its segmentation is neither a list of polygons nor a run-length code")
    elif any(len(part) < 4 or len(part) % 2 for part in mask):
        raise ValueError(f"{name} has a polygon of {min(map(len, mask))} numbers; expected [x, y, x, y, x, y, ...]")
    elif not all(is_number(value) for part in mask for value in part):
        odd = next(value for part in mask for value in part if not is_number(value))
        raise ValueError(f"{name} has a polygon with {odd!r:.60}; expected numbers [x, y, x, y, x, y, ...]")
    elif evaluated and any(len(part) < 6 for part in mask):
        raise ValueError(f"{name} has a polygon of two points, which COCO's metrics cannot read: remove that part")


def _check_run_lengths(mask: dict, size: list[int], name: str) -> None:
    if not {"counts", "size"} <= mask.keys():
        raise ValueError(f"{name}: a run-length code needs counts and size, it has {sorted(mask)}")
    if list(mask["size"]) != size:
        raise ValueError(f"{name}: a run-length code of {mask['size']} for an image of {size} (height, width)")
    counts = _uncompressed(mask["counts"]) if isinstance(mask["counts"], str) else mask["counts"]
    sound = isinstance(counts, list) and all(type(count) is int and count >= 0 for count in counts)
    if not sound or sum(counts) != size[0] * size[1]:
        raise ValueError(f"{name}: the counts of its run-length code do not add up to {size[0]}x{size[1]} pixels")


def _uncompressed(text: str) -> list[int] | None:
    """The counts of a compressed run-length code, None if it is none: pycocotools hangs or crashes on a damaged one.

    A count is written in groups of five bits, the lowest first, as characters from "0" on; the sixth bit says that
    another group follows. From the fourth count on, it is the difference from the count before the last.
    """
    counts: list[int] = []
    value = shift = 0
    for byte in text.encode():
        byte -= ord("0")
        if not 0 <= byte < 64:
            return None
        value |= (byte & 31) << shift
        shift += 5
        if byte & 32:
            continue
        if byte & 16:  # the sign
            value -= 1 << shift
        counts.append(value + counts[-2] if len(counts) > 2 else value)
        value = shift = 0
    return counts if shift == 0 else None

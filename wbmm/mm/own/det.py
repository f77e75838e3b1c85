"""`wbmm train-det`: from a folder with annotations in COCO's format to a detector, with masks if they have some."""

import argparse
import json
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from wbmm.io.atomic import atomic_path
from wbmm.text import counted, some
from wbmm.zoo import load_zoo

from ..backbone import timm_depths
from ..coco import check_annotations, read_annotations
from . import Choices, add_shared_arguments, choose_start, choose_workers, train_on_own_data
from .masks import split_names, typical_size

__all__ = [
    "EXAMPLE",
    "FoundObjects",
    "add_arguments",
    "choose_detector",
    "find_objects",
    "mend",
    "run",
    "typical_object",
    "write_annotations",
]

EXAMPLE = "wbmm train-det --data people --head mask-rcnn --model wbmm_t_dense"
HEADS = {"mask-rcnn": "wbmm::own/mask_rcnn.py", "cascade": "wbmm::own/cascade_mask_rcnn.py"}
HEADS_OF_BOXES = {"mask-rcnn": "wbmm::own/faster_rcnn.py", "cascade": "wbmm::own/cascade_rcnn.py"}
SHORT, LONG = 800, 1333
EPOCHS, BATCH = 12, 4
SMALL_OBJECT = 48  # pixels: below, anchors of half the size
SMALL_HEADS = {"width": 64, "rois": 64, "box_features": 256, "mask_convs": 2, "proposals": 200}
DEEPEST = 2  # folders below the root
SAMPLE = 50  # images that tell in which folder they are
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
        mended: what was changed in the contents, in words.
    """

    json: dict[str, Path]
    images: dict[str, Path]
    contents: dict[str, dict]
    split: dict[str, list[str]] | None
    how: str
    mended: list[str] = field(default_factory=list)

    @property
    def classes(self) -> list[str]:
        return [str(category.get("name")) for category in self.contents["train"]["categories"]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared_arguments(parser)
    parser.add_argument("--head", choices=HEADS, default="mask-rcnn", help="default: mask-rcnn")
    parser.add_argument("--boxes", action="store_true", help="leave masks out: Faster R-CNN, or Cascade R-CNN")
    parser.add_argument("--epochs", type=int, default=EPOCHS, metavar="N", help=f"default: {EPOCHS}")


def run(args: argparse.Namespace) -> int:
    if args.epochs < 1:
        raise ValueError(f"--epochs {args.epochs}: give a number from 1")
    return train_on_own_data("det", args, lambda folder: choose_detector(args, folder))


def choose_detector(args: argparse.Namespace, folder: Path) -> Choices:
    """Looks at the data, and chooses what the command line does not say."""
    found = find_objects(args.data)
    _check_categories(found)
    masks = not args.boxes and _has_masks(found)
    choices = Choices((HEADS if masks else HEADS_OF_BOXES)[args.head])
    count = {
        part: len(found.split[part]) if found.split else len(found.contents[part]["images"]) for part in found.json
    }
    choices.rows.append(("images", f"{count['train']} to train, {count['val']} to validate", found.how))
    kind = "masks as polygons or run-length codes" if masks else "boxes alone, so the detector gives no masks"
    choices.rows.append(("objects", _count_objects(found), kind))
    choices.variables |= _places(found, args.data, folder)
    if found.mended:
        choices.rows.append(("mended", "; ".join(found.mended), f"in copies of the annotations in {folder}"))
    choices.variables["classes"] = tuple(found.classes)
    choices.rows.append(("classes", f"{len(found.classes)}: {some(found.classes, 4)}", _about_classes(found)))
    if args.dry_run:  # training does it by itself
        _check_annotations(choices, masks)
    scale = _choose_scale(choices, found, args.size)
    side = typical_object(found, scale)
    choices.choose(
        "anchors, in strides", f"the typical object is {side:.0f} px", anchor_scale=4 if side < SMALL_OBJECT else 8
    )
    batch = args.batch or min(BATCH, count["train"])
    choices.choose("batch", f"{counted(round(count['train'] / batch), 'step')} an epoch", batch_size=batch)
    steps = args.epochs * -(-count["train"] // batch)
    choices.choose("epochs", counted(steps, "step"), max_epochs=args.epochs)
    choices.variables["milestones"] = (max(1, args.epochs * 2 // 3), max(1, args.epochs * 11 // 12))
    choices.variables["warmup"] = max(1, min(200, steps // 10))
    if args.small_heads:
        choices.variables |= {**SMALL_HEADS, **({"box_convs": 1} if args.head == "cascade" else {})}
        text = ", ".join(f"{key} {value}" for key, value in SMALL_HEADS.items())
        choices.rows.append(("heads", text, "--small-heads"))
    choose_start(choices, args.model, args.init, steps, {True: 1e-4, False: 5e-4})
    stages = args.model in load_zoo() or timm_depths(args.model) is not None
    choices.variables["decay_rate"] = 0.8 if choices.variables["init"] and stages else 1.0
    choose_workers(choices)
    return choices


def _has_masks(found: FoundObjects) -> bool:
    """Whether any object has a mask. Then all must: training says which one has none."""
    return any(entry.get("segmentation") for part in found.contents.values() for entry in part["annotations"])


def _check_categories(found: FoundObjects) -> None:
    first, second = ([c.get("name") for c in found.contents[part]["categories"]] for part in ("train", "val"))
    if first != second:
        raise ValueError(f"{found.json['train']} has the categories {some(list(map(str, first)), 5)}, "
                         f"{found.json['val']} has {some(list(map(str, second)), 5)}")  # fmt: skip


def _about_classes(found: FoundObjects) -> str:
    seen = {entry.get("category_id") for entry in found.contents["train"]["annotations"]}
    bare = [str(c.get("name")) for c in found.contents["train"]["categories"] if c.get("id") not in seen]
    return "names of the categories" + (f"; no object to train on: {some(bare, 4)}" if bare else "")


def _check_annotations(choices: Choices, masks: bool) -> None:
    """What training would check before it starts; its remarks become rows."""
    root = Path(choices.variables["data_root"])
    for part in ("train", "val"):
        json_file, images = (root / choices.variables[f"{part}_{what}"] for what in ("json", "images"))
        report = check_annotations(json_file, images, None, evaluated=part == "val", masks=masks)
        choices.rows += [(f"remark on {part}", remark, "") for remark in report.remarks]


def _count_objects(found: FoundObjects) -> str:
    objects = [len(found.contents[part]["annotations"]) for part in ("train", "val")]
    return f"{objects[0]} in all" if found.split else f"{objects[0]} to train, {objects[1]} to validate"


def _places(found: FoundObjects, root: Path, folder: Path) -> dict:
    """Files and folders as variables; a split, or what was mended, is written into the work folder."""
    root, files = root.resolve(), {part: path.resolve() for part, path in found.json.items()}
    if found.split or found.mended:
        folder.mkdir(parents=True, exist_ok=True)
        files = write_annotations(found, folder)
    places = {"data_root": f"{root}{os.sep}"}
    for part in ("train", "val"):
        inside = files[part].is_relative_to(root)
        places[f"{part}_json"] = str(files[part].relative_to(root) if inside else files[part])
        places[f"{part}_images"] = os.path.relpath(found.images[part], root) + os.sep
    return places


def _choose_scale(choices: Choices, found: FoundObjects, size: int | None) -> tuple[int, int]:
    images = [found.images["train"] / image["file_name"] for image in found.contents["train"]["images"]]
    width, height = typical_size([path for path in images if path.is_file()] or images)
    short = size or min(min(width, height), SHORT)
    long = min(round(short * max(width, height) / min(width, height)), LONG)
    choices.choose("scale of pictures", f"the typical image is {width}x{height}", scale=(long, short))
    return long, short


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
    mended = sorted({change for path in dict.fromkeys(files.values()) for change in mend(contents[path])})
    return FoundObjects(files, images, {part: contents[path] for part, path in files.items()}, split, how, mended)


def mend(contents: dict) -> list[str]:
    """Fills in, in place, what some programs leave out of COCO's format; says what.

    COCO's metrics take an annotation with the id 0 for no match, and need `iscrowd` and `area`. The area of a
    run-length code is not computed here: an object that has one and no area stays as it is.
    """
    changes, objects = [], [entry for entry in contents["annotations"] if isinstance(entry, dict)]
    if any(entry.get("id") in (0, None) for entry in objects):
        changes.append("annotations numbered from 1")
        for number, entry in enumerate(objects, 1):
            entry["id"] = number
    bare = [entry for entry in objects if "iscrowd" not in entry]
    if bare:
        changes.append("iscrowd 0 where it was missing")
        for entry in bare:
            entry["iscrowd"] = 0
    areas = {id(entry): _area(entry) for entry in objects if entry.get("area") is None}
    if any(area is not None for area in areas.values()):
        changes.append("area of polygons and boxes where it was missing")
        for entry in objects:
            if areas.get(id(entry)) is not None:
                entry["area"] = areas[id(entry)]
    return changes


def _area(entry: dict) -> float | None:
    """The area of an object's polygons (overlaps count twice), or of its box where it has no mask; None if unknown."""
    mask, box = entry.get("segmentation"), entry.get("bbox")
    try:
        if not mask:
            return float(box[2] * box[3])
        if isinstance(mask, list):
            return float(sum(map(_polygon_area, mask)))
    except (TypeError, IndexError, ValueError):  # the check before training names it
        pass
    return None


def _polygon_area(points: list[float]) -> float:
    xs, ys = points[::2], points[1::2]
    pairs = zip(xs, ys, [*xs[1:], xs[0]], [*ys[1:], ys[0]], strict=True)
    return abs(sum(x0 * y1 - x1 * y0 for x0, y0, x1, y1 in pairs)) / 2


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
    """The folder in which most images of a file are, tried by the first of them."""
    if not contents["images"]:
        raise ValueError(f"{path}: there are no images in it")
    files = [name for image in contents["images"][:SAMPLE] if (name := image.get("file_name"))]
    stem = path.stem.removeprefix("instances_")
    names = dict.fromkeys([stem, part, "valid", "validation", "images", ".", "JPEGImages"])
    bases = [root, root / "images", path.parent, path.parent.parent]
    folders = [folder for base in bases for name in names if (folder := base / name).is_dir()]
    hits = [sum((folder / file).is_file() for file in files) for folder in folders]
    if any(hits):
        return folders[hits.index(max(hits))].resolve()
    first = files[0] if files else None
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


def write_annotations(found: FoundObjects, folder: Path) -> dict[str, Path]:
    """Writes an annotation file for each part, of a split or mended; returns them."""
    files = {}
    for part, contents in found.contents.items():
        chosen = set(found.split[part]) if found.split else None
        images = [image for image in contents["images"] if chosen is None or image["file_name"] in chosen]
        ids = {image["id"] for image in images}
        objects = [entry for entry in contents["annotations"] if entry.get("image_id") in ids]
        files[part] = (folder / f"{part}.json").absolute()
        with atomic_path(files[part], force=True) as temporary:
            temporary.write_text(json.dumps({**contents, "images": images, "annotations": objects}))
    return files

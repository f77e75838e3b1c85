"""`wbmm train-det`: from a folder with annotations in COCO's format to a detector with masks."""

import argparse
import os
from pathlib import Path

from wbmm.text import some

from .config import Choices, add_shared_arguments, choose_start, choose_workers, train_on_own_data
from .masks import typical_size
from .objects import FoundObjects, find_objects, typical_object, write_split

__all__ = ["EXAMPLE", "add_arguments", "choose_detector", "run"]

EXAMPLE = "wbmm train-det --data people --head mask-rcnn --model wbmm_t_dense"
HEADS = {"mask-rcnn": "wbmm::own/mask_rcnn.py", "cascade": "wbmm::own/cascade_mask_rcnn.py"}
SHORT, LONG = 800, 1333
EPOCHS, BATCH = 12, 4
SMALL_OBJECT = 48  # pixels: below, anchors of half the size
SMALL_HEADS = {"width": 64, "rois": 64, "box_features": 256, "mask_convs": 2, "proposals": 200}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared_arguments(parser)
    parser.add_argument("--head", choices=HEADS, default="mask-rcnn", help="default: mask-rcnn")
    parser.add_argument("--epochs", type=int, default=EPOCHS, metavar="N", help=f"default: {EPOCHS}")


def run(args: argparse.Namespace) -> int:
    if args.epochs < 1:
        raise ValueError(f"--epochs {args.epochs}: give a number from 1")
    return train_on_own_data("det", args, lambda folder: choose_detector(args, folder))


def choose_detector(args: argparse.Namespace, folder: Path) -> Choices:
    """Looks at the data, and chooses what the command line does not say."""
    found = find_objects(args.data)
    _check_masks(found)
    choices = Choices(HEADS[args.head])
    count = {
        part: len(found.split[part]) if found.split else len(found.contents[part]["images"]) for part in found.json
    }
    choices.rows.append(("images", f"{count['train']} to train, {count['val']} to validate", found.how))
    choices.rows.append(("objects", _count_objects(found), "masks as polygons or run-length codes"))
    choices.variables |= _places(found, args.data, folder)
    choices.variables["classes"] = tuple(found.classes)
    choices.rows.append(("classes", f"{len(found.classes)}: {some(found.classes, 4)}", "names of the categories"))
    scale = _choose_scale(choices, found, args.size)
    side = typical_object(found, scale)
    choices.choose(
        "anchors, in strides", f"the typical object is {side:.0f} px", anchor_scale=4 if side < SMALL_OBJECT else 8
    )
    batch = args.batch or min(BATCH, count["train"])
    choices.choose("batch", f"{count['train'] / batch:.0f} steps an epoch", batch_size=batch)
    steps = args.epochs * -(-count["train"] // batch)
    choices.choose("epochs", f"{steps:,} steps", max_epochs=args.epochs)
    choices.variables["milestones"] = (max(1, args.epochs * 2 // 3), max(1, args.epochs * 11 // 12))
    choices.variables["warmup"] = max(1, min(200, steps // 10))
    if args.small_heads:
        choices.variables |= {**SMALL_HEADS, **({"box_convs": 1} if args.head == "cascade" else {})}
        text = ", ".join(f"{key} {value}" for key, value in SMALL_HEADS.items())
        choices.rows.append(("heads", text, "--small-heads"))
    choose_start(choices, args.model, args.init, steps, {True: 1e-4, False: 5e-4})
    choices.variables["decay_rate"] = 0.8 if choices.variables["init"] else 1.0
    choose_workers(choices)
    return choices


def _check_masks(found: FoundObjects) -> None:
    objects = found.contents["train"]["annotations"]
    if objects and not any(entry.get("segmentation") for entry in objects):
        raise ValueError(
            f"{found.json['train']} has boxes and no masks (segmentation), which Mask R-CNN learns from: give masks, "
            "or train mmdet's Faster R-CNN with a configuration of your own"
        )
    first, second = ([c.get("name") for c in found.contents[part]["categories"]] for part in ("train", "val"))
    if first != second:
        raise ValueError(f"{found.json['train']} has the categories {some(list(map(str, first)), 5)}, "
                         f"{found.json['val']} has {some(list(map(str, second)), 5)}")  # fmt: skip


def _count_objects(found: FoundObjects) -> str:
    objects = [len(found.contents[part]["annotations"]) for part in ("train", "val")]
    return f"{objects[0]} in all" if found.split else f"{objects[0]} to train, {objects[1]} to validate"


def _places(found: FoundObjects, root: Path, folder: Path) -> dict:
    """Files and folders as variables; a split is written into the work folder."""
    root, files = root.resolve(), {part: path.resolve() for part, path in found.json.items()}
    if found.split:
        folder.mkdir(parents=True, exist_ok=True)
        files = write_split(found, folder)
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

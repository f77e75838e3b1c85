"""`wbmm train-seg`: from a folder of images and masks to a segmentor."""

import argparse
from pathlib import Path

from wbmm.io.atomic import atomic_path
from wbmm.text import printable, some

from .config import Choices, add_shared_arguments, choose_start, choose_workers, train_on_own_data
from .labels import ClassList, Survey, find_class_list, read_classes, survey_masks
from .masks import FoundMasks, find_masks, typical_size

__all__ = ["EXAMPLE", "add_arguments", "choose_segmentor", "number_labels", "run"]

EXAMPLE = "wbmm train-seg --data streets --classes streets/classes.txt --model wbmm_t_dense"
USUAL_IGNORE = 255
LARGEST_CROP, LONGEST = 512, 2048
EPOCHS, LEAST_ITERS, MOST_ITERS = 50, 1000, 40_000
BATCH = 8
LEAST_INTERVAL = 50  # iterations between validations
SMALL_HEADS = {"head_channels": 128, "auxiliary_channels": 64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared_arguments(parser)
    parser.add_argument("--classes", type=Path, metavar="FILE", help="names; otherwise a classes.* in the folder")
    parser.add_argument("--iters", type=int, metavar="N", help=f"iterations (default: about {EPOCHS} epochs)")
    parser.add_argument("--ignore", type=int, metavar="LABEL", help="label of pixels that do not count")
    parser.add_argument("--labels-from-1", action="store_true", help="class i has the label i + 1, and 0 is ignored")


def run(args: argparse.Namespace) -> int:
    if args.iters is not None and args.iters < 2:
        raise ValueError(f"--iters {args.iters}: give a number from 2")
    return train_on_own_data("seg", args, lambda folder: choose_segmentor(args, folder))


def choose_segmentor(args: argparse.Namespace, folder: Path) -> Choices:
    """Looks at the data, and chooses what the command line does not say."""
    found = find_masks(args.data)
    _check_pairs(found)
    choices = Choices("wbmm::own/upernet.py")
    count = {part: len(found.names(part)) for part in ("train", "val")}
    choices.rows.append(("images", f"{count['train']} to train, {count['val']} to validate", found.how))
    choices.variables |= _places(found, args.data, folder)
    if "test_images" in choices.variables:
        choices.rows.append(("test set", f"{len(found.test.names)} images", "of tools/test_seg.py"))
    file = args.classes or find_class_list(args.data)
    classes = read_classes(file) if file else None
    masks = [*found.train.mask_paths(found.names("train")), *found.val.mask_paths(found.names("val"))]
    seen = survey_masks(masks)
    names, ignore, why = number_labels(seen, classes, args.ignore, args.labels_from_1, args.data)
    choices.variables |= {"classes": tuple(names), "ignore_index": ignore, "reduce_zero_label": args.labels_from_1}
    where = f"{file}" if file else "no list of names was found; --classes FILE"
    choices.rows.append(("classes", f"{len(names)}: {some(names, 4)}", where))
    choices.rows.append(("ignored", f"label {0 if args.labels_from_1 else ignore}", why))
    _choose_size(choices, found, args.size)
    batch = args.batch or min(BATCH, count["train"])
    choices.choose("batch", f"{count['train'] / batch:.0f} steps an epoch", batch_size=batch)
    iters = args.iters or min(max(EPOCHS * count["train"] // batch, LEAST_ITERS), MOST_ITERS)
    choices.choose("iterations", f"{iters * batch / count['train']:.3g} epochs", max_iters=iters)
    choices.variables |= {
        "warmup": max(1, min(500, iters // 10)),
        "val_interval": min(iters, max(LEAST_INTERVAL, iters // 10)),
    }
    if args.small_heads:
        choices.choose("channels of the heads", "--small-heads", **SMALL_HEADS)
    choose_start(choices, args.model, args.init, iters, {True: 1e-4, False: 5e-4})
    choose_workers(choices)
    return choices


def _check_pairs(found: FoundMasks) -> None:
    """Raises for images without a mask where folders tell what belongs together, and for listed names without files."""
    for part in ("train", "val"):
        pair = getattr(found, part)
        if pair.lone_images and found.lists is None:
            raise ValueError(
                f"{len(pair.lone_images)} images in {pair.images} have no mask ending with {pair.mask_suffix!r} in "
                f"{pair.masks}; the first is {pair.lone_images[0]}"
            )
        missing = sorted(set(found.names(part)) - set(pair.names))
        if missing:
            raise ValueError(
                f"{len(missing)} listed images of {part} have no image and mask; the first is {missing[0]}"
            )


def _places(found: FoundMasks, root: Path, folder: Path) -> dict:
    """Folders, endings and lists, as variables; the lists are written into the work folder."""
    root = root.absolute()
    places: dict = {"data_root": str(root)}
    for part in ("train", "val"):
        pair = getattr(found, part)
        for name, path in (("images", pair.images), ("masks", pair.masks)):
            places[f"{part}_{name}"] = str(path.absolute().relative_to(root))
        if found.lists:
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / f"{part}.txt").absolute()
            with atomic_path(file, force=True) as temporary:
                temporary.write_text("".join(f"{name}\n" for name in found.lists[part]))
            places[f"{part}_list"] = str(file)
    if found.test is not None and found.test.mask_suffix == found.train.mask_suffix:
        places["test_images"] = str(found.test.images.absolute().relative_to(root))
        places["test_masks"] = str(found.test.masks.absolute().relative_to(root))
    first, second = ((p.img_suffix, p.mask_suffix) for p in (found.train, found.val))
    if first != second:
        raise ValueError(f"names end with {first} in {found.train.images} and with {second} in {found.val.images}")
    return places | {"img_suffix": first[0], "mask_suffix": first[1]}


def number_labels(
    seen: Survey, classes: ClassList | None, ignore: int | None, from_1: bool, root: Path
) -> tuple[list[str], int, str]:
    """Names of the classes, the label that is ignored, and why that one; a `ValueError` where masks need preparing.

    Args:
        seen: what the masks hold.
        classes: their names, if known.
        ignore: as the command line says.
        from_1: the labels start at 1, and 0 does not count.
        root: for the advice.
    """
    advice = f"python tools/prepare_seg.py --data {root} writes masks of labels from 0 on"
    if seen.colours or (classes and not classes.plain):
        what = "the masks hold colours" if seen.colours else "the list gives classes other labels than 0, 1, 2, ..."
        raise ValueError(f"{what}: {advice}")
    ignore = classes.ignore if ignore is None and classes and isinstance(classes.ignore, int) else ignore
    present = [label - 1 for label in seen.labels if label > 0] if from_1 else list(seen.labels)
    present = [label for label in present if label != (USUAL_IGNORE if ignore is None else ignore)]
    if seen.labels == [0, USUAL_IGNORE] and ignore is None:
        raise ValueError(f"the masks hold 0 and 255 alone, and 255 is what mmseg ignores: {advice}")
    if classes is None:
        if not present or max(present) >= 2 * len(present) + 1:
            raise ValueError(f"the masks hold the labels {_list(seen.labels)}, which do not count from 0 on: {advice}")
        names, why = [f"class {number}" for number in range(max(present) + 1)], "the usual value"
        return names, USUAL_IGNORE if ignore is None else ignore, why if ignore is None else "as said"
    extra = [label for label in present if label >= len(classes.names)]
    if ignore is None and len(extra) == 1 and not from_1:
        hint = ", unless labels start at 1 (--labels-from-1)" if extra[0] == len(classes.names) else ""
        return classes.names, extra[0], f"it has no name{hint}"
    if extra:
        label = extra[-1]
        raise ValueError(
            f"{seen.example[label + from_1]}: label {label + from_1}, but there are {len(classes.names)} names of "
            f"classes (labels {_list(seen.labels)}); name them all, or {advice}"
        )
    return classes.names, USUAL_IGNORE if ignore is None else ignore, "the usual value" if ignore is None else "as said"


def _list(labels: list) -> str:
    return printable(", ".join(map(str, labels[:12])) + (", ..." if len(labels) > 12 else ""))


def _choose_size(choices: Choices, found: FoundMasks, size: int | None) -> None:
    pair = found.train
    width, height = typical_size([pair.images / f"{name}{pair.img_suffix}" for name in found.names("train")])
    short = size or min(min(width, height), LARGEST_CROP)
    factor = short / min(width, height)
    scale = min(round(width * factor), LONGEST * 2), min(round(height * factor), LONGEST * 2)
    choices.choose("scale of pictures", f"the typical image is {width}x{height}", scale=scale)
    side = max(32, short // 32 * 32)
    choices.choose("crop to train on", "the short side, a multiple of 32", crop=(side, side))

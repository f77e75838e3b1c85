"""`wbmm train-seg`: from a folder of images and masks to a segmentor.

And tools/prepare_seg.py: masks of any kind (colours, palettes, arbitrary numbers) to label maps 0, 1, 2, ... with a
list of classes.
"""

import argparse
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from wbmm.handler import run_command
from wbmm.io.atomic import atomic_path
from wbmm.progress import progress_bar
from wbmm.text import counted, printable, render_table, some

from ..coco import picture_size
from ..pictures import class_colours
from . import Choices, add_shared_arguments, choose_start, choose_workers, train_on_own_data
from .masks import (
    MOST_VALUES,
    SAMPLE,
    ClassList,
    FoundMasks,
    Label,
    Pairs,
    Survey,
    find_class_list,
    find_masks,
    pack_colours,
    read_classes,
    read_mask,
    survey_masks,
    typical_size,
)

__all__ = ["EXAMPLE", "add_arguments", "choose_segmentor", "convert_masks", "number_mask_labels", "prepare_seg", "run"]

EXAMPLE = "wbmm train-seg --data streets --classes streets/classes.txt --model wbmm_t_dense"
USUAL_IGNORE = 255
LARGEST_CROP, LONGEST = 512, 2048
EPOCHS, LEAST_ITERS, MOST_ITERS = 50, 1000, 40_000
BATCH = 8
LEAST_INTERVAL = 50  # iterations between validations
SMALL_HEADS = {"head_channels": 128, "auxiliary_channels": 64}
IGNORED = 255  # in the written masks
MOST_CLASSES = 255
MOST_BLURRED = 1_000_000  # different colours in masks of which the nearest of the list are wanted
MOST_ROWS = 5  # of the table of labels, for each class
IGNORE_NAMES = ("unlabelled", "unlabeled", "void", "ignore", "ignored", "undefined")


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
    _check_exact(found, args.data)
    choices = Choices("wbmm::own/upernet.py")
    count = {part: len(found.names(part)) for part in ("train", "val")}
    choices.rows.append(("images", f"{count['train']} to train, {count['val']} to validate", found.how))
    images, masks = found.train.lone_images, found.train.lone_masks
    if found.lists and (images or masks):
        left = f"{len(images)} images without a mask, {len(masks)} masks without an image"
        choices.rows.append(("left out", left, f"the first is {[*images, *masks][0]}"))
    choices.variables |= _places(found, args.data, folder)
    if "test_images" in choices.variables:
        choices.rows.append(("test set", f"{len(found.test.names)} images", "of tools/test_seg.py"))
    file = args.classes or find_class_list(args.data)
    classes = read_classes(file) if file else None
    seen = survey_masks([path for part in count for path in getattr(found, part).mask_paths(found.names(part))])
    names, ignore, why = number_mask_labels(seen, classes, args.ignore, args.labels_from_1, args.data)
    why = "--labels-from-1" if args.labels_from_1 else why
    if args.dry_run:  # training does it by itself
        _check_sizes(found)
    choices.variables |= {"classes": tuple(names), "ignore_index": ignore, "reduce_zero_label": args.labels_from_1}
    where = f"{file}" if file else "no list of names was found; --classes FILE"
    choices.rows.append(("classes", f"{len(names)}: {some(names, 4)}", where))
    choices.rows.append(("ignored", f"label {0 if args.labels_from_1 else ignore}", why))
    _choose_size(choices, found, args.size)
    batch = args.batch or min(BATCH, count["train"])
    choices.choose("batch", f"{counted(round(count['train'] / batch), 'step')} an epoch", batch_size=batch)
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


def _check_exact(found: FoundMasks, root: Path) -> None:
    """Raises for masks in JPEG files: near the edges their labels are others than were saved."""
    for pair in (found.train, found.val):
        if pair.mask_suffix.lower().endswith((".jpg", ".jpeg")):
            raise ValueError(
                f"{pair.masks} holds masks as JPEG, which changes labels near edges. Take the PNG files they were made "
                f"from; or python tools/prepare_seg.py --data {root} --classes FILE --rest nearest --out DIR"
            )


def _check_sizes(found: FoundMasks) -> None:
    """Raises for an image, of a sample, that cannot be read or is of another size than its mask."""
    for part in ("train", "val"):
        pair, names = getattr(found, part), found.names(part)
        for name in names[:: max(1, len(names) // SAMPLE)]:
            files = pair.images / f"{name}{pair.img_suffix}", pair.masks / f"{name}{pair.mask_suffix}"
            image, mask = ("{}x{}".format(*picture_size(file)[0]) for file in files)
            if image != mask:
                raise ValueError(f"{files[0]} is {image}, its mask {files[1]} {mask} (width x height)")


def _check_pairs(found: FoundMasks) -> None:
    """Raises for images without a mask where folders tell what belongs together, and for listed names without files."""
    for part in ("train", "val"):
        pair = getattr(found, part)
        if pair.lone_images and found.lists is None:
            raise ValueError(
                f"{len(pair.lone_images)} images in {pair.images} have no mask ending with {pair.mask_suffix!r} in "
                f"{pair.masks}; the first is {pair.lone_images[0]}"
            )
        if pair.lone_masks and found.lists is None:
            raise ValueError(
                f"{len(pair.lone_masks)} masks in {pair.masks} have no image ending with {pair.img_suffix!r} in "
                f"{pair.images}; the first is {pair.lone_masks[0]}"
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


def number_mask_labels(
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
    said = "the usual value" if ignore is None else "--ignore"
    if ignore is None and classes and isinstance(classes.ignore, int):
        ignore, said = classes.ignore, "as the list of classes says"
    if from_1 and ignore not in (None, USUAL_IGNORE):
        raise ValueError(f"--labels-from-1 ignores the label 0; {ignore} cannot be ignored too ({said}): {advice}")
    present = [label - 1 for label in seen.labels if label > 0] if from_1 else list(seen.labels)
    present = [label for label in present if label != (USUAL_IGNORE if ignore is None else ignore)]
    if seen.labels == [0, USUAL_IGNORE] and ignore is None:
        raise ValueError(f"the masks hold 0 and 255 alone, and 255 is what mmseg ignores: {advice}")
    if classes is None:
        if not present or max(present) >= 2 * len(present) + 1:
            raise ValueError(f"the masks hold the labels {_list(seen.labels)}, which do not count from 0 on: {advice}")
        names = [f"class {number}" for number in range(max(present) + 1)]
        return names, USUAL_IGNORE if ignore is None else ignore, said
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
    return classes.names, USUAL_IGNORE if ignore is None else ignore, said


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


def prepare_seg(argv: Sequence[str] | None = None) -> int:
    """The tool; returns its exit code."""
    text = "Turns the masks of a folder into label maps 0, 1, 2, ..., which training reads."
    parser = argparse.ArgumentParser(prog="prepare_seg", description=text)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="images and masks, as train-seg finds")
    parser.add_argument("--out", type=Path, metavar="DIR", help="without it, what the masks hold is shown, no more")
    parser.add_argument("--classes", type=Path, metavar="FILE", help="names, with colours or numbers of each")
    help_ignore = "numbers or R,G,B of pixels that do not count; beside classes called void, unlabelled or ignore"
    parser.add_argument("--ignore", nargs="+", default=[], type=parse_label, metavar="LABEL", help=help_ignore)
    parser.add_argument("--rest", choices=("error", "ignore", "nearest"), default="error",
                        help="what is in no list: an error, ignored, or the nearest label of the list")  # fmt: skip
    return run_command("prepare_seg", lambda: _prepare(parser.parse_args(argv)))


def parse_label(text: str) -> Label:
    parts = text.split(",")
    if len(parts) not in (1, 3) or not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor R,G,B")
    numbers = tuple(int(part) for part in parts)
    return numbers[0] if len(numbers) == 1 else numbers


def _prepare(args: argparse.Namespace) -> int:
    if args.out is not None and args.out.exists() and any(args.out.iterdir()):
        raise ValueError(f"{args.out} is not empty: choose another folder")
    found = find_masks(args.data)
    paths = _all_masks(found)
    file = args.classes or find_class_list(args.data)
    classes = read_classes(file) if file else None
    seen = survey_masks(paths, None, MOST_BLURRED if args.rest == "nearest" else MOST_VALUES)
    chosen, ignored = _choose_classes(seen, classes, args.ignore)
    table = number_everything(seen, chosen, ignored, args.rest)
    print(render_table(("in the masks", "share of pixels", "class", "name"), _rows(seen, table, chosen)))
    if args.out is None:
        print("\nNothing was written: give --out DIR, and --classes FILE to name the classes")
        return 0
    convert_masks(found, table, chosen, args.out)
    print(f"\n{len(paths)} masks and their images in {args.out}; next: wbmm train-seg --data {args.out}")
    return 0


def _all_masks(found: FoundMasks) -> list[Path]:
    return [path for pair in _pairs(found) for path in pair.mask_paths()]


def _pairs(found: FoundMasks) -> list[Pairs]:
    pairs = [found.train] if found.train is found.val else [found.train, found.val]
    return pairs + ([] if found.test is None else [found.test])


def _choose_classes(seen: Survey, classes: ClassList | None, ignore: Sequence[Label]) -> tuple[ClassList, list]:
    """The classes, and the labels that do not count.

    They are those of the list, without names that stand for "nothing"; or all that the masks hold, by number, without
    those of `ignore`, or without 255 where it stands for "nothing".
    """
    if classes is None:
        # 255 beside several others stands for "nothing", as in VOC; beside one other it is the object.
        void = [USUAL_IGNORE] if USUAL_IGNORE in seen.labels and len(seen.labels) > 2 else []
        ignore = [*ignore, *void]
        labels = [label for label in seen.labels if label not in ignore]
        return ClassList([f"class {number}" for number in range(len(labels))], labels), list(ignore)
    labels = list(classes.labels or range(len(classes.names)))
    if any(isinstance(label, tuple) != seen.colours for label in labels):
        raise ValueError(
            f"the masks hold {'colours' if seen.colours else 'numbers'}, and the list of classes gives "
            f"{'numbers' if seen.colours else 'colours'}"
        )
    void = [label for name, label in zip(classes.names, labels, strict=True) if name.lower() in IGNORE_NAMES]
    void += [*ignore, *([classes.ignore] if classes.ignore is not None else [])]
    left = [(name, label) for name, label in zip(classes.names, labels, strict=True) if label not in void]
    return ClassList([name for name, _ in left], [label for _, label in left]), void


def number_everything(seen: Survey, classes: ClassList, ignore: Sequence[Label], rest: str) -> dict[Label, int]:
    """What each label of the masks becomes.

    Args:
        seen: what the masks hold.
        classes: with the label of each.
        ignore: labels that do not count.
        rest: `error`, `ignore` or `nearest`, for labels in neither.
    """
    if len(classes.names) > MOST_CLASSES:
        raise ValueError(f"{len(classes.names)} classes: label maps hold {MOST_CLASSES} at most")
    table: dict[Label, int] = dict.fromkeys(ignore, IGNORED)
    table |= {label: number for number, label in enumerate(classes.labels)}
    unknown = [label for label in seen.labels if label not in table]
    if unknown and rest == "error":
        raise ValueError(
            f"{seen.example[unknown[0]]} holds {unknown[0]}, which is no class of the list (nor are "
            f"{len(unknown) - 1} others); name them, --ignore them, or say --rest ignore or --rest nearest"
        )
    found = {label: table[_nearest(label, table)] if rest == "nearest" else IGNORED for label in unknown}
    return {label: (found if label in found else table)[label] for label in seen.labels}


def _nearest(label: Label, known: Iterable[Label]) -> Label:
    """The nearest of the labels that are known, ignored ones among them: of blurred black pixels, black."""
    if not isinstance(label, tuple):
        return min(known, key=lambda other: abs(label - other))
    return min(known, key=lambda other: sum((a - b) ** 2 for a, b in zip(label, other, strict=True)))


def _rows(seen: Survey, table: dict[Label, int], classes: ClassList) -> list[tuple[str, str, str, str]]:
    total = sum(seen.pixels.values())
    rows = []
    groups: dict[int, list[Label]] = {}
    for label in sorted(table, key=lambda label: (table[label], -seen.pixels[label])):
        groups.setdefault(table[label], []).append(label)
    for number, labels in groups.items():
        name = "ignored" if number == IGNORED else classes.names[number]
        for label in labels[:MOST_ROWS]:
            rows.append((str(label), f"{100 * seen.pixels[label] / total:.2f} %", str(number), name))
        if rest := labels[MOST_ROWS:]:
            share = 100 * sum(seen.pixels[label] for label in rest) / total
            rows.append((f"{len(rest)} others", f"{share:.2f} %", str(number), name))
    return rows


def convert_masks(found: FoundMasks, table: dict[Label, int], classes: ClassList, out: Path) -> None:
    """Writes images/{train,val}, masks/{train,val} (PNG files with a palette) and classes.json; and a `test` part."""
    lookup = {_number(label): value for label, value in table.items()}
    known = np.array(sorted(lookup))
    values = np.array([lookup[number] for number in known], dtype=np.uint8)
    palette = np.zeros((256, 3), np.uint8)
    palette[: len(classes.names)] = class_colours(len(classes.names))
    palette[IGNORED] = 255
    names = {part: found.names(part) for part in ("train", "val")} | ({"test": found.test.names} if found.test else {})
    with progress_bar(sum(map(len, names.values())), "writing") as advance:
        for part in names:
            pair = getattr(found, part)
            images, masks = out / "images" / part, out / "masks" / part
            images.mkdir(parents=True), masks.mkdir(parents=True)
            for name in names[part]:
                shutil.copy2(pair.images / f"{name}{pair.img_suffix}", images)
                mask = read_mask(pair.masks / f"{name}{pair.mask_suffix}")
                picture = Image.fromarray(values[np.searchsorted(known, pack_colours(mask))])
                picture.putpalette(palette.tobytes())
                picture.save(masks / f"{name}.png")
                advance(1)
    with atomic_path(out / "classes.json") as temporary:
        temporary.write_text(json.dumps({"classes": classes.names, "ignore": IGNORED}, indent=1))


def _number(label: Label) -> int:
    return label if isinstance(label, int) else (label[0] << 16) + (label[1] << 8) + label[2]

"""Masks of any kind (colours, palettes, arbitrary numbers) turned into label maps 0, 1, 2, ... with a list of classes.

What tools/prepare_seg.py does.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from wbmm.handler import run_command
from wbmm.io.atomic import atomic_path
from wbmm.progress import progress_bar
from wbmm.text import render_table

from ..pictures import class_colours
from .labels import ClassList, Label, Survey, find_class_list, pack_colours, read_classes, read_mask, survey_masks
from .masks import FoundMasks, find_masks

__all__ = ["convert_masks", "prepare_seg"]

IGNORED = 255  # in the written masks
MOST_CLASSES = 255
IGNORE_NAMES = ("unlabelled", "unlabeled", "void", "ignore", "ignored", "undefined")


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
                        help="what is in no list: an error, ignored, or the nearest colour of the list")  # fmt: skip
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
    seen = survey_masks(paths, None)
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
    pairs = [found.train] if found.train is found.val else [found.train, found.val]
    return [path for pair in pairs for path in pair.mask_paths()]


def _choose_classes(seen: Survey, classes: ClassList | None, ignore: Sequence[Label]) -> tuple[ClassList, list]:
    """The classes, and the labels that do not count.

    They are those of the list, without names that stand for "nothing"; or all that the masks hold, by number.
    """
    if classes is None:
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
    for label in unknown:
        table[label] = _nearest(label, classes) if rest == "nearest" else IGNORED
    return {label: table[label] for label in seen.labels}


def _nearest(label: Label, classes: ClassList) -> int:
    if not isinstance(label, tuple):
        raise ValueError("--rest nearest is for masks of colours; numbers are near to nothing")
    distances = [sum((a - b) ** 2 for a, b in zip(label, other, strict=True)) for other in classes.labels]
    return distances.index(min(distances))


def _rows(seen: Survey, table: dict[Label, int], classes: ClassList) -> list[tuple[str, str, str, str]]:
    total = sum(seen.pixels.values())
    rows = []
    for label in sorted(table, key=lambda label: (table[label], label)):
        number = table[label]
        name = "ignored" if number == IGNORED else classes.names[number]
        rows.append((str(label), f"{100 * seen.pixels[label] / total:.2f} %", str(number), name))
    return rows


def convert_masks(found: FoundMasks, table: dict[Label, int], classes: ClassList, out: Path) -> None:
    """Writes images/{train,val}, masks/{train,val} (PNG files with a palette) and classes.json."""
    lookup = {_number(label): value for label, value in table.items()}
    known = np.array(sorted(lookup))
    values = np.array([lookup[number] for number in known], dtype=np.uint8)
    palette = np.zeros((256, 3), np.uint8)
    palette[: len(classes.names)] = class_colours(len(classes.names))
    palette[IGNORED] = 255
    count = sum(len(found.names(part)) for part in ("train", "val"))
    with progress_bar(count, "writing") as advance:
        for part in ("train", "val"):
            pair = getattr(found, part)
            images, masks = out / "images" / part, out / "masks" / part
            images.mkdir(parents=True), masks.mkdir(parents=True)
            for name in found.names(part):
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

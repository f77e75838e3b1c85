"""ADE20K on disk: unpacked, complete, and labelled as it should be; what `tools/prepare_ade20k.py` does."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from wbmm.deploy.images import progress_bar
from wbmm.handler import run_command

from .archive import unpack

__all__ = ["check_folder", "main"]

NAME = "ADEChallengeData2016"
CLASSES = 150
COUNTS = {"training": 20210, "validation": 2000}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="prepare_ade20k", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help=f"holds, or will hold, {NAME}")
    parser.add_argument("--archive", type=Path, help=f"{NAME}.zip, to be unpacked into --root")
    parser.add_argument("--all", action="store_true", help="read every annotation, not a sample of them")
    parser.add_argument("--any-count", action="store_true", help="a part of the data set will do")
    return run_command("prepare_ade20k", lambda: _prepare(parser.parse_args(argv)))


def _prepare(args: argparse.Namespace) -> None:
    if args.archive is not None:
        unpack(args.archive, args.root, {NAME})
    print(check_folder(args.root, everything=args.all, counts=None if args.any_count else COUNTS))


def check_folder(root: Path, everything: bool = False, counts: dict[str, int] | None = None, sample: int = 200) -> str:
    """Checks layout, counts and labels; one sentence on what is there, or a `ValueError` with the first thing wrong.

    Args:
        root: the folder itself, or the one that holds it.
        everything: read every annotation instead of a sample of `sample`.
        counts: how many images each part must have; None for any number.
    """
    folder = root / NAME if (root / NAME).is_dir() else root
    missing = [
        f"{kind}/{part}" for kind in ("images", "annotations") for part in COUNTS if not (folder / kind / part).is_dir()
    ]
    if missing:
        raise ValueError(
            f"{folder} has no folder {missing[0]}: expected images/ and annotations/, each with training/ and "
            f"validation/, as in {NAME}.zip (--archive unpacks it)"
        )
    found = {part: _check_part(folder, part, everything, sample) for part in COUNTS}
    for part, count in found.items():
        if counts and count != counts[part]:
            raise ValueError(
                f"{folder}/images/{part} has {count} images, the data set {counts[part]}: download or unpacking "
                "was not complete (--any-count for a part of it on purpose)"
            )
    return f"{folder}: {found['training']} training and {found['validation']} validation images, labels 0 to {CLASSES}"


def _check_part(folder: Path, part: str, everything: bool, sample: int) -> int:
    images = {path.stem: path for path in (folder / "images" / part).glob("*.jpg") if path.is_file()}
    labels = {path.stem: path for path in (folder / "annotations" / part).glob("*.png") if path.is_file()}
    if not images:
        raise ValueError(f"no .jpg image in {folder}/images/{part}")
    for have, need, what in ((images, labels, "annotation"), (labels, images, "image")):
        lone = sorted(have.keys() - need.keys())
        if lone:
            raise ValueError(f"{len(lone)} of {len(have)} files in {part} have no {what}; the first is {have[lone[0]]}")
    names = sorted(labels)
    chosen = names if everything else names[:: max(1, len(names) // sample)]
    with progress_bar(len(chosen), f"checking {part}") as advance:
        for name in chosen:
            _check_pair(images[name], labels[name])
            advance(1)
    return len(images)


def _check_pair(image: Path, annotation: Path) -> None:
    try:
        with Image.open(image) as picture, Image.open(annotation) as labels:
            size, values = picture.size, np.asarray(labels)
    except Exception as error:
        raise ValueError(f"cannot read {image} or {annotation}: {error}") from None
    if values.ndim != 2 or values.shape != (size[1], size[0]):
        raise ValueError(
            f"{annotation}: shape {values.shape}, but {image.name} is {size[1]}x{size[0]}, one label a pixel"
        )
    if values.max() > CLASSES:
        raise ValueError(f"{annotation}: label {values.max()}; labels go from 1 to {CLASSES}, and 0 is unlabelled")

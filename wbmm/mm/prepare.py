"""Data on disk, unpacked and checked before training: ADE20K, COCO, and own data in COCO's format.

What tools/prepare_ade20k.py and tools/prepare_coco.py do.
"""

import argparse
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from wbmm.handler import run_command
from wbmm.progress import progress_bar

from .coco import check_annotations

__all__ = ["check_ade20k", "prepare_ade20k", "prepare_coco", "unpack"]

ADE20K_FOLDER = "ADEChallengeData2016"
ADE20K_CLASSES = 150
ADE20K_COUNTS = {"training": 20210, "validation": 2000}
COCO_ARCHIVES = ("train2017.zip", "val2017.zip", "annotations_trainval2017.zip")
COCO_PARTS = {
    "train": ("annotations/instances_train2017.json", "train2017"),
    "val": ("annotations/instances_val2017.json", "val2017"),
}
COCO_COUNTS = {"train": 118287, "val": 5000}


def prepare_ade20k(argv: Sequence[str] | None = None) -> int:
    """The tool for ADE20K; returns its exit code."""
    text = "Checks the ADE20K folder that training reads, and unpacks the archive, when given."
    parser = argparse.ArgumentParser(prog="prepare_ade20k", description=text)
    parser.add_argument("--root", type=Path, required=True, help=f"holds, or will hold, {ADE20K_FOLDER}")
    parser.add_argument("--archive", type=Path, help=f"{ADE20K_FOLDER}.zip, to be unpacked into --root")
    parser.add_argument("--all", action="store_true", help="read every annotation, not a sample of them")
    parser.add_argument("--any-count", action="store_true", help="a part of the data set will do")
    return run_command("prepare_ade20k", lambda: _prepare_ade20k(parser.parse_args(argv)))


def _prepare_ade20k(args: argparse.Namespace) -> None:
    if args.archive is not None:
        unpack(args.archive, args.root, {ADE20K_FOLDER})
    print(check_ade20k(args.root, everything=args.all, counts=None if args.any_count else ADE20K_COUNTS))


def check_ade20k(root: Path, everything: bool = False, counts: dict[str, int] | None = None, sample: int = 200) -> str:
    """Checks layout, counts and labels; one sentence on what is there, or a `ValueError` with the first thing wrong.

    Args:
        root: the folder itself, or the one that holds it.
        everything: read every annotation instead of a sample of `sample`.
        counts: how many images each part must have; None for any number.
    """
    folder = root / ADE20K_FOLDER if (root / ADE20K_FOLDER).is_dir() else root
    missing = [
        f"{kind}/{part}"
        for kind in ("images", "annotations")
        for part in ADE20K_COUNTS
        if not (folder / kind / part).is_dir()
    ]
    if missing:
        raise ValueError(
            f"{folder} has no folder {missing[0]}: expected images/ and annotations/, each with training/ and "
            f"validation/, as in {ADE20K_FOLDER}.zip (--archive unpacks it)"
        )
    found = {part: _check_ade20k_part(folder, part, everything, sample) for part in ADE20K_COUNTS}
    for part, count in found.items():
        if counts and count != counts[part]:
            raise ValueError(
                f"{folder}/images/{part} has {count} images, the data set {counts[part]}: download or unpacking "
                "was not complete (--any-count for a part of it on purpose)"
            )
    counts = f"{found['training']} training and {found['validation']} validation images"
    return f"{folder}: {counts}, labels 0 to {ADE20K_CLASSES}"


def _check_ade20k_part(folder: Path, part: str, everything: bool, sample: int) -> int:
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
    if values.max() > ADE20K_CLASSES:
        raise ValueError(
            f"{annotation}: label {values.max()}; labels go from 1 to {ADE20K_CLASSES}, and 0 is unlabelled"
        )


def prepare_coco(argv: Sequence[str] | None = None) -> int:
    """The tool for COCO and own data in its format; returns its exit code."""
    text = "Checks COCO, or own data in its format, before training reads them, and unpacks the archives, when given."
    parser = argparse.ArgumentParser(prog="prepare_coco", description=text)
    parser.add_argument("--root", type=Path, required=True, help="holds, or will hold, annotations, train2017, val2017")
    parser.add_argument("--archives", nargs="+", type=Path, default=[], metavar="ZIP", help=", ".join(COCO_ARCHIVES))
    parser.add_argument("--train", nargs=2, metavar=("JSON", "FOLDER"), help="own data, relative to --root")
    parser.add_argument("--val", nargs=2, metavar=("JSON", "FOLDER"), help="own data, relative to --root")
    parser.add_argument("--classes", nargs="+", help="the classes that a configuration names; COCO's for COCO")
    parser.add_argument("--all", action="store_true", help="open every image, not a sample of them")
    parser.add_argument("--any-count", action="store_true", help="a part of COCO will do")
    parser.add_argument(
        "--boxes", action="store_true", help="own data: boxes alone are trained on, masks may be missing"
    )
    parser.add_argument("--strict", action="store_true", help="objects that training would leave out are errors too")
    return run_command("prepare_coco", lambda: _prepare_coco(parser.parse_args(argv)))


def _prepare_coco(args: argparse.Namespace) -> int:
    for archive in args.archives:
        unpack(archive, args.root, {"annotations", "train2017", "val2017"})
    given = {name: parts for name in COCO_PARTS if (parts := getattr(args, name)) is not None}
    if not args.root.is_dir():
        raise ValueError(f"there is no folder {args.root}")
    if not given:
        _check_coco_layout(args.root)
    remarks = 0
    for name, (annotations, folder) in (given or COCO_PARTS).items():
        classes = args.classes if given or args.classes else _coco_classes()
        report = check_annotations(
            args.root / annotations, args.root / folder, classes, args.all, name == "val", not args.boxes
        )
        if not given and not args.any_count and report.images != COCO_COUNTS[name]:
            raise ValueError(
                f"{args.root / annotations} has {report.images} images, COCO {COCO_COUNTS[name]}: the download was not "
                "complete (--any-count for a part of it on purpose)"
            )
        print(f"{name}: {report}")
        for remark in report.remarks:
            print(f"  {remark}")
        remarks += len(report.remarks)
    if remarks and args.strict:
        raise ValueError(f"{remarks} remark{'s' if remarks > 1 else ''} above, which --strict does not bear")
    return 0


def _check_coco_layout(root: Path) -> None:
    missing = [part for parts in COCO_PARTS.values() for part in parts if not (root / part).exists()]
    if missing:
        parts = ", ".join(part for parts in COCO_PARTS.values() for part in parts)
        raise ValueError(
            f"{root} has no {missing[0]}: expected {parts}, as "
            f"in {', '.join(COCO_ARCHIVES)} (--archives unpacks them); for own data give --train and --val"
        )


def _coco_classes() -> Sequence[str] | None:
    """The names of COCO's 80 classes, None without MMDetection."""
    try:
        from mmdet.datasets import CocoDataset
    except ImportError:
        print("MMDetection is not installed: the names of COCO's classes are not compared")
        return None
    return CocoDataset.METAINFO["classes"]


def unpack(archive: Path, root: Path, folders: set[str]) -> None:
    """Unpacks those top-level folders of a zip file that are named; members that would leave the root are refused.

    Args:
        archive: the zip file.
        root: made if it is missing.
        folders: names that the archive may hold; at least one must be in it, and none in the root yet.
    """
    if not archive.is_file():
        raise ValueError(f"{archive}: there is no such file")
    try:
        with zipfile.ZipFile(archive) as file:
            members = [name for name in file.namelist() if PurePosixPath(name).parts[:1] in {(top,) for top in folders}]
            found = sorted({PurePosixPath(name).parts[0] for name in members})
            if not found:
                raise ValueError(f"{archive} holds no folder {' or '.join(sorted(folders))}: it is another archive")
            bad = [name for name in members if ".." in PurePosixPath(name).parts]
            if bad:
                raise ValueError(f"{archive}: {bad[0]} would be written outside the folder; refused")
            there = [root / name for name in found if (root / name).exists()]
            if there:
                raise ValueError(f"{there[0]} is there already; it is checked when no archive is given")
            _extract(file, members, found, root)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{archive} is not a readable zip file, perhaps truncated ({error})") from None


def _extract(file: zipfile.ZipFile, members: list[str], found: list[str], root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    partial = root / f".{found[0]}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # of an attempt that was stopped
    with progress_bar(len(members), "unpacking") as advance:
        for member in members:
            file.extract(member, partial)
            advance(1)
    for name in found:
        (partial / name).rename(root / name)
    partial.rmdir()

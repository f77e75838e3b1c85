"""COCO, or data in its format, on disk: unpacked, complete and sound; what `tools/prepare_coco.py` does."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from wbmm.handler import run_command

from .archive import unpack
from .coco import check_annotations

__all__ = ["main"]

ARCHIVES = ("train2017.zip", "val2017.zip", "annotations_trainval2017.zip")
PARTS = {"train": ("annotations/instances_train2017.json", "train2017"),
         "val": ("annotations/instances_val2017.json", "val2017")}  # fmt: skip
COUNTS = {"train": 118287, "val": 5000}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="prepare_coco", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="holds, or will hold, annotations, train2017, val2017")
    parser.add_argument("--archives", nargs="+", type=Path, default=[], metavar="ZIP", help=", ".join(ARCHIVES))
    parser.add_argument("--train", nargs=2, metavar=("JSON", "FOLDER"), help="own data, relative to --root")
    parser.add_argument("--val", nargs=2, metavar=("JSON", "FOLDER"), help="own data, relative to --root")
    parser.add_argument("--classes", nargs="+", help="the classes that a configuration names; COCO's for COCO")
    parser.add_argument("--all", action="store_true", help="open every image, not a sample of them")
    parser.add_argument("--any-count", action="store_true", help="a part of COCO will do")
    parser.add_argument("--strict", action="store_true", help="objects that training would leave out are errors too")
    return run_command("prepare_coco", lambda: _prepare(parser.parse_args(argv)))


def _prepare(args: argparse.Namespace) -> int:
    for archive in args.archives:
        unpack(archive, args.root, {"annotations", "train2017", "val2017"})
    given = {name: parts for name in PARTS if (parts := getattr(args, name)) is not None}
    if not args.root.is_dir():
        raise ValueError(f"there is no folder {args.root}")
    if not given:
        _check_layout(args.root)
    remarks = 0
    for name, (annotations, folder) in (given or PARTS).items():
        classes = args.classes if given or args.classes else coco_classes()
        report = check_annotations(args.root / annotations, args.root / folder, classes, args.all)
        if not given and not args.any_count and report.images != COUNTS[name]:
            raise ValueError(
                f"{args.root / annotations} has {report.images} images, COCO {COUNTS[name]}: the download was not "
                "complete (--any-count for a part of it on purpose)"
            )
        print(f"{name}: {report}")
        for remark in report.remarks:
            print(f"  {remark}")
        remarks += len(report.remarks)
    if remarks and args.strict:
        raise ValueError(f"{remarks} remark{'s' if remarks > 1 else ''} above, which --strict does not bear")
    return 0


def _check_layout(root: Path) -> None:
    missing = [part for parts in PARTS.values() for part in parts if not (root / part).exists()]
    if missing:
        raise ValueError(
            f"{root} has no {missing[0]}: expected {', '.join(part for parts in PARTS.values() for part in parts)}, as "
            f"in {', '.join(ARCHIVES)} (--archives unpacks them); for own data give --train and --val"
        )


def coco_classes() -> Sequence[str] | None:
    """The names of COCO's 80 classes, None without MMDetection."""
    try:
        from mmdet.datasets import CocoDataset
    except ImportError:
        print("MMDetection is not installed: the names of COCO's classes are not compared")
        return None
    return CocoDataset.METAINFO["classes"]

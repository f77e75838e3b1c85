"""`wbmm detect`: pictures with boxes, masks, labels and scores; or the same as COCO's results in JSON."""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from wbmm.data.images import find_images
from wbmm.data.sources import FileSource
from wbmm.deploy.runtime import EXPORTED
from wbmm.io.atomic import atomic_path, check_target
from wbmm.machine import check_device
from wbmm.text import printable

from . import require
from .coco import read_annotations
from .exported import ExportedDetector
from .pictures import class_colours, distinct_colours, draw_objects, picture_targets, read_pictures

__all__ = [
    "EXAMPLE",
    "Numbering",
    "Objects",
    "PhotoDetector",
    "add_arguments",
    "open_photo_detector",
    "run",
    "to_results",
]

EXAMPLE = "wbmm detect detector.pth photos/ --config configs/coco/NAME.py --out detected --json results.json"
# COCO numbers its 80 classes from 1 to 90.
COCO = (80, "person", "toothbrush")  # how many classes, the first, the last
_GAPS = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint (with --config), or a detector of `wbmm export`")
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE_OR_FOLDER", help="folders are searched through")
    parser.add_argument("--config", type=Path, help="the detector's configuration")
    parser.add_argument("--out", type=Path, default=Path("detected"), metavar="DIR", help="made if it is missing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every object in COCO's result format")
    parser.add_argument("--annotations", type=Path, metavar="FILE", help="ids of images and classes for --json")
    parser.add_argument("--no-pictures", dest="pictures", action="store_false", help="--json alone")
    parser.add_argument("--score", type=float, default=0.3, help="least score of a drawn object (default: 0.3)")
    parser.add_argument("--no-masks", dest="masks", action="store_false", help="draw boxes alone")
    parser.add_argument("--no-fuse", dest="fuse", action="store_false", help="leave the backbone in its training form")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--force", action="store_true", help="replace files that exist")


@dataclass(frozen=True)
class Objects:
    """What was found in an image, the surest first.

    Attributes:
        boxes: `[N, 4]`, left, top, right, bottom in pixels.
        labels: `[N]`, numbers of classes.
        scores: `[N]`.
        masks: `[N, H, W]` of booleans, None from a detector without masks.
    """

    boxes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray
    masks: np.ndarray | None

    def above(self, score: float) -> "Objects":
        keep = self.scores >= score
        masks = None if self.masks is None else self.masks[keep]
        return Objects(self.boxes[keep], self.labels[keep], self.scores[keep], masks)


class PhotoDetector:
    """A detector that is ready for photographs.

    Attributes:
        find: from an RGB picture to the objects in it.
        classes: their names.
        colours: `[classes, 3]`.
    """

    def __init__(self, find: Callable[[Image.Image], Objects], classes: Sequence[str], palette=None) -> None:
        self.find = find
        self.classes = list(classes)
        self.colours = class_colours(len(self.classes), palette)


def open_photo_detector(model: str, config: Path | None, fuse: bool = True, device: str = "cpu") -> PhotoDetector:
    """A detector from a checkpoint and its configuration, or from a file of `wbmm export`."""
    if Path(model).suffix in EXPORTED:
        return _open_exported(model, device)
    if config is None:
        raise ValueError(f"{model}: a detector's checkpoint needs its configuration (--config FILE)")
    require("det")
    check_device(device)
    from mmdet.apis import inference_detector
    from mmengine.registry import DefaultScope

    from .networks import build_detector, dataset_meta

    net = build_detector(config, model, fuse="compact" if fuse else None).to(device)
    meta = dataset_meta(net)

    def find(image: Image.Image) -> Objects:
        bgr = np.ascontiguousarray(np.asarray(image.convert("RGB"))[..., ::-1])
        with DefaultScope.overwrite_default_scope("mmdet"):
            found = inference_detector(net, bgr).pred_instances.cpu().numpy()
        order = np.argsort(-found.scores, kind="stable")
        masks = found.masks[order].astype(bool) if "masks" in found else None
        return Objects(found.bboxes[order], found.labels[order], found.scores[order], masks)

    return PhotoDetector(find, meta.get("classes") or _unnamed(net), meta.get("palette"))


def _open_exported(model: str, device: str) -> PhotoDetector:
    detector = ExportedDetector(model, device)
    card = detector.card
    classes = card.class_names or [f"class {number}" for number in range(card.num_classes)]
    return PhotoDetector(lambda image: Objects(*detector.find(image)), classes, detector.pictures.palette)


def _unnamed(net) -> list[str]:
    head = getattr(net, "roi_head", net)
    head = getattr(head, "bbox_head", head)
    count = (head[0] if hasattr(head, "__getitem__") else head).num_classes
    return [f"class {number}" for number in range(count)]


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.score <= 1:
        raise ValueError(f"--score {args.score}: give a number from 0 to 1")
    if not args.pictures and args.json is None:
        raise ValueError("--no-pictures leaves nothing to write: give --json FILE")
    if args.annotations is not None and args.json is None:
        raise ValueError("--annotations is for the ids in --json FILE, which is not given")
    source = FileSource(find_images(args.images))
    targets = picture_targets(args.out, source.paths, args.force) if args.pictures else []
    if args.json is not None:
        check_target(args.json, args.force)
    detector = open_photo_detector(args.model, args.config, args.fuse, args.device)
    numbering = None if args.json is None else Numbering(source.paths, detector.classes, args.annotations)
    results: list[dict] = []
    done = 0
    for number, image in read_pictures(source):
        found = detector.find(image)
        if numbering is not None:
            results += to_results(source.paths[number], found, numbering)
        if args.pictures:
            _write_picture(image, found.above(args.score), detector, targets[number], args)
        done += 1
    bad = len(source) - done
    _report(args, results, done, bad)
    return 1 if bad else 0


def _write_picture(image: Image.Image, found: Objects, detector: PhotoDetector, target: Path, args) -> None:
    classes = list(map(printable, detector.classes))
    names = [f"{classes[n]} {s:.2f}" for n, s in zip(found.labels, found.scores, strict=True)]
    masks = found.masks if args.masks else None
    picture = draw_objects(image, found.boxes, names, distinct_colours(len(found.boxes)), masks)
    with atomic_path(target, args.force) as temporary:
        picture.save(temporary)
    counts = Counter(classes[number] for number in found.labels)
    print(f"{target}: {', '.join(f'{count} {name}' for name, count in counts.most_common()) or 'nothing'}")


def _report(args: argparse.Namespace, results: list[dict], done: int, bad: int) -> None:
    parts = [f"{done} pictures in {args.out}"] if args.pictures else [f"{done} images"]
    if args.json is not None:
        with atomic_path(args.json, args.force) as temporary:
            temporary.write_text(json.dumps(results))
        parts.append(f"{len(results)} objects in {args.json}")
    if bad:
        parts.append(f"{bad} could not be read")
    print("; ".join(parts))


class Numbering:
    """Which ids images and classes have in results: those of an annotation file, or the usual ones without it.

    Without: images are numbered by their names where all of these are numbers (as COCO's are), otherwise from 1;
    classes as in COCO where they are COCO's, otherwise from 1.

    Args:
        paths: the image files.
        classes: names of the model's classes.
        annotations: a file in COCO's format that lists them.
    """

    def __init__(self, paths: Sequence[Path], classes: Sequence[str], annotations: Path | None = None) -> None:
        if annotations is None:
            numbers = [int(path.stem) for path in paths if path.stem.isdecimal()]
            plain = len(set(numbers)) == len(paths)
            self.images = dict(zip(paths, numbers if plain else range(1, len(paths) + 1), strict=True))
            self.categories = _usual_ids(classes)
            return
        contents = read_annotations(annotations)
        by_name = {Path(image["file_name"]).name: image["id"] for image in contents["images"]}
        missing = [path for path in paths if path.name not in by_name]
        if missing:
            raise ValueError(f"{annotations} lists no image {missing[0].name}, nor {len(missing) - 1} others")
        for names, where in ((paths, "those to detect in"), (contents["images"], str(annotations))):
            names = [Path(name["file_name"]).name if isinstance(name, dict) else name.name for name in names]
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise ValueError(f"two images are called {twice[0]} among {where}: their ids cannot be told by name")
        ids = {category["name"]: category["id"] for category in contents["categories"]}
        unknown = [name for name in classes if name not in ids]
        if unknown:
            raise ValueError(f"{annotations} has no category {unknown[0]!r}, which is a class of the model")
        self.images = {path: by_name[path.name] for path in paths}
        self.categories = [ids[name] for name in classes]


def _usual_ids(classes: Sequence[str]) -> list[int]:
    if (len(classes), classes[0], classes[-1]) == COCO:
        return [number for number in range(1, 91) if number not in _GAPS]
    return list(range(1, len(classes) + 1))


def to_results(path: Path, found: Objects, numbering: Numbering) -> list[dict]:
    """The objects of one image, an entry each; masks as run-length codes.

    Args:
        path: of the image.
        found: its objects.
        numbering: of images and classes.
    """
    entries = []
    for i, (left, top, right, bottom) in enumerate(found.boxes.tolist()):
        entry = {
            "image_id": numbering.images[path],
            "file_name": path.name,
            "category_id": numbering.categories[int(found.labels[i])],
            "bbox": [round(value, 3) for value in (left, top, right - left, bottom - top)],
            "score": round(float(found.scores[i]), 5),
        }
        if found.masks is not None:
            entry["segmentation"] = _encode(found.masks[i])
        entries.append(entry)
    return entries


def _encode(mask: np.ndarray) -> dict:
    try:
        from pycocotools import mask as rle
    except ImportError:
        raise ImportError("masks in --json need pycocotools: pip install pycocotools") from None
    code = rle.encode(np.asfortranarray(mask.astype(np.uint8)))
    return {"size": list(map(int, code["size"])), "counts": code["counts"].decode()}

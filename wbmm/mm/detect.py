"""`wbmm detect`: pictures with boxes, masks, labels and scores; or the same as COCO's results in JSON."""

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from wbmm.data.images import find_images
from wbmm.data.sources import BadImage, FileSource
from wbmm.io.atomic import atomic_path, check_target
from wbmm.machine import check_device
from wbmm.progress import progress_bar
from wbmm.text import printable

from .coco import Numbering, to_results
from .drawing import class_colours, draw_objects, picture_targets

__all__ = ["EXAMPLE", "Detector", "Objects", "add_arguments", "open_detector", "run"]

EXAMPLE = "wbmm detect detector.pth photos/ --config configs/coco/NAME.py --out detected --json results.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint: a runner's, released, or of `wbmm reparam`")
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE_OR_FOLDER", help="folders are searched through")
    parser.add_argument("--config", type=Path, required=True, help="the detector's configuration")
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


class Detector:
    """A detector that is ready for photographs: call it with an RGB picture.

    Attributes:
        classes: their names.
        colours: `[classes, 3]`.
    """

    def __init__(self, net, device: str = "cpu") -> None:
        from .build import dataset_meta

        self.net = net.to(device)
        meta = dataset_meta(net)
        count = _num_classes(net)
        self.classes = list(meta.get("classes") or [f"class {number}" for number in range(count)])
        self.colours = class_colours(len(self.classes), meta.get("palette"))

    def __call__(self, image: Image.Image) -> Objects:
        from mmdet.apis import inference_detector
        from mmengine.registry import DefaultScope

        bgr = np.ascontiguousarray(np.asarray(image.convert("RGB"))[..., ::-1])
        with DefaultScope.overwrite_default_scope("mmdet"):
            found = inference_detector(self.net, bgr).pred_instances.cpu().numpy()
        order = np.argsort(-found.scores, kind="stable")
        masks = found.masks[order].astype(bool) if "masks" in found else None
        return Objects(found.bboxes[order], found.labels[order], found.scores[order], masks)


def open_detector(model: str, config: Path, fuse: bool = True, device: str = "cpu") -> Detector:
    """A detector from a checkpoint and its configuration."""
    from .build import require

    try:
        require("det")
    except ImportError as error:
        raise ValueError(str(error)) from None
    check_device(device)
    from .build import build_detector

    return Detector(build_detector(config, model, fuse="compact" if fuse else None), device)


def _num_classes(net) -> int:
    head = getattr(net, "roi_head", net)
    head = getattr(head, "bbox_head", head)
    return (head[0] if hasattr(head, "__getitem__") else head).num_classes


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
    detector = open_detector(args.model, args.config, args.fuse, args.device)
    numbering = None if args.json is None else Numbering(source.paths, detector.classes, args.annotations)
    results: list[dict] = []
    bad = 0
    with progress_bar(len(source), "images") as advance:
        for index, path in enumerate(source.paths):
            try:
                image = ImageOps.exif_transpose(source.image(index)).convert("RGB")  # as the loader of training does
            except BadImage as error:
                print(f"skipped: {error}")
                bad += 1
                advance(1)
                continue
            found = detector(image)
            if numbering is not None:
                results += to_results(path, found, numbering)
            if args.pictures:
                _write_picture(image, found.above(args.score), detector, targets[index], args)
            advance(1)
    _report(args, results, len(source) - bad, bad)
    return 1 if bad else 0


def _write_picture(image: Image.Image, found: Objects, detector: Detector, target: Path, args) -> None:
    classes = list(map(printable, detector.classes))
    names = [f"{classes[n]} {s:.2f}" for n, s in zip(found.labels, found.scores, strict=True)]
    masks = found.masks if args.masks else None
    picture = draw_objects(image, found.boxes, names, detector.colours[found.labels], masks)
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

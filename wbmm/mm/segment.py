"""`wbmm segment`: pictures with the classes of their pixels in colour, and a legend."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from wbmm.data.images import find_images
from wbmm.data.sources import FileSource
from wbmm.deploy.runtime import EXPORTED
from wbmm.io.atomic import atomic_path
from wbmm.machine import check_device
from wbmm.text import printable

from . import require
from .exported import ExportedSegmentor
from .pictures import class_colours, draw_classes, picture_targets, read_pictures

__all__ = ["EXAMPLE", "PhotoSegmenter", "add_arguments", "open_photo_segmenter", "run"]

EXAMPLE = "wbmm segment segmentor.pth photos/ --config configs/ade20k/NAME.py --out segmented"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint (with --config), or a segmentor of `wbmm export`")
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE_OR_FOLDER", help="folders are searched through")
    parser.add_argument("--config", type=Path, help="the segmentor's configuration")
    parser.add_argument("--out", type=Path, default=Path("segmented"), metavar="DIR", help="made if it is missing")
    parser.add_argument("--opacity", type=float, default=0.6, help="of the colours, from 0 to 1 (default: 0.6)")
    parser.add_argument("--labels", action="store_true", help="write the class numbers too, as NAME.labels.png")
    parser.add_argument("--no-fuse", dest="fuse", action="store_false", help="leave the backbone in its training form")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--force", action="store_true", help="replace pictures that exist")


class PhotoSegmenter:
    """A segmentor that is ready for photographs.

    Attributes:
        labels: from an RGB picture to the class of each of its pixels, `[H, W]`.
        classes: their names.
        colours: `[classes, 3]`.
    """

    def __init__(self, labels: Callable[[Image.Image], np.ndarray], classes: Sequence[str], palette=None) -> None:
        self.labels = labels
        self.classes = list(map(printable, classes))
        self.colours = class_colours(len(self.classes), palette)


def open_photo_segmenter(model: str, config: Path | None, fuse: bool = True, device: str = "cpu") -> PhotoSegmenter:
    """A segmentor from a checkpoint and its configuration, or from a file of `wbmm export`."""
    if Path(model).suffix in EXPORTED:
        return _open_exported(model, device)
    if config is None:
        raise ValueError(f"{model}: a segmentor's checkpoint needs its configuration (--config FILE)")
    require("seg")
    check_device(device)
    return _open_checkpoint(model, config, fuse, device)


def _open_checkpoint(model: str, config: Path, fuse: bool, device: str) -> PhotoSegmenter:
    from mmengine.registry import DefaultScope
    from mmseg.apis import inference_model

    from .networks import build_segmentor, dataset_meta

    net = build_segmentor(config, model, fuse="compact" if fuse else None).to(device)
    meta = dataset_meta(net)
    if net.cfg.get("test_dataloader"):  # mmseg would take the variable, which a change of the data loader leaves behind
        net.cfg.test_pipeline = net.cfg.test_dataloader.dataset.pipeline

    def labels(image: Image.Image) -> np.ndarray:
        bgr = np.ascontiguousarray(np.asarray(image)[..., ::-1])
        with DefaultScope.overwrite_default_scope("mmseg"):
            return inference_model(net, bgr).pred_sem_seg.data[0].long().cpu().numpy()

    return PhotoSegmenter(labels, meta.get("classes") or _unnamed(net.decode_head.num_classes), meta.get("palette"))


def _open_exported(model: str, device: str) -> PhotoSegmenter:
    segmentor = ExportedSegmentor(model, device)
    card = segmentor.card
    classes = card.class_names or _unnamed(card.num_classes)
    return PhotoSegmenter(segmentor.labels, classes, segmentor.pictures.palette)


def _unnamed(count: int) -> list[str]:
    return [f"class {number}" for number in range(count)]


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.opacity <= 1:
        raise ValueError(f"--opacity {args.opacity}: give a number from 0 to 1")
    source = FileSource(find_images(args.images))
    targets = picture_targets(args.out, source.paths, args.force)
    segmenter = open_photo_segmenter(args.model, args.config, args.fuse, args.device)
    done = 0
    for number, image in read_pictures(source):
        _write(image, segmenter, targets[number], args)
        done += 1
    bad = len(source) - done
    print(f"{done} pictures in {args.out}" + (f"; {bad} could not be read" if bad else ""))
    return 1 if bad else 0


def _write(image: Image.Image, segmenter: PhotoSegmenter, target: Path, args: argparse.Namespace) -> None:
    labels = segmenter.labels(image)
    with atomic_path(target, args.force) as temporary:
        draw_classes(image, labels, segmenter.classes, segmenter.colours, args.opacity).save(temporary)
    if args.labels:
        with atomic_path(target.with_suffix(".labels.png"), args.force) as temporary:
            Image.fromarray(labels.astype(np.uint8 if labels.max() < 256 else np.uint16)).save(temporary)
    shares = np.bincount(labels.ravel(), minlength=len(segmenter.classes)) / labels.size
    best = [f"{segmenter.classes[n]} {100 * shares[n]:.0f}%" for n in np.argsort(-shares)[:5] if shares[n] >= 0.005]
    print(f"{target}: {', '.join(best)}")

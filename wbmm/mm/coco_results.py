"""Detections in the format of COCO's results, which its tools and servers read."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .coco import read_annotations

__all__ = ["Numbering", "to_results"]

# COCO numbers its 80 classes from 1 to 90.
_GAPS = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}


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
    from mmdet.datasets import CocoDataset

    if tuple(classes) == tuple(CocoDataset.METAINFO["classes"]):
        return [number for number in range(1, 91) if number not in _GAPS]
    return list(range(1, len(classes) + 1))


def to_results(path: Path, found, numbering: Numbering) -> list[dict]:
    """The objects of one image, an entry each; masks as run-length codes.

    Args:
        path: of the image.
        found: `boxes [N, 4]`, `labels`, `scores` and `masks` (or None), see `Objects` in `detect.py`.
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
    from pycocotools import mask as rle

    code = rle.encode(np.asfortranarray(mask.astype(np.uint8)))
    return {"size": list(map(int, code["size"])), "counts": code["counts"].decode()}

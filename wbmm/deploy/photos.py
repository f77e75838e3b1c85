"""Real images for checking that two forms of a model agree."""

import stat
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from wbmm.train.data.folders import SUFFIXES, list_images
from wbmm.train.data.sources import FileSource

from .card import ModelCard

__all__ = ["find_images", "photo_batch"]

KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def find_images(paths: list[Path]) -> list[Path]:
    """The image files among `paths` and inside the folders among them, sorted within each folder."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(map(Path, list_images(path)))
            if not inside:
                raise ValueError(f"no image in the folder {path}: looked for {', '.join(SUFFIXES)}")
            found += inside
        elif path.is_file():
            found.append(path)
        elif path.exists():
            kind = KINDS.get(stat.S_IFMT(path.stat().st_mode), "a device")
            raise ValueError(f"{path} is {kind}: give regular files, or folders of them")
        else:
            raise ValueError(f"{path}: there is no such file or folder")
    return found


def photo_batch(card: ModelCard, folder: Path | None = None, count: int = 8) -> Tensor:
    """`[count, C, H, W]`: images of a folder, or crops of the two photographs that scikit-learn ships."""
    transform = card.transform()
    return torch.stack([transform(image) for image in (_from_folder(folder, count) if folder else _crops(count))])


def _from_folder(folder: Path, count: int) -> list[Image.Image]:
    source = FileSource(find_images([folder])[:count])
    return [source.image(index) for index in range(len(source))]


def _crops(count: int) -> list[Image.Image]:
    """Quarters and the whole of each photograph, then the same mirrored."""
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise ImportError(
            "the photographs for this check come with scikit-learn: in the checkout, pip install '.[train]', "
            "or give a folder of your own (--images DIR)"
        ) from error
    photos = [Image.fromarray(array) for array in load_sample_images().images]
    crops = []
    for box in ((0, 0, 1, 1), (0, 0, 0.5, 0.5), (0.5, 0, 1, 0.5), (0, 0.5, 0.5, 1), (0.5, 0.5, 1, 1)):
        for photo in photos:
            width, height = photo.size
            crops.append(photo.crop((box[0] * width, box[1] * height, box[2] * width, box[3] * height)))
    crops += [crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for crop in crops]
    return crops[:count]

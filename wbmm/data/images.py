"""Images for a model, read as its card says: labelled sets, batches, and pictures for comparisons, drawn if need be."""

import logging
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from wbmm.io.card import ModelCard

from .classes import in_order_of
from .folders import SUFFIXES, SYNONYMS, list_images, locate, number_labels, read_list
from .loader import WORKER_TIMEOUT_S
from .settings import DataConfig
from .sources import ArraySource, BadImage, FileSource, Source, Subset, first_of_each_class, open_source

__all__ = [
    "Batch",
    "batches",
    "check_batch",
    "draw_landscape",
    "find_images",
    "match_classes",
    "no_more_than",
    "open_labelled",
]

NEEDS_NO_FOLDER = ("digits", "hfds")
SPLITS = {"train", "val", "test", *(name for names in SYNONYMS.values() for name in names)}
NOT_FILES = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}

_logger = logging.getLogger(__name__)


def open_labelled(card: ModelCard, root: str | Path | None, source: str = "folder", split: str = "val") -> Source:
    """A labelled set, in any form that training reads.

    Args:
        card: of the model that will see it.
        root: the folder that holds the splits, or for `folder` also one that holds the class folders themselves, or a
            CSV file of paths and labels.
        source: as `data.source` of a training configuration.
        split: `val`, `train` or what the set calls it.
    """
    if not root and source.partition("/")[0] not in NEEDS_NO_FOLDER:
        raise ValueError(f"--source {source} reads labelled pictures from a folder: --data DIR")
    if root and Path(root).suffix.lower() == ".csv":
        return _listed(Path(root).expanduser(), split)
    if root and not Path(root).expanduser().is_dir():
        raise ValueError(f"{root}: there is no such folder")
    root = str(Path(root).expanduser()) if root else None
    if source == "folder" and not _holds_splits(Path(root), split):
        folder = Path(root).resolve()
        root, split = str(folder.parent), folder.name
    cfg = DataConfig(source=source, root=root, train_split=split, val_split=split, in_chans=card.input_size[0])
    found = open_source(cfg, train=split == "train")
    if not len(found):
        raise ValueError(f"there are no images in {root or source}, split {split!r}")
    if card.class_names and not found.class_names:
        _logger.warning("the data has no class names: its labels are taken for the model's class numbers")
    return found


def _listed(file: Path, split: str) -> Source:
    """The pictures of a list: those of the split, if it has splits."""
    pictures = read_list(file)
    names = pictures.class_names
    chosen = pictures if pictures.splits is None else pictures.of_split(split)
    return FileSource(locate(file.parent, chosen.paths), number_labels(chosen.labels, names), names)


def _holds_splits(root: Path, split: str) -> bool:
    """Whether the folders in `root` are splits, not classes."""
    folders = {path.name for path in root.iterdir() if path.is_dir()}
    return bool(folders & {split, *SYNONYMS.get(split, ())}) or bool(folders and folders <= SPLITS)


def match_classes(card: ModelCard, source: Source) -> Source:
    """The source with labels that mean the model's classes; raises if they do not."""
    names, count = source.class_names, source.num_classes
    if int(source.labels.min()) < 0:
        raise ValueError(f"the data has a label below 0, of {source.name(int(np.argmin(source.labels)))}")
    if int(source.labels.max()) >= count:
        bad = int(np.argmax(source.labels))
        raise ValueError(f"the data names {count} classes, but {source.name(bad)} has the label {source.labels[bad]}")
    if count > card.num_classes:
        raise ValueError(f"the data has {count} classes, the model {card.num_classes}: accuracy would be meaningless")
    if names and count < card.num_classes:
        raise ValueError(
            f"the data has {count} classes, the model {card.num_classes}, and labels go by the order of the names: "
            "accuracy would be meaningless. Give every class its folder"
        )
    return in_order_of(source, card.class_names, "the model")


def no_more_than(source: Source, limit: int | None) -> Source:
    """At most `limit` images, equally many of each class, in order."""
    if limit is None or limit >= len(source):
        return source
    return Subset(source, first_of_each_class(source.labels, limit))


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
            kind = NOT_FILES.get(stat.S_IFMT(path.stat().st_mode), "a device")
            raise ValueError(f"{path} is {kind}: give regular files, or folders of them")
        else:
            raise ValueError(f"{path}: there is no such file or folder")
    return found


@dataclass
class Batch:
    """What was read of some images: the good ones, and a sentence for each bad one.

    Attributes:
        indices: `[N]`, of the good ones in their source.
        images: `[N, C, H, W]`, or None if there is none.
        labels: `[N]`.
        errors: index to what is wrong.
    """

    indices: list[int]
    images: Tensor | None
    labels: Tensor
    errors: dict[int, str]


def batches(source: Source, card: ModelCard, batch: int, workers: int = 0) -> Iterator[Batch]:
    """The images of a source in order, through the card's transform; `workers` processes read files."""
    held = source.source if isinstance(source, Subset) else source
    if isinstance(held, ArraySource) or len(source) <= batch:
        workers = 0
    loader = DataLoader(
        _Samples(source, card.transform()),
        batch_size=batch,
        num_workers=workers,
        collate_fn=_collate,
        timeout=WORKER_TIMEOUT_S if workers else 0,
    )
    yield from loader


class _Samples(Dataset):
    def __init__(self, source: Source, transform):
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int):
        try:
            return index, self.transform(self.source.image(index)), int(self.source.labels[index]), ""
        except BadImage as error:
            return index, None, 0, str(error)


def _collate(samples: list) -> Batch:
    good = [sample for sample in samples if sample[1] is not None]
    return Batch(
        [sample[0] for sample in good],
        torch.stack([sample[1] for sample in good]) if good else None,
        torch.tensor([sample[2] for sample in good], dtype=torch.int64),
        {sample[0]: sample[3] for sample in samples if sample[1] is None},
    )


def check_batch(card: ModelCard, folder: Path | None = None, count: int = 8) -> tuple[Tensor, str]:
    """Images `[N, C, H, W]` to compare two forms of a model on, and what they are in words.

    They are up to `count` images of a folder, or drawn landscapes where there is none.
    """
    if folder is None:
        pictures, what = [draw_landscape(number) for number in range(count)], "drawn landscapes"
    else:
        source = FileSource(find_images([folder])[:count])
        pictures, what = [source.image(index) for index in range(len(source))], f"images of {folder}"
    transform = card.transform()
    return torch.stack([transform(picture) for picture in pictures]), what


LANDSCAPE = (288, 384)  # height, width
HILLS, STONES = 4, 8


def draw_landscape(number: int) -> Image.Image:
    """One of any number of different landscapes, in RGB: a sky, hills before each other, stones on the ground.

    They have what a photograph has and noise has not: a spectrum that falls off with the frequency, smooth shading,
    edges at every scale and correlated colours. The same number always gives the same picture.
    """
    rng = np.random.default_rng(number)
    height, width = LANDSCAPE
    rows, columns = np.mgrid[0:height, 0:width] / [[[height]], [[width]]]
    picture = _colour(rng) + 0.4 * rows[..., None] + 0.15 * _texture(rng, slope=1.5)[..., None]
    for hill in range(HILLS):
        ridge = 0.35 + 0.15 * hill + 0.12 * _texture(rng, slope=1.7)[0]  # a row of noise is an outline
        picture = _paint(picture, rows > ridge, rng, shade=1 - 0.6 * (rows - ridge))
    for _ in range(STONES):
        y, x, radius = rng.uniform(0.55, 1), rng.uniform(0, 1), rng.uniform(0.02, 0.12)
        distance = np.hypot((rows - y) * 1.5, columns - x) / (radius * (1 + 0.2 * _texture(rng, slope=1.5)))
        light = np.clip(1 - 0.7 * ((rows - y) + (columns - x)) / radius, 0.2, 1.6)
        picture = _paint(picture, distance < 1, rng, shade=light)
    picture += rng.normal(0, 0.01, picture.shape)  # the grain of a sensor
    return Image.fromarray((255 * np.clip(picture, 0, 1)).round().astype(np.uint8))


def _paint(picture: np.ndarray, where: np.ndarray, rng: np.random.Generator, shade: np.ndarray) -> np.ndarray:
    """The picture with a surface of a new colour and texture at some places."""
    texture = 1 + 0.3 * _texture(rng, slope=rng.uniform(0.8, 1.3))
    surface = _colour(rng) * (shade * texture)[..., None]
    return np.where(where[..., None], surface, picture)


def _colour(rng: np.random.Generator) -> np.ndarray:
    """Mostly grey: the channels of a photograph differ little."""
    return np.clip(rng.uniform(0.15, 0.7) + rng.normal(0, 0.1, 3), 0.02, 1)


def _texture(rng: np.random.Generator, slope: float) -> np.ndarray:
    """Noise of mean 0 and variance 1 whose amplitudes fall as 1 / frequency ** slope; 1 is usual in photographs."""
    spectrum = np.fft.rfft2(rng.normal(size=LANDSCAPE))
    frequency = np.hypot(np.fft.fftfreq(LANDSCAPE[0])[:, None], np.fft.rfftfreq(LANDSCAPE[1])[None])
    frequency[0, 0] = np.inf
    noise = np.fft.irfft2(spectrum / frequency**slope, LANDSCAPE)
    return noise / noise.std()

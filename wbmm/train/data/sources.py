"""Where images come from: folders, tar files and Hugging Face datasets through timm's readers, shards, arrays."""

from pathlib import Path

import numpy as np
from PIL import Image

from ..config import DataConfig
from . import check
from .idx import read_idx_split
from .shards import ShardReader

__all__ = ["ArraySource", "BadImage", "ReaderSource", "Source", "Subset", "open_source"]

STREAMING = ("hfids", "tfds")
SOURCES = ("folder", "tar", "wds", "hfds/<name or folder>", "digits", "idx")


class BadImage(ValueError):
    """An image that cannot be read; the text names its file."""


class Source:
    """Images that can be asked for by index, and their labels.

    Attributes:
        labels: [N] class numbers.
        class_names: One name a class, or None where the source has none.
    """

    labels: np.ndarray
    class_names: list[str] | None

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """The decoded image, in whatever mode it is stored. Raises BadImage."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        raise NotImplementedError


class ReaderSource(Source):
    """A timm reader: file-like object and label by index."""

    def __init__(self, reader, labels, class_names: list[str] | None = None):
        self.reader = reader
        self.labels = np.asarray(labels, dtype=np.int64)
        self.class_names = class_names

    def image(self, index: int) -> Image.Image:
        # PIL and the readers raise OSError, SyntaxError, struct.error, tarfile.ReadError, ...: one meaning here.
        try:
            with self.reader[int(index)][0] as file:
                image = Image.open(file)
                image.load()
                return image
        except Exception as error:
            raise BadImage(f"cannot read image {self.name(index)}: {error}") from error

    def name(self, index: int) -> str:
        return str(self.reader.filename(int(index), absolute=True))


class ArraySource(Source):
    """Images held as a uint8 array [N, H, W] or [N, H, W, 3]."""

    def __init__(self, images: np.ndarray, labels, where: str, class_names: list[str] | None = None):
        self.images = images
        self.labels = np.asarray(labels, dtype=np.int64)
        self.class_names = class_names
        self.where = where

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self.images[index])

    def name(self, index: int) -> str:
        return f"{self.where}[{index}]"


class Subset(Source):
    """Some samples of a source, renumbered."""

    def __init__(self, source: Source, indices: np.ndarray):
        self.source, self.indices = source, indices
        self.labels, self.class_names = source.labels[indices], source.class_names

    def image(self, index: int) -> Image.Image:
        return self.source.image(self.indices[index])

    def name(self, index: int) -> str:
        return self.source.name(self.indices[index])


def open_source(cfg: DataConfig, train: bool) -> Source:
    """The training or validation set of a configuration."""
    args = dict(cfg.args)
    limits = {True: args.pop("train_limit", None), False: args.pop("val_limit", None)}
    source = _open(cfg, cfg.train_split if train else cfg.val_split, train, args)
    if limits[train] is None:
        return source
    return Subset(source, first_of_each_class(source.labels, limits[train]))


def first_of_each_class(labels: np.ndarray, limit: int) -> np.ndarray:
    """The indices of `limit` samples, the first of each class and as many of each as the limit allows, in order."""
    if not 0 < limit <= len(labels):
        raise ValueError(f"a limit of {limit} images does not fit a set of {len(labels)}: give 1 to {len(labels)}")
    by_class = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[by_class], labels[by_class])
    place_in_class = np.arange(len(labels)) - starts
    return np.sort(by_class[np.argsort(place_in_class, kind="stable")[:limit]])


def _open(cfg: DataConfig, split: str, train: bool, args: dict) -> Source:
    kind, _, name = cfg.source.partition("/")
    if kind in STREAMING:
        raise ValueError(
            f"data.source {cfg.source!r} is a stream, which cannot be read by index: order, resume and evaluation "
            f"would not be exact. Use one of: {', '.join(SOURCES)}"
        )
    if kind == "hfds":
        return _hugging_face(name, cfg.root, split, args)
    openers = {"folder": _folder, "tar": _tar, "wds": _shards}
    if cfg.source in openers:
        return openers[cfg.source](check.root_folder(cfg), split, args)
    if args:
        raise ValueError(f"data.source {cfg.source!r} takes no data.args but train_limit and val_limit, got {args}")
    if cfg.source == "digits":
        return _digits(train)
    if cfg.source == "idx":
        images, labels, where = read_idx_split(check.root_folder(cfg), split)
        return ArraySource(images, labels, where)
    raise ValueError(f"data.source is {cfg.source!r}; valid: {', '.join(SOURCES)}")


def _folder(root: Path, split: str, args: dict) -> Source:
    from timm.data import create_dataset

    folder = check.split_folder(root, split)
    check.class_folders(folder)
    reader = create_dataset("", root=str(folder), search_split=False, **args).reader
    return ReaderSource(reader, [label for _, label in reader.samples], _names(reader.class_to_idx))


def _tar(root: Path, split: str, args: dict) -> Source:
    from timm.data.readers.reader_image_in_tar import ReaderImageInTar

    single = root / f"{split}.tar"
    path = single if single.is_file() else check.split_folder(root, split)
    if path.is_dir() and not any(path.glob("*.tar")):
        raise ValueError(f"no tar file in {path}: data.source=tar reads {single} or {path}/*.tar")
    reader = ReaderImageInTar(str(path), **args)
    return ReaderSource(reader, reader.targets, _names(reader.class_name_to_idx))


def _shards(root: Path, split: str, args: dict) -> Source:
    reader = ShardReader(root, split, **args)
    return ReaderSource(reader, reader.labels)


def _hugging_face(name: str, root: str | None, split: str, args: dict) -> Source:
    if not name:
        raise ValueError("data.source 'hfds' needs the dataset's name or folder: hfds/<name>")
    try:
        from timm.data.readers.reader_hfds import ReaderHfds
    except ImportError as error:
        raise ImportError("Hugging Face datasets need the package datasets: pip install datasets") from error
    # timm's create_dataset lower-cases the name, which breaks folders
    reader = ReaderHfds(name=name, root=root, split=split, **args)
    labels = np.asarray(reader.dataset[reader.label_key], dtype=np.int64)
    return ReaderSource(reader, labels, _names(reader.class_to_idx) or None)


def _digits(train: bool) -> Source:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("data.source=digits needs scikit-learn: in the checkout, pip install '.[train]'") from error
    data = load_digits()
    images = np.round(data.images * (255 / 16)).astype(np.uint8)
    # Every fifth sample of each class is for validation: 1437 and 360, a split that never changes.
    by_class = np.argsort(data.target, kind="stable")
    held_out = np.zeros(len(by_class), dtype=bool)
    held_out[by_class[::5]] = True
    chosen = np.flatnonzero(held_out != train)
    return ArraySource(images[chosen], data.target[chosen], "digits", [str(i) for i in range(10)])


def _names(class_to_idx: dict) -> list[str]:
    return [name for name, _ in sorted(class_to_idx.items(), key=lambda item: item[1])]

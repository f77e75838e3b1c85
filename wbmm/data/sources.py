"""Where images come from: folders, lists, tar files, shards, idx files, Hugging Face datasets; all read by index."""

import gzip
import io
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from wbmm.extras import need
from wbmm.text import first_line

from .folders import check_class_names, class_images, locate, number_labels, read_class_names, read_list, split_folder
from .settings import READER_ARGS, DataConfig, check_reader_args
from .shards import PlacedImages, find_class_names, open_shards, open_tars

__all__ = [
    "ArraySource",
    "BadImage",
    "FileSource",
    "Source",
    "Subset",
    "first_of_each_class",
    "open_source",
    "read_idx",
    "read_idx_split",
]

STREAMING = ("hfids", "tfds")
SOURCES = ("folder", "csv", "tar", "wds", "hfds/<name or folder>", "digits", "idx")
# What PIL may take a file for, whatever its name says; left to itself it tries dozens, some of which run programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
EIGHT_BIT_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV"}
IDX_PREFIXES = {"train": "train", "val": "t10k", "validation": "t10k", "test": "t10k", "t10k": "t10k"}


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

    @property
    def num_classes(self) -> int:
        """As many as there are names, or up to the largest label."""
        return len(self.class_names) if self.class_names else int(self.labels.max()) + 1

    def image(self, index: int) -> Image.Image:
        """The decoded image, in whatever 8-bit mode fits it. Raises BadImage."""
        # PIL and the readers raise OSError, SyntaxError, DecompressionBombError, struct.error, ...: one meaning here.
        try:
            with self.open(int(index)) as file:
                return decode(file)
        except Exception as error:
            raise BadImage(f"cannot read image {self.name(index)}: {first_line(error)}") from error

    def open(self, index: int) -> BinaryIO:
        """The file of an image."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        raise NotImplementedError


def decode(file: BinaryIO) -> Image.Image:
    """The picture in a file, with 8 bits a channel."""
    if not file.read(1):
        raise OSError("the file is empty")
    file.seek(0)
    try:
        image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        raise OSError(f"its contents are not a supported image format ({', '.join(FORMATS)})") from None
    image.load()
    if image.mode in EIGHT_BIT_MODES:
        return image
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))  # PIL's conversion would clip at 255
    raise ValueError(f"pixels of PIL's mode {image.mode} have no fixed range: save it with 8 or 16 bits a channel")


class FileSource(Source):
    """Image files; without labels all are 0."""

    def __init__(self, paths: Sequence[str | Path], labels=None, class_names: list[str] | None = None):
        self.paths, self.class_names = paths, class_names
        self.labels = np.zeros(len(paths), dtype=np.int64) if labels is None else np.asarray(labels, dtype=np.int64)

    def open(self, index: int) -> BinaryIO:
        return open(self.paths[index], "rb")

    def name(self, index: int) -> str:
        return str(self.paths[index])


class TarSource(Source):
    """Images inside tar files, at places that are known."""

    def __init__(self, places: PlacedImages, class_names: list[str] | None):
        self.places, self.labels, self.class_names = places, places.labels, class_names

    def open(self, index: int) -> BinaryIO:
        return io.BytesIO(self.places.read(index))

    def name(self, index: int) -> str:
        return self.places.name(index)


class HuggingFaceSource(Source):
    """A dataset of the package datasets, whose images are kept encoded."""

    def __init__(self, dataset, image_key: str, labels, class_names: list[str] | None):
        self.dataset, self.image_key = dataset, image_key
        self.labels = np.asarray(labels, dtype=np.int64)
        self.class_names = class_names

    def open(self, index: int) -> BinaryIO:
        image = self.dataset[index][self.image_key]
        return io.BytesIO(image["bytes"]) if image["bytes"] else open(image["path"], "rb")

    def name(self, index: int) -> str:
        return self.dataset[int(index)][self.image_key]["path"] or f"number {index} of {self.dataset.split}"


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

    @property
    def num_classes(self) -> int:
        return self.source.num_classes

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
    if kind not in READER_ARGS or (name and kind != "hfds"):
        raise ValueError(f"data.source is {cfg.source!r}; valid: {', '.join(SOURCES)}")
    check_reader_args(cfg)
    if kind == "hfds":
        return _hugging_face(name, cfg.root, split, **args)
    if kind == "digits":
        return _digits(train)
    openers = {"folder": _folder, "csv": _csv, "tar": _tar, "wds": _shards, "idx": _idx}
    return openers[kind](_root_folder(cfg), split, **args)


def _root_folder(cfg: DataConfig) -> Path:
    """`data.root` as a folder that exists."""
    if not cfg.root:
        raise ValueError(f"data.source {cfg.source!r} reads a folder: give it as data.root=/path/to/data")
    try:
        root = Path(cfg.root).expanduser()
    except RuntimeError:
        raise ValueError(f"data.root {cfg.root!r}: there is no such user") from None
    if not root.is_dir():
        raise ValueError(f"data.root {str(root)!r} is not a folder")
    return root


def _class_order(root: Path, class_map: str | list | None) -> list[str] | None:
    """The classes of `data.args.class_map`, in order: a list, or a file with one on each line."""
    if class_map is None:
        return None
    if isinstance(class_map, list):
        check_class_names(class_map, Path("data.args.class_map"))
        return class_map
    if not isinstance(class_map, str):
        raise ValueError(f"data.args.class_map should be a text file or a list of names, got {class_map!r}")
    given = Path(class_map)
    return read_class_names(given if given.exists() else root / given)


def _folder(root: Path, split: str, class_map: str | list | None = None) -> Source:
    return FileSource(*class_images(split_folder(root, split), _class_order(root, class_map)))


def _csv(root: Path, split: str, file: str | None = None) -> Source:
    if file is None:
        raise ValueError("data.source=csv reads a list of pictures: give it as data.args.file=pictures.csv")
    given = Path(file).expanduser()
    pictures = read_list(given if given.exists() else root / given)
    names, chosen = pictures.class_names, pictures.of_split(split)
    return FileSource(locate(root, chosen.paths), number_labels(chosen.labels, names), names)


def _tar(root: Path, split: str, class_map: str | list | None = None) -> Source:
    single = root / f"{split}.tar"
    if single.is_file():
        files = [single]
    else:
        folder = split_folder(root, split)
        files = sorted(file for file in folder.glob("*.tar") if file.is_file())
        if not files:
            raise ValueError(f"no tar file in {folder}: data.source=tar reads {single} or {folder}/*.tar")
    return TarSource(*open_tars(files, _class_order(root, class_map)))


def _shards(root: Path, split: str, **options) -> Source:
    return TarSource(*open_shards(root, split, **options))


def _idx(root: Path, split: str) -> Source:
    images, labels, where = read_idx_split(root, split)
    return ArraySource(images, labels, where, find_class_names(root))


def read_idx_split(root: Path, split: str) -> tuple[np.ndarray, np.ndarray, str]:
    """The images [N, H, W], the labels [N] and the image file of a split, from a folder with MNIST's file names."""
    if split not in IDX_PREFIXES:
        raise ValueError(f"the idx split is {split!r}; valid: {', '.join(IDX_PREFIXES)}")
    image_file = _find_idx(root, f"{IDX_PREFIXES[split]}-images-idx3-ubyte")
    label_file = _find_idx(root, f"{IDX_PREFIXES[split]}-labels-idx1-ubyte")
    images, labels = read_idx(image_file), read_idx(label_file)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise ValueError(f"{image_file} holds {images.shape} and {label_file} {labels.shape}: not images and labels")
    return images, labels.astype(np.int64), str(image_file)


def _find_idx(root: Path, name: str) -> Path:
    for path in (root / name, root / f"{name}.gz"):
        if path.is_file():
            return path
    raise ValueError(
        f"{root} has neither {name} nor {name}.gz. Fashion-MNIST comes with Debian's package dataset-fashion-mnist "
        "(/usr/share/datasets/fashion-mnist) or with torchvision (FashionMNIST/raw)"
    )


def read_idx(path: str | Path) -> np.ndarray:
    """Reads a file of unsigned bytes: two zero bytes, type 8, the number of dimensions, the sizes, the data."""
    raw = Path(path).read_bytes()
    try:
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError) as error:
        raise ValueError(f"{path} is a damaged gzip file: {error}") from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is not an idx file of unsigned bytes: it starts with {raw[:4].hex()}")
    dims = raw[3]
    shape = tuple(int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(dims))
    data = np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * dims) if len(raw) >= 4 + 4 * dims else np.empty(0)
    if data.size != int(np.prod(shape)):
        raise ValueError(f"{path} should hold {shape} = {int(np.prod(shape))} bytes of data, it has {data.size}")
    return data.reshape(shape)


def _hugging_face(
    name: str, root: str | None, split: str, input_key: str = "image", target_key: str = "label"
) -> Source:
    if not name:
        raise ValueError("data.source 'hfds' needs the dataset's name or folder: hfds/<name>")
    datasets = need("datasets", "data.source=hfds")
    found = datasets.load_dataset(name, split=split, cache_dir=root)
    for option, key in (("input_key", input_key), ("target_key", target_key)):
        if key not in found.column_names:
            has = ", ".join(found.column_names)
            raise ValueError(f"{name} has no column {key!r}, it has {has}: set data.args.{option}")
    found = found.cast_column(input_key, datasets.Image(decode=False))
    labels = np.asarray(found[target_key][:])
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise ValueError(f"column {target_key!r} of {name} holds no class numbers: {found.features[target_key]}")
    return HuggingFaceSource(found, input_key, labels, getattr(found.features[target_key], "names", None))


def _digits(train: bool) -> Source:
    data = need("sklearn.datasets", "data.source=digits").load_digits()
    images = np.round(data.images * (255 / 16)).astype(np.uint8)
    # Every fifth sample of each class is for validation: 1437 and 360, a split that never changes.
    by_class = np.argsort(data.target, kind="stable")
    held_out = np.zeros(len(by_class), dtype=bool)
    held_out[by_class[::5]] = True
    chosen = np.flatnonzero(held_out != train)
    return ArraySource(images[chosen], data.target[chosen], "digits", [str(i) for i in range(10)])

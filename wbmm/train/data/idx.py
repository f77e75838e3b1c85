"""idx files, the format of MNIST and Fashion-MNIST, gzipped or not."""

import gzip
from pathlib import Path

import numpy as np

__all__ = ["read_idx", "read_idx_split"]

PREFIXES = {"train": "train", "val": "t10k", "validation": "t10k", "test": "t10k", "t10k": "t10k"}


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


def read_idx_split(root: Path, split: str) -> tuple[np.ndarray, np.ndarray, str]:
    """The images [N, H, W], the labels [N] and the image file of a split, from a folder with MNIST's file names."""
    if split not in PREFIXES:
        raise ValueError(f"the idx split is {split!r}; valid: {', '.join(PREFIXES)}")
    image_file = _find(root, f"{PREFIXES[split]}-images-idx3-ubyte")
    label_file = _find(root, f"{PREFIXES[split]}-labels-idx1-ubyte")
    images, labels = read_idx(image_file), read_idx(label_file)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise ValueError(f"{image_file} holds {images.shape} and {label_file} {labels.shape}: not images and labels")
    return images, labels.astype(np.int64), str(image_file)


def _find(root: Path, name: str) -> Path:
    for path in (root / name, root / f"{name}.gz"):
        if path.is_file():
            return path
    raise ValueError(
        f"{root} has neither {name} nor {name}.gz. Fashion-MNIST comes with Debian's package dataset-fashion-mnist "
        "(/usr/share/datasets/fashion-mnist) or with torchvision (FashionMNIST/raw)"
    )

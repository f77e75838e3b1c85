"""Images inside tar files, read by index: WebDataset shards, and tar files of class folders.

timm's own readers stream: their order depends on the workers and they cannot start in the middle. Tar files on a disk
are not compressed, so an index of where each image lies gives random access, exact order and exact resume.
"""

import hashlib
import json
import logging
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wbmm.io.atomic import replacing

from .folders import check_class_names, is_image, natural_order, number_classes, read_class_names

__all__ = ["PlacedImages", "find_class_names", "open_shards", "open_tars", "shard_files"]

IMAGES = ("jpg", "jpeg", "png", "webp")
FIELDS = ("shard", "offset", "size", "label")
CLASSES, INFO = "classes.txt", "_info.json"
MOST_LABEL_BYTES = 16

_logger = logging.getLogger(__name__)


@dataclass
class PlacedImages:
    """Where images lie in files.

    Attributes:
        files: the tar files.
        table: `[4, N]`: the number of the file, offset and size in bytes, and the label of each image.
    """

    files: list[Path]
    table: np.ndarray

    @property
    def labels(self) -> np.ndarray:
        return self.table[3]

    def read(self, index: int) -> bytes:
        # Opened for each read: the order is random over all shards, so that keeping some open would seldom help, and
        # keeping all open exceeds the limit on open files.
        shard, offset, size, _ = map(int, self.table[:, index])
        with open(self.files[shard], "rb", buffering=0) as file:
            return os.pread(file.fileno(), size, offset)

    def name(self, index: int) -> str:
        return f"{self.files[int(self.table[0, index])]} at byte {int(self.table[1, index])}"

    def fits(self) -> bool:
        """Whether every image lies inside its file."""
        shard, offset, size, _ = self.table
        if not ((shard >= 0) & (shard < len(self.files)) & (offset >= 0) & (size >= 0)).all():
            return False
        ends = np.array([file.stat().st_size for file in self.files], dtype=np.int64)
        return bool((size <= ends[shard] - offset).all())


def open_shards(
    root: Path, split: str, target_key: str = "cls", index: str | None = None
) -> tuple[PlacedImages, list[str] | None]:
    """Samples `key.jpg` (or png, webp) with `key.cls`, next to each other in tar files, and the names of their classes.

    Args:
        root: The folder of the shards.
        split: A name (from `_info.json`, or `<split>/*.tar`, or `<split>-*.tar`), a glob or a `{0000..0099}` pattern.
        target_key: The extension that holds the class number as text.
        index: Folder for the index files; by default `.wbmm-index` in the shards' folder if that can be written.
    """
    files = shard_files(root, split)
    cache = Path(index) if index else root / ".wbmm-index"
    places = _load_or_scan(files, target_key, cache / f"{_digest(files, target_key)}.npy")
    if not len(places.labels):
        raise ValueError(f"no sample with an image and a .{target_key} file in {len(files)} shards of {root}")
    return places, find_class_names(root, files[0].parent)


def find_class_names(*folders: Path) -> list[str] | None:
    """The names of classes that have numbers: from `classes.txt`, one a line, or `class_names` in `_info.json`."""
    found: dict[Path, list[str]] = {}
    for folder in dict.fromkeys(folders):
        if (folder / CLASSES).exists():
            found[folder / CLASSES] = read_class_names(folder / CLASSES)
        names = _info(folder).get("class_names")
        if names is not None:
            check_class_names(names, folder / INFO)
            found[folder / INFO] = names
    for path, names in found.items():
        first, others = next(iter(found.items()))
        if names != others:
            raise ValueError(f"{first} and {path} name the classes differently: keep one of them")
    return next(iter(found.values()), None)


def open_tars(files: list[Path], order: list[str] | None = None) -> tuple[PlacedImages, list[str]]:
    """The images of tar files whose classes are folders inside, or one tar file each, in a tar file or beside it.

    Args:
        files: one or several.
        order: names that number the classes; `sorted()` otherwise.
    """
    rows = [(shard, *row) for shard, file in enumerate(files) for row in _images(file)]
    if not rows:
        raise ValueError(f"no image in {files[0]}" + (f" and {len(files) - 1} more tar files" if files[1:] else ""))
    rows.sort(key=lambda row: (natural_order(row[3]), row[3], row[0]))
    folders = [tuple(part for part in row[3].split("/")[:-1] if part != ".") for row in rows]
    classes = _first_that_differs(folders)
    if None in classes and len(files) > 1:
        classes = [files[row[0]].stem for row in rows]
    if len(set(folders)) == 1 and len(files) == 1:
        classes = [folders[0][-1] if folders[0] else files[0].stem] * len(rows)
    loose = classes.count(None)
    if loose:
        _logger.warning("left out: %d images in %s outside the class folders", loose, files[0])
    inside = np.array([place for place, name in enumerate(classes) if name is not None], dtype=np.int64)
    chosen, labels, names = number_classes([classes[place] for place in inside], order, str(files[0].parent))
    table = np.array([row[:3] for row in rows], dtype=np.int64)[inside[chosen]].T
    return PlacedImages(files, np.concatenate([table, labels[None]])), names


def _first_that_differs(folders: list[tuple[str, ...]]) -> list[str | None]:
    """The class of each image: the first part of its path below what all of them share; None if it has none."""
    first, last = min(folders), max(folders)  # what these share, all do
    differ = (place for place, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1])
    depth = next(differ, len(first))
    return [parts[depth] if len(parts) > depth else None for parts in folders]


def _images(file: Path) -> Iterator[tuple[int, int, str]]:
    """(offset, size, path) of the images of a tar file; one in it counts as a folder."""
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                if member.isreg() and member.name.lower().endswith(".tar"):
                    with tarfile.open(fileobj=tar.extractfile(member), mode="r:") as inner:
                        for part in inner:
                            if part.isreg() and is_image(part.name):
                                name = f"{member.name[:-4]}/{part.name}"
                                yield member.offset_data + part.offset_data, part.size, name
                elif member.isreg() and is_image(member.name):
                    yield member.offset_data, member.size, member.name
    except (tarfile.TarError, OSError) as error:
        raise ValueError(f"cannot read tar file {file}: {error}") from error


def _digest(files: list[Path], target_key: str) -> str:
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([facts, target_key]).encode()).hexdigest()[:16]


def _load_or_scan(files: list[Path], target_key: str, cache: Path) -> PlacedImages:
    if cache.is_file():
        try:
            table = np.load(cache)
            if table.dtype == np.int64 and table.ndim == 2 and len(table) == len(FIELDS):
                places = PlacedImages(files, table)
                if places.fits():
                    return places
        except (OSError, ValueError, EOFError):
            pass  # a damaged index is made again
    rows = [row for shard, file in enumerate(files) for row in _scan(file, shard, target_key)]
    table = np.array(rows, dtype=np.int64).reshape(-1, len(FIELDS)).T.copy()
    _store(cache, table)
    return PlacedImages(files, table)


def _info(root: Path) -> dict:
    """The contents of `_info.json`, which timm's shards have; {} without one."""
    path = root / INFO
    if not path.is_file():
        return {}
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON ({error})") from None
    if not isinstance(info, dict):
        raise ValueError(f"{path} should hold a dictionary with the key splits")
    return info


def shard_files(root: Path, split: str) -> list[Path]:
    """The shards of a split, in order."""
    if "::" in split or "://" in f"{root}{split}" or split.startswith("pipe:"):
        raise ValueError(f"shards must be files in a folder, to be read by index; got {root} and {split!r}")
    splits = _info(root).get("splits", {})
    if split in splits:
        try:
            files = [root / name for name in splits[split]["filenames"]]
        except (KeyError, TypeError):
            raise ValueError(f"{root / INFO}: split {split!r} has no list of filenames") from None
    elif "{" in split:
        files = [root / name for name in _expand(split)]
    else:
        patterns = [split] if any(sign in split for sign in "*?[") else [f"{split}/*.tar", f"{split}-*.tar"]
        files = next((found for found in (sorted(root.glob(p)) for p in patterns) if found), [])
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{len(missing)} of {len(files)} shards of split {split!r} are missing: {missing[0]}, ...")
    if not files:
        raise ValueError(f"no shards for split {split!r} in {root}: looked for {split}/*.tar and {split}-*.tar")
    return files


def _expand(pattern: str) -> list[str]:
    found = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if not found:
        raise ValueError(f"shard pattern {pattern!r} is not of the form name-{{0000..0099}}.tar")
    first, last = found.groups()
    numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [pattern[: found.start()] + number + pattern[found.end() :] for number in numbers]


def _scan(file: Path, shard: int, target_key: str):
    """Rows (shard, offset, size, label) of the complete samples of a tar file, in order."""
    parts: dict[str, dict] = {}
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                if not member.isreg():
                    continue
                folder, _, name = member.name.rpartition("/")
                key, _, extension = name.partition(".")
                sample = parts.setdefault(f"{folder}/{key}", {})
                if extension.lower() in IMAGES:
                    sample["place"] = (member.offset_data, member.size)
                elif extension == target_key:
                    sample["label"] = _label(tar, member)
    except (tarfile.TarError, OSError, ValueError) as error:
        raise ValueError(f"cannot index shard {file}: {error}") from error
    for sample in parts.values():
        if len(sample) == 2:
            yield (shard, *sample["place"], sample["label"])


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    text = tar.extractfile(member).read(MOST_LABEL_BYTES + 1)
    try:
        if len(text) <= MOST_LABEL_BYTES:
            return int(text)
    except ValueError:
        pass
    raise ValueError(f"{member.name} should hold a class number, it has {text[:MOST_LABEL_BYTES]!r}")


def _store(cache: Path, table: np.ndarray) -> None:
    """Writes the index atomically, as several ranks may do so at once; a read-only folder just costs time."""
    with suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        with replacing(cache) as temporary:
            np.save(temporary, table)

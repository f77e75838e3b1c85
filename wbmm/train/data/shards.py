"""WebDataset shards read by index.

timm's own reader for them is a stream: its order depends on the workers and it cannot start in the middle. Shards
on a disk are tar files, so an index of where each image lies gives random access, exact order and exact resume.
"""

import hashlib
import io
import json
import os
import re
import secrets
import tarfile
from pathlib import Path

import numpy as np
from timm.data.readers.reader import Reader

__all__ = ["ShardReader", "shard_files"]

IMAGES = ("jpg", "jpeg", "png", "webp")
FIELDS = ("shard", "offset", "size", "label")


class ShardReader(Reader):
    """Samples `key.jpg` (or png, webp) with `key.cls`, next to each other in tar files.

    Args:
        root: The folder of the shards.
        split: A name (from `_info.json`, or `<split>/*.tar`, or `<split>-*.tar`), a glob or a `{0000..0099}` pattern.
        target_key: The extension that holds the class number as text.
        index: Folder for the index files; by default `.wbmm-index` in the shards' folder if that can be written.
    """

    def __init__(self, root: Path, split: str, target_key: str = "cls", index: str | None = None):
        super().__init__()
        self.files = shard_files(Path(root), split)
        self.target_key = target_key
        cache = Path(index) if index else Path(root) / ".wbmm-index"
        table = self._load_or_scan(cache / f"{self._digest()}.npy")
        self.shard, self.offset, self.size, self.labels = table
        if not len(self.labels):
            raise ValueError(f"no sample with an image and a .{target_key} file in {len(self.files)} shards of {root}")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        # Opened for each read: the order is random over all shards, so that keeping some open would seldom help, and
        # keeping all open exceeds the limit on open files.
        with open(self.files[int(self.shard[index])], "rb", buffering=0) as file:
            data = os.pread(file.fileno(), int(self.size[index]), int(self.offset[index]))
        return io.BytesIO(data), int(self.labels[index])

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        file = self.files[int(self.shard[index])]
        return f"{file.name if basename else file} at byte {int(self.offset[index])}"

    def _digest(self) -> str:
        facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in self.files]
        return hashlib.sha256(json.dumps([facts, self.target_key]).encode()).hexdigest()[:16]

    def _load_or_scan(self, cache: Path) -> np.ndarray:
        if cache.is_file():
            try:
                table = np.load(cache)
                if table.dtype == np.int64 and table.ndim == 2 and len(table) == len(FIELDS):
                    return table
            except (OSError, ValueError, EOFError):
                pass  # a damaged index is made again
        rows = [row for shard, file in enumerate(self.files) for row in _scan(file, shard, self.target_key)]
        table = np.array(rows, dtype=np.int64).reshape(-1, len(FIELDS)).T.copy()
        _store(cache, table)
        return table


def shard_files(root: Path, split: str) -> list[Path]:
    """The shards of a split, in order."""
    if "::" in split or "://" in f"{root}{split}" or split.startswith("pipe:"):
        raise ValueError(f"shards must be files in a folder, to be read by index; got {root} and {split!r}")
    info = root / "_info.json"
    splits = json.loads(info.read_text()).get("splits", {}) if info.is_file() else {}
    if split in splits:
        files = [root / name for name in splits[split]["filenames"]]
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
        with tarfile.open(file) as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                key, _, extension = name.partition(".")
                sample = parts.setdefault(f"{folder}/{key}", {})
                if extension.lower() in IMAGES:
                    sample["place"] = (member.offset_data, member.size)
                elif extension == target_key:
                    sample["label"] = int(tar.extractfile(member).read())
    except (tarfile.TarError, ValueError) as error:
        raise ValueError(f"cannot index shard {file}: {error}") from error
    for sample in parts.values():
        if len(sample) == 2:
            yield (shard, *sample["place"], sample["label"])


def _store(cache: Path, table: np.ndarray) -> None:
    """Writes the index atomically, as several ranks may do so at once; a read-only folder just costs time."""
    temporary = cache.with_suffix(f".{secrets.token_hex(4)}.tmp")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            np.save(file, table)
        temporary.replace(cache)
    except OSError:
        return

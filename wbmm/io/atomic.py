"""Files that are there whole or not at all, and never in the place of another one unless told."""

import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

__all__ = [
    "atomic_model_path",
    "atomic_path",
    "check_model_target",
    "check_target",
    "link",
    "remove_stale",
    "replacing",
    "sync",
    "write_text",
]


def check_target(path: str | Path, force: bool = False) -> Path:
    """Raises before any work is done if `path` cannot be written."""
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder")
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists already; say --force (force=True) to replace it")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"cannot write {path}: the folder {path.parent} is not writable")
    return path


@contextmanager
def atomic_path(path: str | Path, force: bool = False) -> Iterator[Path]:
    """`replacing` for a file that a user asked for: an existing one stays unless told, and errors are one line.

    A kill while writing leaves the temporary file behind, hidden, and `path` as it was; the next writer of `path`
    removes it.
    """
    path = check_target(path, force)
    remove_stale(path.parent, path)
    try:
        with replacing(path) as temporary:
            yield temporary
            check_target(path, force)
    except FileExistsError:
        raise
    except OSError as error:
        raise ValueError(f"could not write {path}: {error.strerror or error}; nothing is left behind") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, which takes its name when the block ends well and vanishes otherwise.

    The temporary name ends as `path` does. The file is on the disk before it takes the name. Errors come as they are.
    """
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.tmp{path.suffix}")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_model_target(path: str | Path, force: bool = False) -> None:
    """`check_target`, for an .xml also of the .bin beside it."""
    check_target(path, force)
    if Path(path).suffix == ".xml":
        check_target(Path(path).with_suffix(".bin"), force)


def atomic_model_path(path: Path, force: bool = False) -> AbstractContextManager[Path]:
    """`atomic_path`, for an .xml also of the .bin beside it."""
    return _atomic_pair(path, force) if path.suffix == ".xml" else atomic_path(path, force)


@contextmanager
def _atomic_pair(path: Path, force: bool = False) -> Iterator[Path]:
    """`atomic_path` for an .xml whose .bin is written beside it: the .bin takes its name first, or neither does."""
    weights = path.with_suffix(".bin")
    placed = False
    try:
        with atomic_path(path, force) as temporary:
            written = temporary.with_suffix(".bin")
            try:
                with atomic_path(weights, force) as temporary_weights:
                    yield temporary
                    os.replace(written, temporary_weights)
                placed = True
            finally:
                written.unlink(missing_ok=True)
    except BaseException:
        if placed:  # an .xml must never meet weights that are not its own
            weights.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replaces a file at once: a crash leaves the old one or the new one."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def link(source: Path, target: Path) -> None:
    """Gives `source` a second name, replacing that name's old file in one step."""
    with replacing(target) as temporary:
        try:
            os.link(source, temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(source, temporary)


def remove_stale(folder: Path, path: Path | None = None) -> None:
    """Removes what writers that were killed have left in a folder, of all files or of `path` alone."""
    pattern = ".*.tmp*" if path is None else f".{glob.escape(path.stem)}.*.tmp{glob.escape(path.suffix)}"
    for stale in folder.glob(pattern):
        stale.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Waits until a file, or the list of names in a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

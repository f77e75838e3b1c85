"""Files that are there whole or not at all, and never in the place of another one unless told."""

import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

__all__ = ["atomic_model_path", "atomic_path", "check_model_target", "check_target"]


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
    """A temporary path beside `path`, which takes its name when the block ends well and vanishes otherwise.

    The temporary name ends as `path` does. A kill while writing leaves it behind, hidden, and `path` as it was; the
    next writer of `path` removes it.
    """
    path = check_target(path, force)
    for stale in path.parent.glob(f".{glob.escape(path.stem)}.*.tmp{path.suffix}"):
        stale.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.tmp{path.suffix}")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        check_target(path, force)
        os.replace(temporary, path)
    except OSError as error:
        if isinstance(error, FileExistsError):
            raise
        raise ValueError(f"could not write {path}: {error.strerror or error}; nothing is left behind") from error
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

"""One run at a time in a folder: a worker that outlived its launcher must not write beside the run that replaces it."""

import fcntl
from contextlib import contextmanager
from pathlib import Path

__all__ = ["lock_folder"]


@contextmanager
def lock_folder(folder: Path, main: bool = True):
    """Holds the folder for this run; only the main process does. The system lets go of it however the process ends."""
    if not main:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115 (closed below; its errors are not those of the run)
    except OSError as error:
        raise ValueError(f"out={folder} cannot be written: {error.strerror or error}; choose another folder") from error
    with lock as file:
        try:
            # lockf, not flock: data workers must not inherit it, they outlive a killed run by some seconds
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ValueError(f"another process is training in {folder}; stop it, or choose another out=") from None
        except OSError:  # a file system without locks
            pass
        yield

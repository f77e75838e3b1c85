"""Data sets out of their archives: a folder is there whole or not at all."""

import shutil
import zipfile
from pathlib import Path, PurePosixPath

from wbmm.deploy.images import progress_bar

__all__ = ["unpack"]


def unpack(archive: Path, root: Path, folders: set[str]) -> None:
    """Unpacks those top-level folders of a zip file that are named; members that would leave the root are refused.

    Args:
        archive: the zip file.
        root: made if it is missing.
        folders: names that the archive may hold; at least one must be in it, and none in the root yet.
    """
    if not archive.is_file():
        raise ValueError(f"{archive}: there is no such file")
    try:
        with zipfile.ZipFile(archive) as file:
            members = [name for name in file.namelist() if PurePosixPath(name).parts[:1] in {(top,) for top in folders}]
            found = sorted({PurePosixPath(name).parts[0] for name in members})
            if not found:
                raise ValueError(f"{archive} holds no folder {' or '.join(sorted(folders))}: it is another archive")
            bad = [name for name in members if ".." in PurePosixPath(name).parts]
            if bad:
                raise ValueError(f"{archive}: {bad[0]} would be written outside the folder; refused")
            there = [root / name for name in found if (root / name).exists()]
            if there:
                raise ValueError(f"{there[0]} is there already; it is checked when no archive is given")
            _extract(file, members, found, root)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{archive} is not a readable zip file, perhaps truncated ({error})") from None


def _extract(file: zipfile.ZipFile, members: list[str], found: list[str], root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    partial = root / f".{found[0]}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # of an attempt that was stopped
    with progress_bar(len(members), "unpacking") as advance:
        for member in members:
            file.extract(member, partial)
            advance(1)
    for name in found:
        (partial / name).rename(root / name)
    partial.rmdir()

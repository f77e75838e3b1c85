"""What a folder, or a file, of data is: how to read it, for people who only say where it is."""

import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from wbmm.text import some

from .folders import ANNOTATIONS, SYNONYMS, class_images, is_image
from .lists import PictureList, read_list

__all__ = ["FoundData", "find_data"]

TRAIN = ("train", *SYNONYMS["train"])
VAL = ("val", *SYNONYMS["val"], "test", "testing")
MNIST = "train-images-idx3-ubyte"
FORMS = "train/ and val/ of class folders, class folders alone, a CSV file of paths and labels, or shards"


@dataclass
class FoundData:
    """How to read what was found.

    Attributes:
        what: in words.
        settings: `source`, `root`, `train_split`, `val_split` and `args` of the configuration.
        unsplit: the pictures, where nothing says which are for validation; `settings` then lack `args.file`.
    """

    what: str
    settings: dict = field(default_factory=dict)
    unsplit: PictureList | None = None


def find_data(path: Path) -> FoundData:
    """Recognises the forms of `FORMS`; anything else is an error that says what was seen."""
    path = path.expanduser().absolute()
    if path.is_file():
        if path.suffix.lower() == ".csv":
            return _list(path)
        raise ValueError(f"{path} is a file; data is {FORMS}")
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such folder")
    found = _shards(path) or _mnist(path) or _splits(path) or _classes(path)
    if found is None:
        inside = sorted(entry.name for entry in path.iterdir())
        seen = some(inside, 5) or "it is empty"
        raise ValueError(f"{path} holds no data that is recognised ({seen}); data is {FORMS}")
    return found


def _list(file: Path) -> FoundData:
    pictures = read_list(file)
    settings = {"source": "csv", "root": str(file.parent)}
    if pictures.splits is None:
        return FoundData(f"{len(pictures.paths)} pictures listed in {file.name}", settings, pictures)
    names = {wanted: _first(known, set(pictures.splits)) for wanted, known in (("train", TRAIN), ("val", VAL))}
    if None in names.values():
        there = some(sorted(set(pictures.splits)), 5)
        raise ValueError(f"{file}: its column split has {there}; expected train and val")
    settings |= {"train_split": names["train"], "val_split": names["val"], "args": {"file": str(file)}}
    return FoundData(f"train and val as listed in {file.name}", settings)


def _shards(folder: Path) -> FoundData | None:
    """Tar files of a training and a validation set: WebDataset's, or of class folders."""
    files = {name: _tar_files(folder, name) for name in (*TRAIN, *VAL)}
    train, val = (next((name for name in names if files[name]), None) for names in (TRAIN, VAL))
    if train is None or val is None:
        return None
    source = "wds" if _has_labels(files[train][0]) else "tar"
    settings = {"source": source, "root": str(folder), "train_split": train, "val_split": val}
    return FoundData(f"{'shards' if source == 'wds' else 'tar files'}, {train} and {val}", settings)


def _tar_files(folder: Path, split: str) -> list[Path]:
    single = folder / f"{split}.tar"
    return [single] if single.is_file() else sorted([*folder.glob(f"{split}-*.tar"), *folder.glob(f"{split}/*.tar")])


def _has_labels(file: Path) -> bool:
    """Whether the first members of a tar file are samples of WebDataset, which have a `.cls`."""
    try:
        with tarfile.open(file, "r:") as tar:
            return any(member.name.endswith(".cls") for member, _ in zip(tar, range(8), strict=False))
    except (tarfile.TarError, OSError) as error:
        raise ValueError(f"{file} cannot be read as a tar file: {error}") from None


def _mnist(folder: Path) -> FoundData | None:
    if any((folder / name).is_file() for name in (MNIST, f"{MNIST}.gz")):
        return FoundData("idx files, as of MNIST", {"source": "idx", "root": str(folder)})
    return None


def _splits(folder: Path) -> FoundData | None:
    names = set(_folders(folder))
    train, val = _first(TRAIN, names), _first(VAL, names)
    if train is None:
        return None
    if val is None:  # the training folder's classes are split
        return _classes(folder / train)
    settings = {"source": "folder", "root": str(folder), "train_split": train, "val_split": val}
    return FoundData(f"class folders in {train}/ and {val}/", settings)


def _classes(folder: Path) -> FoundData | None:
    """Class folders alone; an outer folder with nothing else in it, as archives leave it, is passed over."""
    names = _folders(folder)
    while len(names) == 1 and len(_folders(folder / names[0])) > 1 and not (folder / names[0] / ANNOTATIONS).exists():
        folder = folder / names[0]
        names = _folders(folder)
        if inner := _splits(folder):
            return inner
    if not names:
        lists = sorted(folder.glob("*.csv"))
        if len(lists) == 1:
            return _list(lists[0])
        if any(is_image(entry.name) for entry in folder.iterdir()):
            raise ValueError(f"{folder} holds pictures without class folders, and no CSV file with their labels")
        return None
    files, labels, classes = class_images(folder, names)
    paths = [str(Path(file).relative_to(folder)) for file in files]
    pictures = PictureList(paths, [classes[label] for label in labels])
    return FoundData(f"{len(names)} class folders", {"source": "csv", "root": str(folder)}, pictures)


def _folders(folder: Path) -> list[str]:
    """Those that people see, without what a system or an editor leaves."""
    return sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith((".", "__MACOSX"))
    )


def _first(known: tuple[str, ...], present: set[str]) -> str | None:
    return next((name for name in known if name in present), None)

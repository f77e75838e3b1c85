"""What a folder, or a file, of data is: how to read it, for people who only say where it is."""

import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from wbmm.text import some

from .folders import ANNOTATIONS, SYNONYMS, PictureList, class_images, is_image, read_list, visible_folders

__all__ = ["FORMS", "FoundData", "find_data"]

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


def find_data(path: str | Path) -> FoundData:
    """Recognises the forms of `FORMS`; anything else is an error that says what was seen."""
    path = Path(path).expanduser().absolute()
    if path.is_file():
        if path.suffix.lower() == ".csv":
            return _list(path)
        raise ValueError(f"{path} is a file; data is {FORMS}")
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such folder or file")
    found = _shards(path) or _mnist(path) or _splits(path) or _classes(path)
    if found is None:
        inside = sorted(entry.name for entry in path.iterdir())
        seen = f"it has {some(inside, 5)}" if inside else "it is empty"
        raise ValueError(f"{path}: no data is recognised in it ({seen}); data is {FORMS}")
    return found


def _list(file: Path) -> FoundData:
    pictures = read_list(file)
    settings = {"source": "csv", "root": str(file.parent)}
    if pictures.splits is None:
        return FoundData(f"{len(pictures.paths):,} pictures listed in {file.name}", settings, pictures)
    train, val = _pick(TRAIN, pictures.splits), _pick(VAL, pictures.splits)
    if train is None or val is None:
        there = some(sorted(set(pictures.splits)), 5)
        raise ValueError(f"{file}: its column split has {there}; expected train and val")
    settings |= {"train_split": train, "val_split": val, "args": {"file": str(file)}}
    return FoundData(f"{train} and {val} as listed in {file.name}", settings)


def _shards(folder: Path) -> FoundData | None:
    """Tar files of a training and a validation set: WebDataset's, or of class folders."""
    files = {name: _tar_files(folder, name) for name in (*TRAIN, *VAL)}
    train, val = (next((name for name in names if files[name]), None) for names in (TRAIN, VAL))
    if train is None:
        return None
    if val is None:
        raise ValueError(f"{folder} has tar files for training ({files[train][0].name}, ...) and none for validation")
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
    names = visible_folders(folder)
    train, val = _pick(TRAIN, names), _pick(VAL, names)
    if train is None:
        return None
    if not visible_folders(folder / train) and (listed := _only_list(folder)):
        return listed  # the pictures are in train/ and their labels in a list
    if val is None:  # the training folder's classes are split
        return _classes(folder / train)
    settings = {"source": "folder", "root": str(folder), "train_split": train, "val_split": val}
    return FoundData(f"class folders in {train}/ and {val}/", settings)


def _classes(folder: Path) -> FoundData | None:
    """Class folders alone; an outer folder with nothing else in it, as archives leave it, is passed over."""
    names = visible_folders(folder)
    while len(names) == 1 and _is_wrapper(folder / names[0]):
        folder = folder / names[0]
        names = visible_folders(folder)
        if inner := _splits(folder):
            return inner
    if len(names) < 2 and (listed := _only_list(folder)):
        return listed
    if not names:
        if any(is_image(entry.name) for entry in folder.iterdir()):
            raise ValueError(f"{folder} holds pictures without class folders, and no CSV file with their labels")
        return None
    files, labels, classes = class_images(folder)
    if len(classes) < 2:
        raise ValueError(f"{folder} has one class, {classes[0]!r}: there is nothing to tell apart; data is {FORMS}")
    paths = [str(Path(file).relative_to(folder)) for file in files]
    pictures = PictureList(paths, [classes[label] for label in labels])
    return FoundData(f"{len(classes)} class folders", {"source": "csv", "root": str(folder)}, pictures)


def _is_wrapper(folder: Path) -> bool:
    """Whether a folder holds folders and no picture: a class would hold some."""
    files = [entry.name for entry in folder.iterdir()]
    return bool(visible_folders(folder)) and ANNOTATIONS not in files and not any(map(is_image, files))


def _only_list(folder: Path) -> FoundData | None:
    """The one CSV file of a folder; of several, nobody knows which is meant."""
    lists = sorted(file for file in folder.glob("*.csv") if not file.name.startswith("."))
    if len(lists) > 1:
        names = some([file.name for file in lists], 5)
        raise ValueError(f"{folder} has no class folders and several CSV files ({names}): name the one with the labels")
    return _list(lists[0]) if lists else None


def _pick(known: tuple[str, ...], present: Iterable[str]) -> str | None:
    """The first of the known names that is there, however it is capitalised."""
    spelled = {name.lower(): name for name in present}
    return next((spelled[name] for name in known if name in spelled), None)

"""A folder of images and masks: which images belong to which masks, in the usual layouts."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from wbmm.data.folders import SUFFIXES, PictureList, split_by_class

__all__ = ["FoundMasks", "Pairs", "find_masks", "split_names", "typical_size"]

LAYOUTS = (
    "images/train with masks/train (or annotations, labels, ann_dir, ...), train/images with train/masks, train with "
    "trainannot or train_labels, images with masks (a part is then held back), or VOC's JPEGImages with "
    "SegmentationClass"
)
MASK_WORDS = re.compile(r"mask|annot|ann_dir|label|segmentationclass|target|(^|[/_-])gt")
SKIPPED = re.compile(r"segmentationobject|instance|visual|overlay|colou?r|unlabel")
PARTS = ("train", "val", "test")  # what a folder's name starts with
DEEPEST = 3  # folders below the root
SAMPLE = 50  # images whose size is looked at


@dataclass
class Pairs:
    """Images and their masks.

    Attributes:
        images, masks: folders.
        img_suffix, mask_suffix: what follows the name that an image and its mask share.
        names: those names, sorted.
        lone_images: images without a mask.
        lone_masks: masks without an image.
    """

    images: Path
    masks: Path
    img_suffix: str
    mask_suffix: str
    names: list[str]
    lone_images: list[str] = field(default_factory=list)
    lone_masks: list[str] = field(default_factory=list)

    def mask_paths(self, names: list[str] | None = None) -> list[Path]:
        return [self.masks / f"{name}{self.mask_suffix}" for name in (self.names if names is None else names)]


@dataclass
class FoundMasks:
    """What a folder holds.

    Attributes:
        train, val: images and masks of each part; the same object where one folder holds both.
        lists: names of each part, where they share a folder; None where folders tell.
        how: how the parts were told apart, in words.
        test: images and masks of a third part, if there is one.
    """

    train: Pairs
    val: Pairs
    lists: dict[str, list[str]] | None
    how: str
    test: Pairs | None = None

    def names(self, part: str) -> list[str]:
        return self.lists[part] if self.lists else getattr(self, part).names


def find_masks(root: Path, held_back: float = 0.2) -> FoundMasks:
    """Looks for images and masks in a folder; what is missing is a `ValueError` that says which layouts are known.

    Args:
        root: the folder.
        held_back: share of the images for validation, where nothing tells which ones are; drawn by their names.
    """
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}")
    pairs = _pairs_of_parts(root)
    if not pairs:
        raise ValueError(f"no folder of images with a folder of masks beside it in {root}; known are {LAYOUTS}")
    if "train" not in pairs and None not in pairs:
        found = ", ".join(f"{pair.images} ({part})" for part, pair in pairs.items())
        raise ValueError(f"images with masks are in {found}, but there is nothing to train on; known are {LAYOUTS}")
    train = pairs.get("train") or pairs[None]
    if "train" in pairs and ("val" in pairs or "test" in pairs):
        val = pairs.get("val") or pairs["test"]
        how = f"folders {_name(train.images, root)} and {_name(val.images, root)}"
        return FoundMasks(train, val, None, how, pairs.get("test") if "val" in pairs else None)
    lists = _voc_lists(root, train)
    if lists:
        return FoundMasks(train, train, lists, "lists in ImageSets/Segmentation")
    lists = split_names(train.names, held_back)
    how = f"{len(lists['val'])} of {len(train.names)} are held back for validation, drawn by their names"
    return FoundMasks(train, train, lists, how)


def split_names(names: list[str], held_back: float) -> dict[str, list[str]]:
    """`train` and `val`: which names are held back is a matter of the names alone."""
    split = split_by_class(PictureList(names, ["image"] * len(names)), held_back, seed=0)
    return {part: [n for n, s in zip(names, split.splits, strict=True) if s == part] for part in ("train", "val")}


def _name(folder: Path, root: Path) -> str:
    return folder.relative_to(root).as_posix() if folder != root else "."


def _pairs_of_parts(root: Path) -> dict[str | None, Pairs]:
    """For each part, and None for folders of no part, the folders that match best."""
    folders = [folder for folder in _folders(root) if _count_images(folder)]
    images, masks = [], []
    for folder in folders:
        words = folder.relative_to(root).as_posix().lower()
        if not SKIPPED.search(words):
            (masks if MASK_WORDS.search(words) else images).append(folder)
    found: dict[str | None, Pairs] = {}
    for image_folder in images:
        part = _part(image_folder, root)
        candidates = [folder for folder in masks if _part(folder, root) == part] or [image_folder]
        for mask_folder in candidates:
            pair = _match(image_folder, mask_folder)
            if pair is not None and (part not in found or len(pair.names) > len(found[part].names)):
                found[part] = pair
    return found


def _folders(root: Path) -> list[Path]:
    found, level = [root], [root]
    for _ in range(DEEPEST):
        level = sorted(sub for folder in level for sub in folder.iterdir() if sub.is_dir() and sub.name[0] != ".")
        found += level
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in (*SUFFIXES, ".gif") and p.name[0] != ".")


def _count_images(folder: Path) -> int:
    return len(_files(folder))


def _part(folder: Path, root: Path) -> str | None:
    words = [word.lower() for word in folder.relative_to(root).parts]
    return next((part for part in PARTS if any(word.startswith(part) for word in words)), None)


def _match(images: Path, masks: Path) -> Pairs | None:
    """Images and masks whose names agree but for an ending, such as `_mask`; None if none do."""
    files = _files(images)
    if images == masks:  # photographs as JPEG, masks as PNG beside them
        files, others = ([p for p in files if (p.suffix.lower() == ".png") == png] for png in (False, True))
    else:
        others = _files(masks)
    if not files or not others:
        return None
    names = {path.stem for path in files}
    some_names = sorted(names)[:20]
    endings = {o.name.removeprefix(name) for name in some_names for o in others if o.name.startswith(name)}
    if not endings:
        return None
    have = {path.name for path in others}
    mask_suffix = max(endings, key=lambda ending: (sum(name + ending in have for name in names), -len(ending)))
    matched = {name for name in names if name + mask_suffix in have}
    suffixes = Counter(path.suffix for path in files if path.stem in matched)
    if len(suffixes) > 1:
        text = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common())
        raise ValueError(f"{images} holds images of several kinds ({text}): convert them to one, as mmseg reads one")
    suffix = next(iter(suffixes))
    return Pairs(
        images,
        masks,
        suffix,
        mask_suffix,
        sorted(matched),
        sorted(path.name for path in files if path.stem not in matched),
        sorted(have - {name + mask_suffix for name in matched}),
    )


def _voc_lists(root: Path, pair: Pairs) -> dict[str, list[str]] | None:
    for folder in (root, pair.images.parent):
        files = {part: folder / "ImageSets" / "Segmentation" / f"{part}.txt" for part in ("train", "val")}
        if all(file.is_file() for file in files.values()):
            return {part: file.read_text().split() for part, file in files.items()}
    return None


def typical_size(paths: list[Path]) -> tuple[int, int]:
    """(width, height) in the middle of the sizes of some images, the long side first where most are lying."""
    sizes = []
    for path in paths[:: max(1, len(paths) // SAMPLE)]:
        try:
            with Image.open(path) as image:
                sizes.append(image.size)
        except Exception as error:
            raise ValueError(f"{path} is no readable image ({error})") from None
    return tuple(sorted(size[side] for size in sizes)[len(sizes) // 2] for side in (0, 1))

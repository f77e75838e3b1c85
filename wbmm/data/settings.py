"""What the configuration says about images: where they are, how they are augmented and mixed."""

import re
from dataclasses import dataclass

from timm.data.auto_augment import augment_and_mix_transform, auto_augment_transform, rand_augment_transform

from wbmm.fields import Choice, Items, Plain, Range, Text, show, takes

__all__ = ["PATH", "READER_ARGS", "AugmentConfig", "DataConfig", "MixConfig", "check_reader_args"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
PROBABILITY = Range(0.0, 1.0)
PATH = Text(4096)
SOURCE = Text(
    most=1024,
    pattern=r"folder|csv|tar|wds|digits|idx|hfds/.+",
    valid="folder, csv, tar, wds, hfds/<name or folder>, digits, idx (a stream cannot be read by index)",
)
# data.args: what the reader of each source takes, and two limits for all of them.
LIMITS = {"train_limit": int, "val_limit": int}
READER_ARGS = {
    "folder": {"class_map": str | list},
    "csv": {"file": str},
    "tar": {"class_map": str | list},
    "wds": {"target_key": str, "index": str},
    "hfds": {"input_key": str, "target_key": str},
    "digits": {},
    "idx": {},
}

# The strings of augment.auto: what the first part may be, and the numbers that may follow it.
STD = Range(0.0, 1000.0)
SWITCH = Range(0, 1)
RAND = {"m": Range(0, 30), "n": Range(1, 20), "p": Range(0.0, 1.0), "mstd": STD, "mmax": Range(1, 30), "inc": SWITCH}
RAND_SETS = ("tweights", "t3a", "t3aw")
AUGMIX = {"m": Range(0, 10), "w": Range(1, 10), "d": Range(1, 10), "a": Range(0.01, 100.0), "b": SWITCH, "mstd": STD}
POLICIES = ("original", "originalr", "v0", "v0r", "3a")
SECTIONS = {"rand": RAND, "augmix": AUGMIX} | {name: {"mstd": STD} for name in POLICIES}
BUILDERS = {"rand": rand_augment_transform, "augmix": augment_and_mix_transform}
EXAMPLES = "rand-m9-mstd0.5-inc1, augmix-m3-w3 or original-mstd0.5"


@dataclass
class DataConfig:
    source: str = takes("folder", SOURCE)
    root: str | None = takes(None, PATH)
    train_split: str = takes("train", Text())
    val_split: str = takes("val", Text())
    size: int = takes(224, Range(1, 8192))
    in_chans: int = takes(3, Choice(3, 1))
    num_classes: int | None = takes(None, Range(2, 1_000_000))  # None: counted from the data
    workers: int = takes(8, Range(0, 512))
    in_memory: bool = False
    on_bad_image: str = takes("fail", Choice("fail", "skip"))
    interpolation: str = takes("bicubic", Choice("bicubic", "bilinear", "nearest", "lanczos", "box", "hamming"))
    crop_pct: float = takes(0.875, Range(0.0, 1.0, "(]"))
    mean: list[float] = takes(list(IMAGENET_MEAN), Items(1, 3, PROBABILITY))  # of pixels from 0 to 1
    std: list[float] = takes(list(IMAGENET_STD), Items(1, 3, Range(1e-3, 1.0)))
    args: dict = takes({}, Plain())  # see READER_ARGS


def check_reader_args(data: DataConfig) -> None:
    """Raises unless `data.args` are options of the source."""
    valid = READER_ARGS.get(data.source.partition("/")[0], {}) | LIMITS
    for key, value in data.args.items():
        if key not in valid:
            where = f"data.source={data.source}"
            raise ValueError(f"data.args.{key} is not an option of {where}; valid: {', '.join(valid)}")
        if value is None:
            continue
        if key in LIMITS and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"data.args.{key} must be a whole number above 0, or null, got {show(value)}")
        if not isinstance(value, valid[key]) or not value:
            kind = "text" if valid[key] is str else "a text file or a list of names"
            raise ValueError(f"data.args.{key} must be {kind}, got {show(value)}")


class AutoAugment:
    """timm's string for RandAugment, AugMix or AutoAugment; timm itself passes over what it does not understand."""

    def problem(self, value: str) -> str | None:
        kind, *sections = value.split("-")
        if kind not in SECTIONS:
            return f"is {show(value)}; valid: strings such as {EXAMPLES}, or null"
        for section in sections:
            if found := self._wrong(kind, section):
                return f"{show(value)}: {found}; an example: {EXAMPLES}"
        BUILDERS.get(kind, auto_augment_transform)(value)
        return None

    def _wrong(self, kind: str, section: str) -> str | None:
        if kind == "rand" and section in RAND_SETS:
            return None
        valid = SECTIONS[kind]
        parts = re.fullmatch(r"([a-z]+)(\d{1,6}(?:\.\d{1,6})?)", section)
        if not parts or parts[1] not in valid:
            return f"the part {show(section)} is not one of {', '.join(valid)} with a number"
        rule = valid[parts[1]]
        if isinstance(rule.low, int) and "." in parts[2]:
            return f"{parts[1]} must be a whole number, got {parts[2]}"
        found = rule.problem(float(parts[2]))
        return found and f"{parts[1]} {found}"


@dataclass
class AugmentConfig:
    auto: str | None = takes("rand-m9-mstd0.5-inc1", AutoAugment())
    color_jitter: float = takes(0.4, PROBABILITY)
    reprob: float = takes(0.25, PROBABILITY)
    remode: str = takes("pixel", Choice("pixel", "rand", "const"))
    hflip: float = takes(0.5, PROBABILITY)
    scale: list[float] = takes([0.08, 1.0], Items(2, 2, Range(0.0, 4.0, "(]")))
    ratio: list[float] = takes([3 / 4, 4 / 3], Items(2, 2, Range(0.01, 100.0)))
    shift: int = takes(0, Range(0, 8191))  # random translation in pixels, in-memory path only


@dataclass
class MixConfig:
    mixup: float = takes(0.8, Range(0.0, 100.0))
    cutmix: float = takes(1.0, Range(0.0, 100.0))
    prob: float = takes(1.0, PROBABILITY)
    switch_prob: float = takes(0.5, PROBABILITY)
    mode: str = takes("batch", Choice("batch", "pair", "elem"))
    label_smoothing: float = takes(0.1, Range(0.0, 1.0, "[)"))

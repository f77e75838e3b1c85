"""What a model file says about itself, wherever it is stored: safetensors, pth, ONNX, OpenVINO or torch.export."""

import dataclasses
import json
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata

from wbmm.io.reader import METADATA_KEY, first_line
from wbmm.models.state import CheckpointError
from wbmm.text import printable
from wbmm.version import __version__

__all__ = ["FORMS", "INPUTS", "KINDS", "METADATA_KEY", "ModelCard", "versions"]

FORMS = ("training", "compact", "dense")
KINDS = ("classifier", "features", "segmentor", "detector")
INPUTS = ("normalized", "uint8")
INTERPOLATIONS = ("bicubic", "bilinear", "nearest", "lanczos", "box", "hamming")
MOST_CLASSES = 1_000_000
MOST_CHANNELS = 1024  # of an image
LONGEST_SIDE = 16_384
LONGEST_NAME = 10_000  # of a class
_PACKAGES = ("torch", "timm")


def versions(*packages: str) -> dict[str, str]:
    """Versions of this package, Python, torch, timm and `packages`, as far as they are installed."""
    found = {"wbmm": __version__, "python": platform.python_version()}
    for name in (*_PACKAGES, *packages):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@dataclass
class ModelCard:
    """The description of a model file.

    Attributes:
        model: its name in timm's registry.
        args: keyword arguments of `timm.create_model` beside the number of classes and channels.
        form: `training`, `compact` or `dense`.
        num_classes: 0 for none.
        input_size: (channels, height, width) that it is meant for; other sizes work unless a file says otherwise.
        mean, std: of the channels, for images in 0..1.
        interpolation, crop_pct: of the evaluation transform.
        class_names: one a class, or None.
        kind: what comes out: logits, four feature maps, a segmentor's or a detector's tensors.
        input: `normalized` images, or `uint8` ones where the graph normalises by itself.
        dtype: of the stored weights.
        source: name and SHA-256 of the file that it was made from.
        versions: what wrote it.
    """

    model: str
    args: dict = field(default_factory=dict)
    form: str = "training"
    num_classes: int = 1000
    input_size: tuple[int, int, int] = (3, 224, 224)
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bicubic"
    crop_pct: float = 0.875
    class_names: list[str] | None = None
    kind: str = "classifier"
    input: str = "normalized"
    dtype: str = "float32"
    source: dict = field(default_factory=dict)
    versions: dict = field(default_factory=versions)

    def __post_init__(self) -> None:
        """Checks every field: the text in a file may say anything."""
        for name in ("input_size", "mean", "std"):
            value = getattr(self, name)
            setattr(self, name, tuple(value) if isinstance(value, (list, tuple)) else value)
        for name, (good, valid) in _FIELDS.items():
            value = getattr(self, name)
            if not good(value):
                raise CheckpointError(f"the file's description says {name} = {value!r:.80}; valid: {valid}")
        channels = self.input_size[0]
        if not len(self.mean) == len(self.std) == channels:
            raise CheckpointError(
                f"the file's description has {len(self.mean)} values of mean and {len(self.std)} of std for images of "
                f"{channels} channels"
            )
        counted = self.kind in ("classifier", "segmentor") and self.class_names is not None
        if counted and len(self.class_names) != self.num_classes:
            raise CheckpointError(
                f"the file's description names {len(self.class_names)} classes and counts {self.num_classes}"
            )

    def replace(self, **changes) -> "ModelCard":
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "ModelCard":
        """The card from its JSON; keys of later versions are left out."""
        try:
            values = json.loads(text)
            known = {f.name for f in dataclasses.fields(cls)}
            return cls(**{key: value for key, value in values.items() if key in known})
        except (json.JSONDecodeError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"the file's description cannot be read ({first_line(error)})") from None

    def describe(self) -> str:
        """One line for people."""
        form = "training form" if self.form == "training" else f"fused, {self.form} form"
        what = f"{self.num_classes} classes" if self.kind == "classifier" else self.kind
        side = "x".join(map(str, self.input_size[1:]))
        return f"{printable(self.model)} ({form}, {what}, {side} px, {printable(self.dtype)})"

    def describe_transform(self) -> str:
        """The evaluation transform in words."""
        channels, height, width = self.input_size
        mode = {1: "grey", 3: "RGB"}.get(channels, f"{channels} channels")
        resize = f"shorter side to {round(min(height, width) / self.crop_pct)} px ({self.interpolation})"
        after = f"mean {_short(self.mean)}, std {_short(self.std)}" if self.input == "normalized" else "bytes"
        return f"{mode}, {resize}, centre {height}x{width}, {after}"

    def transform(self):
        """A function from a PIL image to the model's input `[C, H, W]`."""
        from timm.data.transforms_factory import transforms_imagenet_eval

        channels, height, width = self.input_size
        if channels not in (1, 3):
            raise CheckpointError(f"images have 1 or 3 channels; {self.describe()} takes {channels}")
        steps = transforms_imagenet_eval(
            img_size=(height, width),
            crop_pct=self.crop_pct,
            interpolation=self.interpolation,
            mean=self.mean,
            std=self.std,
            normalize=self.input == "normalized",
        )
        mode = "L" if channels == 1 else "RGB"
        return lambda image: steps(image.convert(mode))


def _short(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.3g}" for value in values)


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: object, longest: int = 200) -> bool:
    return isinstance(value, str) and 0 < len(value) <= longest


def _is_size(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 3 or not _is_whole(value[0], 1, MOST_CHANNELS):
        return False
    return all(_is_whole(side, 1, LONGEST_SIDE) for side in value[1:])


def _are_names(value: object) -> bool:
    return value is None or (
        isinstance(value, list) and len(value) <= MOST_CLASSES and all(_is_text(name, LONGEST_NAME) for name in value)
    )


def _are_facts(value: object) -> bool:
    return isinstance(value, dict) and all(_is_text(k) and isinstance(v, str) for k, v in value.items())


# Field -> whether a value is valid, and what is.
_FIELDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "model": (_is_text, "the name of a model"),
    "args": (lambda v: isinstance(v, dict) and all(isinstance(key, str) for key in v), "a mapping of names to values"),
    "form": (lambda v: v in FORMS, ", ".join(FORMS)),
    "num_classes": (lambda v: _is_whole(v, 0, MOST_CLASSES), f"0 to {MOST_CLASSES}"),
    "input_size": (_is_size, f"channels (at most {MOST_CHANNELS}), height, width (at most {LONGEST_SIDE})"),
    "mean": (lambda v: isinstance(v, tuple) and all(map(_is_number, v)), "a number for each channel"),
    "std": (lambda v: isinstance(v, tuple) and all(_is_number(x) and x > 0 for x in v), "a number above 0 for each"),
    "interpolation": (lambda v: v in INTERPOLATIONS, ", ".join(INTERPOLATIONS)),
    "crop_pct": (lambda v: _is_number(v) and 0 < v <= 1, "above 0, at most 1"),
    "class_names": (_are_names, "a list of texts, or nothing"),
    "kind": (lambda v: v in KINDS, ", ".join(KINDS)),
    "input": (lambda v: v in INPUTS, ", ".join(INPUTS)),
    "dtype": (lambda v: _is_text(v, 20), "the name of a type, such as float32"),
    "source": (_are_facts, "a mapping of names to texts"),
    "versions": (_are_facts, "a mapping of names to texts"),
}

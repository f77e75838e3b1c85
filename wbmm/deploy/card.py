"""What a model file says about itself, wherever it is stored: safetensors, pth, ONNX, OpenVINO or torch.export."""

import dataclasses
import json
import platform
from dataclasses import dataclass, field
from importlib import metadata

from wbmm.models.state import CheckpointError
from wbmm.version import __version__

__all__ = ["INPUTS", "KINDS", "METADATA_KEY", "ModelCard", "versions"]

METADATA_KEY = "wbmm"
KINDS = ("classifier", "features", "segmentor", "detector")
INPUTS = ("normalized", "uint8")
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
        self.input_size, self.mean, self.std = tuple(self.input_size), tuple(self.mean), tuple(self.std)
        if self.kind not in KINDS or self.input not in INPUTS or len(self.input_size) != 3:
            raise CheckpointError(
                f"the file's description is not one of ours: kind {self.kind!r}, input {self.input!r}, "
                f"input_size {self.input_size!r}"
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
        except (json.JSONDecodeError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the file's description cannot be read ({error})") from None

    def describe(self) -> str:
        """One line for people."""
        form = "training form" if self.form == "training" else f"fused, {self.form} form"
        what = f"{self.num_classes} classes" if self.kind == "classifier" else self.kind
        side = "x".join(map(str, self.input_size[1:]))
        return f"{self.model} ({form}, {what}, {side} px, {self.dtype})"

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

"""How a segmentor takes a picture and gives the classes of its pixels: a configuration's test pipeline as data."""

from collections.abc import Callable
from dataclasses import dataclass

from wbmm.fields import is_number, is_whole
from wbmm.models.state import CheckpointError

__all__ = ["PicturePipeline"]

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "area", "lanczos")  # mmcv's
BACKENDS = ("cv2", "pillow")
LONGEST_SIDE = 16_384
MOST_PIXELS = 1 << 26  # of a resized picture
LARGEST_FACTOR = 64
LARGEST_DIVISOR = 4096
MOST_COLOURS = 1_000_000


@dataclass(frozen=True)
class PicturePipeline:
    """What stands between a picture and a segmentor, and between its logits and the labels of the picture.

    Attributes:
        scale: (width, height) that pictures are resized to, or None.
        scale_factor: (of the width, of the height), in place of a scale; neither leaves pictures as they are.
        keep_ratio: resize to the largest size that fits into the scale in either orientation, as mmcv does.
        interpolation, backend: of the resizing, as mmcv calls them.
        pad_size: (height, width) that smaller pictures are padded to, at the right and below, or None.
        size_divisor: both sides are padded to a multiple of it; None for no padding.
        pad_value: what is padded with, after normalisation.
        align_corners: of the interpolation of logits to the picture's size.
        threshold: of the probability, for a head with one output; None where the largest logit decides.
        palette: red, green, blue of each class, or None.
    """

    scale: tuple[int, int] | None = None
    scale_factor: tuple[float, float] | None = None
    keep_ratio: bool = False
    interpolation: str = "bilinear"
    backend: str = "cv2"
    pad_size: tuple[int, int] | None = None
    size_divisor: int | None = None
    pad_value: float = 0.0
    align_corners: bool = False
    threshold: float | None = None
    palette: list[tuple[int, int, int]] | None = None

    def __post_init__(self) -> None:
        """Checks every field: the text in a file may say anything."""
        for name in ("scale", "scale_factor", "pad_size"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        for name, (good, valid) in _FIELDS.items():
            value = getattr(self, name)
            if not good(value):
                raise CheckpointError(f"the file's description says pictures.{name} = {value!r:.80}; valid: {valid}")
        if self.scale and self.scale_factor:
            raise CheckpointError("the file's description says both pictures.scale and pictures.scale_factor")
        if self.backend == "pillow" and self.interpolation == "area":
            raise CheckpointError("the file's description says pictures.interpolation = 'area', which Pillow lacks")

    @classmethod
    def from_json(cls, values: object) -> "PicturePipeline":
        """From what a card's JSON holds; keys of later versions are left out."""
        if not isinstance(values, dict):
            raise CheckpointError(
                f"the file's description says pictures = {values!r:.80}; valid: a mapping, or nothing"
            )
        return cls(**{key: value for key, value in values.items() if key in _FIELDS})

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of a picture after resizing."""
        if self.scale is None and self.scale_factor is None:
            return width, height
        scale = self.scale or tuple(_times(s, f) for s, f in zip((width, height), self.scale_factor, strict=True))
        if self.keep_ratio:
            factor = min(max(scale) / max(width, height), min(scale) / min(width, height))
            scale = _times(width, factor), _times(height, factor)
        if scale[0] * scale[1] > MOST_PIXELS:
            raise ValueError(f"the test pipeline would enlarge {width}x{height} to {scale[0]}x{scale[1]} pixels")
        return scale

    def padded(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of a resized picture after padding."""
        if self.pad_size is not None:
            return max(width, self.pad_size[1]), max(height, self.pad_size[0])
        divisor = self.size_divisor or 1
        return -(-width // divisor) * divisor, -(-height // divisor) * divisor

    def describe(self) -> str:
        """The resizing and padding in words."""
        by = f"({self.interpolation})"
        if self.scale is not None:
            text = f"{'within' if self.keep_ratio else 'to'} {self.scale[0]}x{self.scale[1]} px {by}"
        elif self.scale_factor is not None:
            text = f"by {self.scale_factor[0]:g} and {self.scale_factor[1]:g} {by}"
        else:
            text = "at their own size"
        if self.pad_size is not None:
            text += f", padded to {self.pad_size[1]}x{self.pad_size[0]}"
        elif self.size_divisor is not None:
            text += f", padded to multiples of {self.size_divisor}"
        return f"whole pictures {text}"


def _times(side: int, factor: float) -> int:
    return max(1, int(side * float(factor) + 0.5))  # rounded as mmcv rounds


def _is_pair(value: object) -> bool:
    whole = isinstance(value, tuple) and len(value) == 2 and all(is_whole(side, 1, LONGEST_SIDE) for side in value)
    return value is None or (whole and value[0] * value[1] <= MOST_PIXELS)


def _are_factors(value: object) -> bool:
    return value is None or (
        isinstance(value, tuple) and len(value) == 2 and all(is_number(f) and 0 < f <= LARGEST_FACTOR for f in value)
    )


def _are_colours(value: object) -> bool:
    return value is None or (
        isinstance(value, list)
        and len(value) <= MOST_COLOURS
        and all(isinstance(c, list | tuple) and len(c) == 3 and all(is_whole(x, 0, 255) for x in c) for c in value)
    )


_SIDES = f"two sides of at most {LONGEST_SIDE}, together at most {MOST_PIXELS} pixels, or nothing"
# Field -> whether a value is valid, and what is.
_FIELDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "scale": (_is_pair, _SIDES),
    "scale_factor": (_are_factors, f"two numbers above 0, at most {LARGEST_FACTOR}, or nothing"),
    "keep_ratio": (lambda v: isinstance(v, bool), "true, false"),
    "interpolation": (lambda v: v in INTERPOLATIONS, ", ".join(INTERPOLATIONS)),
    "backend": (lambda v: v in BACKENDS, ", ".join(BACKENDS)),
    "pad_size": (_is_pair, _SIDES),
    "size_divisor": (lambda v: v is None or is_whole(v, 1, LARGEST_DIVISOR), f"1 to {LARGEST_DIVISOR}, or nothing"),
    "pad_value": (lambda v: is_number(v) and abs(v) <= 1e6, "a number of at most a million"),
    "align_corners": (lambda v: isinstance(v, bool), "true, false"),
    "threshold": (lambda v: v is None or (is_number(v) and 0 <= v <= 1), "0 to 1, or nothing"),
    "palette": (_are_colours, "three bytes a class, or nothing"),
}

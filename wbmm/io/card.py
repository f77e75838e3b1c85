"""The card of a model: what a file says about itself, read from it, or worked out from its weights or its model.

In order: the card and its fields, a card from a file, what a file may ask for, a card from weights alone, a card from a
model.
"""

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import timm
import torch
import torch.nn as nn
from timm.data.transforms_factory import transforms_imagenet_eval
from torch import Tensor

from wbmm.fields import is_number, is_text, is_whole
from wbmm.layers import Block, FusedBlock
from wbmm.layers.mixers import CompactMixer, DenseWBMM2d
from wbmm.machine import versions
from wbmm.models.fuse import FUSED_FORMS
from wbmm.models.named_mixers import MOST_BLOCKS, NUM_STAGES, StageWindow, parse_pattern, parse_windows
from wbmm.models.state import CheckpointError, identify
from wbmm.models.wbmm import WBMM
from wbmm.ops.modules import WindowLayer
from wbmm.text import first_line, printable
from wbmm.zoo import load_zoo

from .picture_pipeline import PicturePipeline
from .reader import CheckpointFile

__all__ = [
    "FORMS",
    "INPUTS",
    "KINDS",
    "ModelCard",
    "card_of",
    "check_args",
    "check_model_name",
    "check_timm_name",
    "form_of",
    "image_transform",
    "read_card",
    "recognise",
]

FORMS = ("training", *FUSED_FORMS)
KINDS = ("classifier", "features", "segmentor", "detector")
INPUTS = ("normalized", "uint8")
INTERPOLATIONS = ("bicubic", "bilinear", "nearest", "lanczos", "box", "hamming")
MOST_CLASSES = 1_000_000
MOST_CHANNELS = 1024  # of an image
LONGEST_SIDE = 16_384
LONGEST_NAME = 10_000  # of a class
LARGEST_WINDOW = 112

_logger = logging.getLogger(__name__)


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
        pictures: of a segmentor, its configuration's test pipeline; None in files that were written without it.
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
    pictures: PicturePipeline | None = None
    source: dict = field(default_factory=dict)
    versions: dict = field(default_factory=versions)

    def __post_init__(self) -> None:
        """Checks every field: the text in a file may say anything."""
        for name in ("input_size", "mean", "std"):
            value = getattr(self, name)
            setattr(self, name, tuple(value) if isinstance(value, (list, tuple)) else value)
        if self.pictures is not None and not isinstance(self.pictures, PicturePipeline):
            self.pictures = PicturePipeline.from_json(self.pictures)
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
        after = f"mean {_short(self.mean)}, std {_short(self.std)}" if self.input == "normalized" else "bytes"
        if self.pictures is not None:
            return f"{mode}, {self.pictures.describe()}, {after}"
        resize = f"shorter side to {round(min(height, width) / self.crop_pct)} px ({self.interpolation})"
        return f"{mode}, {resize}, centre {height}x{width}, {after}"

    def transform(self):
        """A function from a PIL image to the model's input `[C, H, W]`."""
        channels, height, width = self.input_size
        if channels not in (1, 3):
            raise CheckpointError(f"images have 1 or 3 channels; {self.describe()} takes {channels}")
        normalize = self.input == "normalized"
        steps = image_transform((height, width), self.crop_pct, self.interpolation, self.mean, self.std, normalize)
        mode = "L" if channels == 1 else "RGB"
        return lambda image: steps(image.convert(mode))


def image_transform(
    size: tuple[int, int],
    crop_pct: float,
    interpolation: str,
    mean: Sequence[float],
    std: Sequence[float],
    normalize: bool = True,
):
    """Resize the shorter side to size / crop_pct, cut the centre, normalise (or keep bytes)."""
    return transforms_imagenet_eval(
        img_size=size,
        crop_pct=crop_pct,
        interpolation=interpolation,
        mean=tuple(mean),
        std=tuple(std),
        normalize=normalize,
    )


def _short(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.3g}" for value in values)


def _is_size(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 3 or not is_whole(value[0], 1, MOST_CHANNELS):
        return False
    return all(is_whole(side, 1, LONGEST_SIDE) for side in value[1:])


def _are_names(value: object) -> bool:
    return value is None or (
        isinstance(value, list) and len(value) <= MOST_CLASSES and all(is_text(name, LONGEST_NAME) for name in value)
    )


def _are_facts(value: object) -> bool:
    return isinstance(value, dict) and all(is_text(k) and isinstance(v, str) for k, v in value.items())


# Field -> whether a value is valid, and what is.
_FIELDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "model": (is_text, "the name of a model"),
    "args": (lambda v: isinstance(v, dict) and all(isinstance(key, str) for key in v), "a mapping of names to values"),
    "form": (lambda v: v in FORMS, ", ".join(FORMS)),
    "num_classes": (lambda v: is_whole(v, 0, MOST_CLASSES), f"0 to {MOST_CLASSES}"),
    "input_size": (_is_size, f"channels (at most {MOST_CHANNELS}), height, width (at most {LONGEST_SIDE})"),
    "mean": (lambda v: isinstance(v, tuple) and all(map(is_number, v)), "a number for each channel"),
    "std": (lambda v: isinstance(v, tuple) and all(is_number(x) and x > 0 for x in v), "a number above 0 for each"),
    "interpolation": (lambda v: v in INTERPOLATIONS, ", ".join(INTERPOLATIONS)),
    "crop_pct": (lambda v: is_number(v) and 0 < v <= 1, "above 0, at most 1"),
    "class_names": (_are_names, "a list of texts, or nothing"),
    "kind": (lambda v: v in KINDS, ", ".join(KINDS)),
    "input": (lambda v: v in INPUTS, ", ".join(INPUTS)),
    "dtype": (lambda v: is_text(v, 20), "the name of a type, such as float32"),
    "source": (_are_facts, "a mapping of names to texts"),
    "versions": (_are_facts, "a mapping of names to texts"),
}


def read_card(file: CheckpointFile) -> ModelCard | None:
    """The description inside a file: of `save_model`, or of a training run; None where there is none."""
    if file.description:
        return ModelCard.from_json(file.description)
    contents = file.contents
    if isinstance(contents, dict) and isinstance(contents.get("config"), dict) and "num_classes" in contents:
        return _card_of_run(contents)
    return None


def _card_of_run(contents: dict) -> ModelCard:
    """The card of a checkpoint of `wbmm train`."""
    try:
        model, data = contents["config"]["model"], contents["config"]["data"]
        return ModelCard(
            model=model["name"],
            args={key: value for key, value in model["args"].items() if key != "large_kernel"},  # how, not what, it ran
            num_classes=contents["num_classes"],
            input_size=(data["in_chans"], data["size"], data["size"]),
            mean=data["mean"],
            std=data["std"],
            interpolation=data["interpolation"],
            crop_pct=data["crop_pct"],
            class_names=contents.get("class_names"),
            versions=dict(contents.get("versions", {})),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the configuration inside the checkpoint is incomplete ({error!r:.100})") from None


def check_model_name(card: ModelCard, model: str | None) -> None:
    """Raises if the user named a model and the file is of another one."""
    if model is not None and model != card.model:
        raise CheckpointError(f"the file says that it is a {card.model}, not a {model}")


def check_args(args: dict) -> None:
    """Raises unless all that a file asks of `timm.create_model` is architecture, of sensible types and sizes.

    `pretrained`, `checkpoint_path`, `pretrained_cfg_overlay` and others would make it read or fetch what the file says.
    """
    for key, value in args.items():
        if key not in _ARGS:
            raise CheckpointError(
                f"its description asks timm.create_model for {key!r:.40} = {value!r:.80}, which a file may not set "
                f"(it may set {', '.join(_ARGS)}). If you trust it: wbmm.load_model(file, args={{{key!r:.40}: ...}})"
            )
        good, valid = _ARGS[key]
        if not good(value):
            raise CheckpointError(f"its description says {key} = {value!r:.80}; valid: {valid}")


def _is_name(value: object) -> bool:
    return value is None or (isinstance(value, str) and len(value) <= 40 and value.isidentifier())


def _within(low: float, high: float, *, several: bool = False) -> tuple[Callable[[object], bool], str]:
    """A number in a range, or a short list of them."""

    def good(value: object) -> bool:
        if several and isinstance(value, (list, tuple)):
            return 0 < len(value) <= 8 and all(map(good, value))
        return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high

    return good, f"{low} to {high}"


def _is_pattern(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(stage, (str, list, tuple)) and len(stage) <= MOST_BLOCKS for stage in value
    )


def _is_window(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) <= NUM_STAGES and all(map(_is_window, value))
    if isinstance(value, str):
        return re.fullmatch(r"\d{1,3}\+\d{1,2}", value) is not None
    return _within(1, LARGEST_WINDOW)[0](value)


_NAME = (_is_name, "a short name")
_FLAG = (lambda value: isinstance(value, bool), "true or false")
# What a file may ask of timm.create_model: the arguments of our models, and the common ones of timm's.
_ARGS: dict[str, tuple[Callable[[object], bool], str]] = {
    "dims": _within(8, 8192, several=True),
    "depths": _within(1, MOST_BLOCKS, several=True),
    "pattern": (_is_pattern, f"one text for each stage, of at most {MOST_BLOCKS} letters"),
    "window_size": (_is_window, f"1 to {LARGEST_WINDOW}, 'G+L', or one for each stage"),
    "mixer": _NAME,
    "padding_mode": _NAME,
    "global_pool": (lambda value: _is_name(value) or value == "", "a short name"),
    "ls_init_value": (lambda value: value is None or _within(0, 100)[0](value), "none, or 0 to 100"),
    "drop_rate": _within(0, 1),
    "drop_path_rate": _within(0, 1),
    "img_size": _within(1, 16_384, several=True),
    "patch_size": _within(1, 256, several=True),
    "embed_dim": _within(1, 8192, several=True),
    "depth": _within(1, MOST_BLOCKS),
    "num_heads": _within(1, 256, several=True),
    "mlp_ratio": _within(0, 64, several=True),
    "output_stride": _within(1, 32),
    "act_layer": _NAME,
    "norm_layer": _NAME,
    "conv_mlp": _FLAG,
    "use_grn": _FLAG,
}


def check_timm_name(model: str) -> str:
    """A name that timm knows."""
    if not timm.is_model(model):
        raise CheckpointError(f"timm knows no model {model!r}; see `wbmm list` and timm.list_models()")
    return model


def recognise(state_dict: dict[str, Tensor], model: str | None, args: dict | None) -> ModelCard:
    """A card for a file with weights alone: the model of the zoo that has its architecture, or the architecture."""
    seen = identify(state_dict)
    if seen is None:
        if any(key.startswith("backbone.") for key in state_dict):
            raise CheckpointError(
                "this is a segmentor's or a detector's checkpoint, which needs its configuration (--config FILE)"
            )
        if model is None:
            some = ", ".join(sorted(state_dict)[:3])
            raise CheckpointError(
                f"this file says nothing about its model and is of no WBMM (its keys are {some}, ...): "
                "give the model's name (--model NAME)"
            )
        return _default_card(model, args or {}, _count_classes(state_dict, model))
    names = seen.names()
    if model is not None and names and model not in names:
        raise CheckpointError(f"the file looks like {seen}, not like {model}")
    if model is None and len(names) > 1:
        _logger.info("the file fits %s; taken for the first", " and ".join(names))
    stem = state_dict.get("stem.conv1.weight")
    name = model or (names[0] if names else next(iter(load_zoo())))
    own_args = {} if names or model else _architecture(seen.dims, seen.patterns, seen.windows, seen.mixer)
    card = _default_card(name, {**own_args, **(args or {})}, seen.num_classes or 0)
    channels = stem.shape[1] if stem is not None and stem.ndim == 4 else card.input_size[0]
    return _with_channels(card, channels).replace(form=seen.form, kind="classifier" if seen.num_classes else "features")


def _count_classes(state_dict: dict[str, Tensor], model: str) -> int:
    classifier = timm.get_pretrained_cfg_value(check_timm_name(model), "classifier")
    weight = state_dict.get(f"{classifier}.weight")
    given = weight is not None and weight.ndim > 0
    return weight.shape[0] if given else timm.get_pretrained_cfg_value(model, "num_classes")


def _default_card(model: str, args: dict, num_classes: int, tag: str | None = None) -> ModelCard:
    """A card with the transform that timm has for the model, or for those of its weights that a tag names."""
    cfg = timm.get_pretrained_cfg(check_timm_name(model))
    if tag and timm.is_model_pretrained(f"{model}.{tag}"):
        cfg = timm.get_pretrained_cfg(f"{model}.{tag}")
    return ModelCard(
        model=model,
        args=args,
        num_classes=num_classes,
        input_size=cfg.input_size,
        mean=cfg.mean,
        std=cfg.std,
        interpolation=cfg.interpolation,
        crop_pct=cfg.crop_pct or 0.875,
    )


def _with_channels(card: ModelCard, channels: int) -> ModelCard:
    if channels == card.input_size[0]:
        return card
    mean, std = (tuple([sum(v) / len(v)] * channels) for v in (card.mean, card.std))
    return card.replace(input_size=(channels, *card.input_size[1:]), mean=mean, std=std)


def _architecture(dims, patterns, windows, mixer) -> dict:
    """Arguments of `timm.create_model` that spell an architecture out, as JSON has them."""
    sizes = [window or StageWindow((7, 7)) for window in windows]
    return {
        "dims": list(dims),
        "depths": [len(stage) for stage in patterns],
        "pattern": list(patterns),
        "window_size": [str(w) if w.hierarchical else list(w.size) for w in sizes],
        "mixer": mixer,
    }


def form_of(model: nn.Module) -> str:
    """`training`, `compact` or `dense`, by the modules that are there."""
    modules = list(model.modules())
    if any(isinstance(module, DenseWBMM2d) for module in modules):
        return "dense"
    return "compact" if any(isinstance(module, FusedBlock | CompactMixer) for module in modules) else "training"


def card_of(model: nn.Module) -> ModelCard:
    """The card of a model: the one that it was loaded with, brought up to date, or one made from what it is."""
    known = getattr(model, "card", None)
    if isinstance(known, ModelCard):
        return known.replace(form=form_of(model), dtype=_dtype(model), versions=versions())
    cfg = getattr(model, "pretrained_cfg", None)
    if not cfg:
        raise ValueError(
            f"a {type(model).__name__} is not a model of timm's, so a file could not say how to build it: "
            "pass card=ModelCard(...)"
        )
    name = cfg["architecture"]
    card = _default_card(name, _args_of(model, name), getattr(model, "num_classes", 0), cfg.get("tag"))
    card = _with_channels(card, getattr(model, "in_chans", cfg["input_size"][0]))
    kind = "classifier" if card.num_classes else "features"
    return card.replace(form=form_of(model), kind=kind, dtype=_dtype(model))


def _args_of(model: nn.Module, name: str) -> dict:
    """What a WBMM was given beyond its name. Other models of timm's do not tell; their names must be enough."""
    if not isinstance(model, WBMM):
        return {}
    args, zoo = {}, load_zoo().get(name)
    dims = tuple(info["num_chs"] for info in model.feature_info)
    mine = (dims, model.patterns, model.windows, model.mixer)
    if zoo is None or mine != (zoo.dims, parse_pattern(zoo.pattern), parse_windows(zoo.window), zoo.mixer):
        args = _architecture(*mine)
    if model.mixer != (zoo.mixer if zoo else "wbmm"):
        args["mixer"] = model.mixer
    modes = {module.padding_mode for module in model.modules() if isinstance(module, WindowLayer | DenseWBMM2d)}
    if modes - {"zeros"}:
        args["padding_mode"] = modes.pop()
    if any(isinstance(module, Block) and module.gamma is None for module in model.modules()):
        args["ls_init_value"] = None
    return args


def _dtype(model: nn.Module) -> str:
    kinds = {p.dtype for p in model.parameters()} or {torch.float32}
    return str(next(iter(kinds))).removeprefix("torch.") if len(kinds) == 1 else "mixed"

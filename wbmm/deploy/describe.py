"""The card of a file or a model: read from it, or worked out from its weights."""

import logging
import re
from collections.abc import Callable
from pathlib import Path

import timm
import torch
import torch.nn as nn
from torch import Tensor

from wbmm.checkpoint import identify
from wbmm.layers import Block, FusedBlock
from wbmm.layers.fused import CompactMixer, DenseWBMM2d
from wbmm.layers.window import WindowLayer
from wbmm.models.pattern import MOST_BLOCKS, NUM_STAGES, StageWindow, parse_pattern, parse_windows
from wbmm.models.state import CheckpointError
from wbmm.models.wbmm import WBMM
from wbmm.zoo import load_zoo

from .card import METADATA_KEY, ModelCard, versions

__all__ = ["card_of", "check_args", "check_name", "form_of", "insist", "read_card", "recognise"]

_logger = logging.getLogger(__name__)


def read_card(path: Path, contents: object) -> ModelCard | None:
    """The description inside a file: of `save_model`, or of a training run; None where there is none."""
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(METADATA_KEY)
        return ModelCard.from_json(text) if text else None
    if not isinstance(contents, dict):
        return None
    if isinstance(contents.get(METADATA_KEY), str):
        return ModelCard.from_json(contents[METADATA_KEY])
    if isinstance(contents.get("config"), dict) and "num_classes" in contents:
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


def insist(card: ModelCard, model: str | None, args: dict | None) -> ModelCard:
    if model is not None and model != card.model:
        raise CheckpointError(f"the file says that it is a {card.model}, not a {model}")
    return card.replace(args={**card.args, **args}) if args else card


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


LARGEST_WINDOW = 112
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


def check_name(model: str) -> str:
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
    classifier = timm.get_pretrained_cfg_value(check_name(model), "classifier")
    weight = state_dict.get(f"{classifier}.weight")
    given = weight is not None and weight.ndim > 0
    return weight.shape[0] if given else timm.get_pretrained_cfg_value(model, "num_classes")


def _default_card(model: str, args: dict, num_classes: int) -> ModelCard:
    """A card with the transform that timm has for the model."""
    cfg = timm.get_pretrained_cfg(check_name(model))
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
    card = _default_card(name, _args_of(model, name), getattr(model, "num_classes", 0))
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

"""The model of a run: what a configuration may ask timm for, checked before any work, and what is frozen.

Any argument of any model of timm's may be given here, within wide bounds. A file from a stranger may set only the
arguments listed in `wbmm.io.card`, each with its own type and bounds; the two have no list in common.
"""

import inspect
import json
import re
import warnings
from dataclasses import dataclass
from functools import lru_cache

import timm
import torch
import torch.nn as nn
from torch.nn.modules.batchnorm import _BatchNorm

from wbmm.fields import Items, Known, Plain, Range, Text, show, takes
from wbmm.text import first_line

__all__ = ["ModelConfig", "check_model", "create_model", "freeze", "set_train_mode"]

# Arguments of timm.create_model that fetch or read something, or that have a place of their own.
ELSEWHERE = {
    "num_classes": "data.num_classes=",
    "in_chans": "data.in_chans=",
    "drop_path_rate": "model.drop_path=",
    "checkpoint_path": "init=",
    "device": "device=",
    "dtype": "amp=",
}
FEATURES = ("features_only", "out_indices", "feature_cfg", "feature_cls")
NOT_OURS = (*FEATURES, "scriptable", "exportable", "no_jit", "cache_dir")
NUMBER, WINDOW = Range(-16384, 16384), Range(1, 64)
MOST_BLOCKS = 1000
MOST_PARAMETERS = 20e9
MODELS = Known("a model that timm knows", timm.list_models, timm.is_model)


@dataclass
class ModelConfig:
    name: str = takes("wbmm_t", MODELS)
    args: dict = takes({}, Plain())  # keyword arguments of timm.create_model
    drop_path: float = takes(0.0, Range(0.0, 1.0, "[)"))
    grad_checkpointing: bool = False
    freeze: list[str] = takes([], Items(0, 1000, Text()))  # prefixes of parameter names, e.g. ["stem", "stages.0"]
    bn_eval: bool = False  # batch norm uses, and keeps, its running statistics while training
    channels_last: bool = True
    compile: bool = False
    sync_bn: bool = False


def create_model(name: str, args: dict, drop_path: float, in_chans: int, num_classes: int) -> nn.Module:
    """timm's model, or an error of one line that says which argument it is about."""
    _check_args(args)
    options = {"num_classes": num_classes, "in_chans": in_chans} | args
    if drop_path:
        options["drop_path_rate"] = drop_path
    try:
        return timm.create_model(name, **options)
    except ImportError:  # of the package that an operator needs, which it names
        raise
    except Exception as error:  # constructors meet a wrong value with whatever happens to it
        raise ValueError(_refusal(name, args, error)) from error


def check_model(
    name: str,
    args: dict,
    drop_path: float,
    in_chans: int,
    size: int,
    freeze: list[str],
    grad_checkpointing: bool,
) -> None:
    """Builds the model without memory for its weights, to find out whether it can be built as asked."""
    _check_args(args)
    model = _outline(name, json.dumps(args), drop_path > 0, in_chans)
    if model is None:
        return
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"model.args give {name} {parameters:.3g} parameters, above {MOST_PARAMETERS:.3g}")
    embed = getattr(model, "patch_embed", None)
    if getattr(embed, "strict_img_size", False) and embed.img_size not in (None, (size, size)):
        wanted = f"model.name {name!r} takes images of {embed.img_size[0]} pixels"
        raise ValueError(f"{wanted}, data.size is {size}; set model.args.img_size={size}")
    _frozen_names(model, freeze)
    if grad_checkpointing:
        try:
            model.set_grad_checkpointing()
        except (AttributeError, AssertionError):
            raise ValueError(f"model.grad_checkpointing: {name} has none; set it to false") from None


@lru_cache(maxsize=16)
def _outline(name: str, args: str, drop_path: bool, in_chans: int) -> nn.Module | None:
    """The model on the meta device; None where only a real one, or another machine, can tell."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return create_model(name, json.loads(args), 0.1 if drop_path else 0.0, in_chans, num_classes=2)
    except ImportError:
        return None
    except ValueError as error:
        if "meta" in str(error).replace(name, ""):
            return None
        raise


def _check_args(args: dict) -> None:
    for key, value in args.items():
        if key in ELSEWHERE:
            raise ValueError(f"model.args.{key} has a place of its own: use {ELSEWHERE[key]}")
        if key in NOT_OURS or key.startswith("pretrained"):
            raise ValueError(f"model.args.{key} is not a property of the network; weights are given with init=")
        if value is None:
            raise ValueError(f"model.args.{key} is null, which timm passes over: leave it out for its default")
        numbers = [*_numbers(value), *_numbers(value, in_text=True)] if key == "window_size" else _numbers(value)
        for number in numbers:
            if wrong := (WINDOW if key == "window_size" else NUMBER).problem(number):
                raise ValueError(f"model.args.{key} {wrong}")
        counts = _numbers(value) if key in ("depth", "depths", "layers") else [*_numbers(value, in_text=True)]
        if sum(counts) > MOST_BLOCKS:
            raise ValueError(f"model.args.{key} asks for more than {MOST_BLOCKS} blocks, got {show(value)}")


def _numbers(value, in_text: bool = False):
    """The numbers in nested lists and mappings; or, with `in_text`, those that are parts of texts."""
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item, in_text)
    elif in_text and isinstance(value, str):
        yield from (int(digits[:9]) for digits in re.findall(r"\d+", value))
    elif not in_text and isinstance(value, int | float):
        yield value


def _refusal(name: str, args: dict, error: Exception) -> str:
    text = first_line(error)
    unknown = re.search(r"unexpected keyword argument '(\w+)'", text)
    if unknown and unknown[1] == "drop_path_rate":
        return f"model.drop_path: {name} has no stochastic depth; set it to 0"
    if unknown and unknown[1] in args:
        return f"model.args: {name} takes no {unknown[1]!r}; it takes {', '.join(_arguments(name)) or 'none'}"
    what = f"model.args {show(args)} do not fit {name}" if args else f"model.name {name!r} cannot be built"
    return f"{what}: {text if isinstance(error, ValueError) or not str(error) else f'{type(error).__name__}: {text}'}"


def _arguments(name: str) -> list[str]:
    """The names of the arguments of a model's class."""
    with torch.device("meta"):
        parameters = inspect.signature(type(timm.create_model(name))).parameters
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [key for key, value in parameters.items() if value.kind not in kinds and key not in ELSEWHERE]


def freeze(model: nn.Module, prefixes: list[str]):
    """Stops the training of every parameter whose name starts with one of `prefixes` (whole parts of the name)."""
    for name in _frozen_names(model, prefixes):
        model.get_parameter(name).requires_grad_(False)


def _frozen_names(model: nn.Module, prefixes: list[str]) -> set[str]:
    """The parameters whose name starts with one of `prefixes` (whole parts of the name)."""
    names = [name for name, _ in model.named_parameters()]
    frozen: set[str] = set()
    for prefix in prefixes:
        found = {name for name in names if f"{name}.".startswith(f"{prefix}.")}
        if not found:
            parts = sorted({name.split(".")[0] for name in names})
            raise ValueError(f"model.freeze: no parameter is under {prefix!r}; the model's parts: {', '.join(parts)}")
        frozen |= found
    if frozen and not any(p.requires_grad for name, p in model.named_parameters() if name not in frozen):
        raise ValueError("model.freeze leaves no parameter to train")
    return frozen


def set_train_mode(model: nn.Module, frozen: list[str], bn_eval: bool):
    """Train mode, but with the statistics of frozen batch norms (or of all, with `bn_eval`) kept as they are."""
    model.train()
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (bn_eval or any(_under(name, prefix) for prefix in frozen)):
            module.eval()


def _under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")

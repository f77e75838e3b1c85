"""Typed configuration: YAML files that inherit from each other, `key=value` overrides, and no silent misspelling."""

import dataclasses
import difflib
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

__all__ = ["TrainConfig", "config_from_dict", "load_config", "to_dict", "to_yaml"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def _choice(*values):
    """A text field that takes one of `values`; the first is the default."""
    return field(default=values[0], metadata={"choices": values})


@dataclass
class ModelConfig:
    name: str = "wbmm_t"
    args: dict = field(default_factory=dict)  # keyword arguments of timm.create_model
    drop_path: float = 0.0
    grad_checkpointing: bool = False
    freeze: list[str] = field(default_factory=list)  # prefixes of parameter names, e.g. ["stem", "stages.0"]
    bn_eval: bool = False  # batch norm uses, and keeps, its running statistics while training
    channels_last: bool = True
    compile: bool = False
    sync_bn: bool = False


@dataclass
class DataConfig:
    source: str = "folder"
    root: str | None = None
    train_split: str = "train"
    val_split: str = "val"
    size: int = 224
    in_chans: int = 3
    num_classes: int | None = None  # None: counted from the data
    workers: int = 8
    in_memory: bool = False
    on_bad_image: str = _choice("fail", "skip")
    interpolation: str = "bicubic"
    crop_pct: float = 0.875
    mean: list[float] = field(default_factory=lambda: list(IMAGENET_MEAN))
    std: list[float] = field(default_factory=lambda: list(IMAGENET_STD))
    args: dict = field(default_factory=dict)  # keyword arguments of timm.data.create_dataset


@dataclass
class AugmentConfig:
    auto: str | None = "rand-m9-mstd0.5-inc1"
    color_jitter: float = 0.4
    reprob: float = 0.25
    remode: str = "pixel"
    hflip: float = 0.5
    scale: list[float] = field(default_factory=lambda: [0.08, 1.0])
    ratio: list[float] = field(default_factory=lambda: [3 / 4, 4 / 3])
    shift: int = 0  # random translation in pixels, in-memory path only


@dataclass
class MixConfig:
    mixup: float = 0.8
    cutmix: float = 1.0
    prob: float = 1.0
    switch_prob: float = 0.5
    mode: str = _choice("batch", "pair", "elem")
    label_smoothing: float = 0.1


@dataclass
class OptimConfig:
    name: str = "adamw"
    lr: float = 4e-3
    lr_batch: int = 4096  # `lr` is stated for this global batch and scales linearly with the real one
    weight_decay: float = 0.05
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    layer_decay: float | None = None
    clip_grad: float | None = None


@dataclass
class ScheduleConfig:
    name: str = "cosine"
    epochs: int = 300
    warmup_epochs: float = 5.0
    min_lr: float = 1e-6
    warmup_lr: float = 1e-6


@dataclass
class EmaConfig:
    decay: float | None = None
    warmup: bool = False  # let the decay grow with the steps, for short runs


@dataclass
class LogConfig:
    every: int = 50  # optimiser steps
    tensorboard: bool = True
    wandb: bool = False
    wandb_project: str = "wbmm"
    name: str | None = None


@dataclass
class SaveConfig:
    every_epochs: int = 0  # keep the checkpoint of every k-th epoch; 0 keeps `last` and `best` alone
    every_steps: int = 0  # write `last` every k optimiser steps as well as after each epoch
    best: bool = True


@dataclass
class TrainConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    mix: MixConfig = field(default_factory=MixConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    log: LogConfig = field(default_factory=LogConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    out: str = "runs/<name>"  # <name>: log.name, or the configuration file's name
    seed: int = 0
    global_batch: int = 4096
    batch: int = 128  # images per device and forward pass
    amp: str = _choice("none", "bf16", "fp16")
    init: str | None = None  # weights to start from (fine-tuning); the run itself starts at step 0
    init_resize_tables: bool = False
    resume: str | None = None  # a checkpoint of this same run, or "auto": the last one in `out`, if any
    device: str = "auto"
    deterministic: bool = False
    eval_every: int = 1  # epochs
    max_skips: int = 10  # steps with a loss that is not finite before the run stops
    timeout: float = 600.0  # seconds a process waits for the others before it gives up


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> TrainConfig:
    """Reads a YAML file and the files it inherits from (`base: relative.yaml`), then applies `key=value` overrides."""
    path = Path(path)
    config = config_from_dict(_merge(_read(path), _parse_overrides(overrides)), where=str(path))
    config.out = config.out.replace("<name>", config.log.name or path.stem)
    return config


def config_from_dict(values: dict, where: str = "the configuration") -> TrainConfig:
    """Builds the typed configuration, refusing unknown keys and values of another type."""
    config = _build(TrainConfig, values, "", where)
    _check_values(config)
    return config


def to_dict(config: TrainConfig) -> dict:
    return dataclasses.asdict(config)


def to_yaml(config: TrainConfig) -> str:
    return yaml.safe_dump(to_dict(config), sort_keys=False, default_flow_style=None, width=120)


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict:
    if not path.is_file():
        wanted = f" (the base of {seen[-1]})" if seen else ""
        raise ValueError(f"no configuration file {path}{wanted}")
    if path.resolve() in seen:
        raise ValueError(f"{path} inherits from itself through `base:`")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold `key: value` pairs, not a {type(values).__name__}")
    base = values.pop("base", None)
    if base is None:
        return values
    return _merge(_read(path.parent / str(base), (*seen, path.resolve())), values)


def _merge(base: dict, changes: dict) -> dict:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(merged.get(key), dict) and isinstance(value, dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _parse_overrides(overrides: typing.Sequence[str]) -> dict:
    values: dict = {}
    for text in overrides:
        key, sign, raw = text.partition("=")
        if not sign or not key or not all(key.split(".")):
            raise ValueError(f"override {text!r} is not of the form key=value, e.g. data.root=/data/imagenet")
        try:
            value = yaml.safe_load(raw)
        except yaml.YAMLError as error:
            raise ValueError(f"the value of override {text!r} is not valid YAML: {error}") from error
        for part in reversed(key.split(".")):
            value = {part: value}
        values = _merge(values, value)
    return values


def _build(cls: type, values: Any, prefix: str, where: str):
    if not isinstance(values, dict):
        raise ValueError(f"{prefix.rstrip('.')} in {where} must hold `key: value` pairs, got {values!r}")
    hints = typing.get_type_hints(cls)
    fields = {item.name: item for item in dataclasses.fields(cls)}
    arguments = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key not in fields:
            raise ValueError(f"unknown key {name!r} in {where}; {_nearest(name, list(fields), prefix)}")
        if dataclasses.is_dataclass(hints[key]):
            arguments[key] = _build(hints[key], value, f"{name}.", where)
        else:
            arguments[key] = _convert(value, hints[key], name, where)
            choices = fields[key].metadata.get("choices")
            if choices and arguments[key] not in choices:
                raise ValueError(f"{name} in {where} is {value!r}; valid: {', '.join(choices)}")
    return cls(**arguments)


def _nearest(name: str, siblings: list[str], prefix: str) -> str:
    close = difflib.get_close_matches(name.rpartition(".")[2], siblings, n=1, cutoff=0.6)
    if close:
        return f"did you mean {prefix + close[0]!r}?"
    elsewhere = [key for key in _all_keys() if key.rpartition(".")[2] == name.rpartition(".")[2]]
    nearest = elsewhere or difflib.get_close_matches(name, _all_keys(), n=1, cutoff=0.0)
    return f"the nearest valid key is {nearest[0]!r}"


def _all_keys(cls: type = TrainConfig, prefix: str = "") -> list[str]:
    keys = []
    for name, hint in typing.get_type_hints(cls).items():
        keys += _all_keys(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else [prefix + name]
    return keys


def _convert(value: Any, hint: Any, name: str, where: str):
    """`value` as `hint`, or an error. YAML reads 1e-3 (no dot) as text, so a number written so is accepted."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(item for item in typing.get_args(hint) if item is not type(None))
    if typing.get_origin(hint) is list:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} in {where} must be a list, got {value!r}")
        (item_hint,) = typing.get_args(hint)
        return [_convert(item, item_hint, f"{name}[{index}]", where) for index, item in enumerate(value)]
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ValueError(f"{name} in {where} must be {_type_name(hint)}, got {value!r}")


def _type_name(hint: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping"}[hint]


def _check_values(config: TrainConfig):
    positive = {
        "global_batch": config.global_batch,
        "batch": config.batch,
        "eval_every": config.eval_every,
        "timeout": config.timeout,
        "optim.lr": config.optim.lr,
        "optim.lr_batch": config.optim.lr_batch,
        "schedule.epochs": config.schedule.epochs,
        "log.every": config.log.every,
        "data.size": config.data.size,
        "data.in_chans": config.data.in_chans,
    }
    for name, value in positive.items():
        if value <= 0:
            raise ValueError(f"{name} must be above 0, got {value}")
    for name, value in {"max_skips": config.max_skips, "data.workers": config.data.workers}.items():
        if value < 0:
            raise ValueError(f"{name} must be 0 or more, got {value}")
    if config.schedule.warmup_epochs < 0 or config.schedule.warmup_epochs > config.schedule.epochs:
        raise ValueError(
            f"schedule.warmup_epochs must be between 0 and schedule.epochs ({config.schedule.epochs}), "
            f"got {config.schedule.warmup_epochs}"
        )
    if config.ema.decay is not None and not 0 < config.ema.decay < 1:
        raise ValueError(f"ema.decay must be between 0 and 1, or null for no EMA, got {config.ema.decay}")
    if config.init and config.resume not in (None, "auto"):
        raise ValueError("init= starts a new run from weights and resume= continues a run: give one of them")

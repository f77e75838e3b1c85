"""Typed configuration: YAML files that inherit from each other, `key=value` overrides, and no silent misspelling."""

import dataclasses
import difflib
import math
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from wbmm.config_files import resolve_config
from wbmm.data.settings import PATH, AugmentConfig, DataConfig, MixConfig, check_reader_args
from wbmm.fields import Choice, Range, Text, show, takes
from wbmm.machine import PRECISIONS
from wbmm.text import first_line
from wbmm.train.optim import scale_lr

from .model import ModelConfig, check_model
from .optim import MOST_EPOCHS, OptimConfig, ScheduleConfig, optimizer_options

__all__ = [
    "TrainConfig",
    "check_config",
    "check_given",
    "config_from_dict",
    "flatten",
    "load_config",
    "make_config",
    "merge_values",
    "parse_overrides",
    "to_dict",
    "to_yaml",
]

SEEDS = Range(0, 2**63 - 1)  # what the order of the data is hashed from
MOST_STEPS, MOST_MINUTES = 10**9, 10_000.0
MOST_VALUES, DEEPEST = 10_000, 20  # in a file; aliases could make it endless
WRITTEN_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


@dataclass
class EmaConfig:
    decay: float | None = takes(None, Range(0.0, 1.0, "()"))
    warmup: bool = False  # let the decay grow with the steps, for short runs


@dataclass
class LogConfig:
    every: int = takes(50, Range(1, MOST_STEPS))  # optimiser steps
    tensorboard: bool | None = None  # null: if it is installed
    report: bool = True  # pictures of the first images and of the mistakes, a model card, the fused file
    wandb: bool = False
    wandb_project: str = takes("wbmm", Text(128, r"[^/\\#?%:]+", "a name without / \\ # ? % :"))
    name: str | None = takes(None, Text(200, r"(?!\.{1,2}$)[^/\\]+", "the name of a folder, without / or \\"))


@dataclass
class SaveConfig:
    every_epochs: int = takes(0, Range(0, MOST_EPOCHS))  # keep every k-th checkpoint; 0 keeps `last` and `best` alone
    every_steps: int = takes(0, Range(0, MOST_STEPS))  # write `last` every k steps too, not only each epoch
    every_minutes: float = takes(5.0, Range(0, MOST_MINUTES))  # and when it is that old; 0: never for that
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
    out: str = takes("runs/<name>", PATH)  # <name>: log.name, or the configuration file's name
    seed: int = takes(0, SEEDS)
    global_batch: int = takes(4096, Range(1, 2**20))
    batch: int = takes(128, Range(1, 2**16))  # images per device and forward pass
    amp: str = takes("none", Choice("none", "bf16", "fp16"))
    precision: str = takes("tf32", Choice(*PRECISIONS))  # of float32 products
    init: str | None = takes(None, PATH)  # weights to start from (fine-tuning); the run itself starts at step 0
    init_resize_tables: bool = False
    resume: str | None = takes(None, PATH)  # a checkpoint of this same run, or "auto": the last one in `out`, if any
    device: str = takes("auto", Text(16, r"auto|cpu|cuda(:\d{1,3})?", "auto, cpu, cuda, cuda:0"))
    deterministic: bool = False
    eval_every: int = takes(1, Range(1, MOST_EPOCHS))  # epochs
    max_skips: int = takes(10, Range(0, 1_000_000))  # steps with a loss that is not finite before the run stops
    timeout: float = takes(600.0, Range(1.0, 7 * 86400.0))  # seconds a process waits for the others


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> TrainConfig:
    """Reads a YAML file and the files it inherits from (`base: relative.yaml`), then applies `key=value` overrides.

    `path` may also be a name in the project's configs or a row of a table: see `wbmm.config_files`.
    All that can be told to be wrong without the data is an error here: one line that names the key.
    """
    path, changes = resolve_config(path)
    return make_config(merge_values(_read(path), changes), overrides, str(path), path.stem)


def make_config(values: dict, overrides: typing.Sequence[str], where: str, name: str = "run") -> TrainConfig:
    """A checked configuration from plain values and `key=value` overrides; `name` is for `runs/<name>`."""
    config = config_from_dict(merge_values(values, parse_overrides(overrides)), where)
    config.out = config.out.replace("<name>", config.log.name or name)
    _expand_home(config)
    _check_out(config.out)
    _check_model(config)
    return config


def config_from_dict(values: dict, where: str = "the configuration") -> TrainConfig:
    """Builds the typed configuration, refusing unknown keys, and values of another type or out of their range."""
    config = _build(TrainConfig, values, "", where)
    _check_values(config)
    return config


def check_config(config: TrainConfig) -> None:
    """The same checks for a configuration that was made or changed in Python."""
    config_from_dict(to_dict(config))
    _check_model(config)


def check_given(values: dict, where: str) -> None:
    """Checks some values by themselves: keys, types and ranges, not what several of them say together."""
    _build(TrainConfig, values, "", where)


def to_dict(config: TrainConfig) -> dict:
    return dataclasses.asdict(config)


def to_yaml(config: TrainConfig) -> str:
    return yaml.safe_dump(to_dict(config), sort_keys=False, default_flow_style=None, width=120)


class _Loader(yaml.SafeLoader):
    """YAML in which a key that stands twice is an error and a date is text."""

    depth = 0

    def compose_node(self, parent, index):
        self.depth += 1
        if self.depth > DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"more than {DEEPEST} levels", problem_mark=self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                problem = f"the key {show(key.value)} stands twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return node

    def flatten_mapping(self, node):
        super().flatten_mapping(node)
        if len(node.value) > MOST_VALUES:
            raise yaml.MarkedYAMLError(problem="`<<` makes too many keys", problem_mark=node.start_mark)

    def construct_yaml_int(self, node):
        try:
            return super().construct_yaml_int(node)
        except ValueError:  # more digits than Python reads: no number for any field, whose error names it
            return node.value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.yaml_implicit_resolvers = {
    sign: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for sign, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _parse(text: str, what: str) -> Any:
    try:
        value = yaml.load(text, _Loader)
    except Exception as error:  # PyYAML meets a wrong tag (`!!bool x`) with KeyError, AttributeError, ...
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or first_line(error)
        raise ValueError(f"{what} is not valid YAML: {place}{problem}") from error
    left, level = MOST_VALUES, [value]
    for _ in range(DEEPEST):
        level = [item for part in level for item in _inside(part)][: left + 1]
        left -= len(level)
        if left < 0 or not level:
            break
    if level:
        raise ValueError(f"{what} holds more than {MOST_VALUES} values, or values more than {DEEPEST} levels deep")
    return value


def _inside(value: Any) -> list:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple | set) else []


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict:
    if not path.is_file():
        wanted = f" (the base of {seen[-1]})" if seen else ""
        raise ValueError(f"no configuration file {path}{wanted}")
    if path.resolve() in seen:
        raise ValueError(f"{path} inherits from itself through `base:`")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the configuration file {path}: {error}") from error
    values = _parse(text, str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold `key: value` pairs, not a {type(values).__name__}")
    base = values.pop("base", None)
    if base is None:
        return values
    wrong = PATH.problem(base) if isinstance(base, str) else f"must be text, got {show(base)}"
    if wrong:
        raise ValueError(f"base in {path} {wrong}")
    return merge_values(_read(path.parent / base, (*seen, path.resolve())), values)


def merge_values(base: dict, changes: dict) -> dict:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(merged.get(key), dict) and isinstance(value, dict)
        merged[key] = merge_values(merged[key], value) if both else value
    return merged


def flatten(values: dict, prefix: str = "") -> dict:
    """`{"data": {"size": 224}}` as `{"data.size": 224}`."""
    flat = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def parse_overrides(overrides: typing.Sequence[str]) -> dict:
    """`key=value` texts as nested values."""
    values: dict = {}
    for text in overrides:
        key, sign, raw = text.partition("=")
        parts = key.split(".")
        if not sign or not all(parts) or len(parts) > DEEPEST:
            raise ValueError(f"override {show(text)} is not of the form key=value, e.g. data.root=/data/imagenet")
        value = _parse(raw, f"the value of override {show(text)}")
        for part in reversed(parts):
            value = {part: value}
        values = merge_values(values, value)
    return values


def _build(cls: type, values: Any, prefix: str, where: str):
    if not isinstance(values, dict):
        name = prefix.rstrip(".") or "the whole"
        raise ValueError(f"{name} in {where} must hold `key: value` pairs, got {show(values)}")
    hints = typing.get_type_hints(cls)
    fields = {item.name: item for item in dataclasses.fields(cls)}
    arguments = {}
    for key, value in values.items():
        if key not in fields:
            name = f"{prefix}{key}" if isinstance(key, str) else f"{prefix}{show(key)}"
            raise ValueError(f"unknown key {show(name)} in {where}; {_nearest(name[:200], list(fields), prefix)}")
        name = f"{prefix}{key}"
        if dataclasses.is_dataclass(hints[key]):
            arguments[key] = _build(hints[key], value, f"{name}.", where)
            continue
        arguments[key] = _convert(value, hints[key], name, where)
        rule = fields[key].metadata.get("rule")
        wrong = rule.problem(arguments[key]) if rule and arguments[key] is not None else None
        if wrong:
            raise ValueError(f"{name} {wrong}{' (or null)' if types.NoneType in typing.get_args(hints[key]) else ''}")
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
            raise ValueError(f"{name} in {where} must be a list, got {show(value)}")
        (item_hint,) = typing.get_args(hint)
        return [_convert(item, item_hint, f"{name}[{index}]", where) for index, item in enumerate(value)]
    if hint is float:
        number = _float(value)
        if math.isfinite(number):
            return number
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ValueError(f"{name} in {where} must be {_type_name(hint)}, got {show(value)}")


def _float(value: Any) -> float:
    written = isinstance(value, str) and WRITTEN_NUMBER.fullmatch(value)
    if isinstance(value, bool) or not (written or isinstance(value, int | float)):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # a whole number beyond the largest float
        return math.inf


def _type_name(hint: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping"}[hint]


def _check_values(config: TrainConfig) -> None:
    """What several fields say together; each by itself is in its range."""
    _check_images(config)
    check_reader_args(config.data)
    _check_rates(config)
    optimizer_options(config.optim.name, config.optim.betas, config.optim.eps)
    if config.init and config.resume not in (None, "auto"):
        raise ValueError("init= starts a new run from weights and resume= continues a run: give one of them")


def _check_images(config: TrainConfig) -> None:
    data, augment = config.data, config.augment
    for name, values in (("mean", data.mean), ("std", data.std)):
        if len(values) != data.in_chans:
            raise ValueError(f"data.{name} has {len(values)} values for {data.in_chans} channels (data.in_chans)")
    for name, (low, high) in (("scale", augment.scale), ("ratio", augment.ratio)):
        if low > high:
            raise ValueError(f"augment.{name} must be [low, high] with low <= high, got {[low, high]}")
    if data.in_memory and augment.auto:
        raise ValueError(
            f"augment.auto {augment.auto!r} works on single images, data.in_memory on batches: "
            "set augment.auto=null or data.in_memory=false"
        )
    if augment.shift and not data.in_memory:
        raise ValueError(f"augment.shift {augment.shift} is for data.in_memory=true alone")
    if augment.shift >= data.size:
        raise ValueError(f"augment.shift must be below data.size ({data.size}), got {augment.shift}")
    if (config.mix.mixup > 0 or config.mix.cutmix > 0) and config.batch % 2:
        raise ValueError(f"mixup and cutmix pair the images of a batch: batch must be even, got {config.batch}")


def _check_rates(config: TrainConfig) -> None:
    schedule = config.schedule
    if schedule.warmup_epochs > schedule.epochs:
        most = f"schedule.epochs ({schedule.epochs})"
        raise ValueError(f"schedule.warmup_epochs must be from 0 to {most}, got {schedule.warmup_epochs}")
    lr, _ = scale_lr(config.optim.lr, config.optim.lr_batch, config.global_batch)
    rates = {"min_lr": schedule.min_lr} | ({"warmup_lr": schedule.warmup_lr} if schedule.warmup_epochs else {})
    for name, value in rates.items():
        if value > lr:
            raise ValueError(
                f"schedule.{name} must be at most the learning rate, which is {lr:g} "
                f"(optim.lr x global_batch / optim.lr_batch), got {value:g}"
            )


def _check_model(config: TrainConfig) -> None:
    model, data = config.model, config.data
    check_model(
        model.name, model.args, model.drop_path, data.in_chans, data.size, model.freeze, model.grad_checkpointing
    )


def _expand_home(config: TrainConfig) -> None:
    for name, holder in (("root", config.data), ("out", config), ("init", config), ("resume", config)):
        value = getattr(holder, name)
        if value and value.startswith("~"):
            try:
                setattr(holder, name, str(Path(value).expanduser()))
            except RuntimeError:
                key = "data.root" if name == "root" else name
                raise ValueError(f"{key} {show(value)}: no home folder of that name; write the path in full") from None


def _check_out(out: str) -> None:
    folder = Path(out)
    try:
        there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise ValueError(f"out {show(out)} cannot be made: {error.strerror}") from error
    if there and not there.is_dir():
        raise ValueError(f"out {show(out)} cannot be made: {there} is not a folder")

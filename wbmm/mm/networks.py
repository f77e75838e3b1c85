"""Configurations filled in, and segmentors and detectors from them, on the packages and the device at hand.

A configuration finds base files of the project by `wbmm::NAME`. In it a value `"$name"` is the variable `name` of the
finished configuration, whichever file or `--cfg-options` sets it; `"$name.2"` is an entry of it. mmengine itself would
take the value that the base file had. Some variables follow from others: see `derived_variables`.
"""

import copy
import difflib
import importlib
import inspect
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as td
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import Runner
from torch import Tensor

from wbmm.config_files import find_config, resolve_config
from wbmm.fields import is_number
from wbmm.models.fuse import fuse as fuse_model
from wbmm.models.state import CheckpointError
from wbmm.zoo import load_zoo

from . import register, require  # noqa: F401  (registers the backbones)
from .backbone import timm_channels
from .loading import describe_misfit, use_safe_reader
from .mm_checkpoint import MMCheckpoint, read_mm_checkpoint
from .pictures import class_colours

__all__ = [
    "READ_KEYS",
    "bases_by_name",
    "build_detector",
    "build_mm_model",
    "build_segmentor",
    "dataset_meta",
    "derived_variables",
    "fill_in",
    "load_mm_config",
    "prepare_device",
    "settings_explained",
    "spread_stages",
    "without_sync_bn",
]

PACKAGE = "wbmm::"
REFERENCE = re.compile(r"\$([A-Za-z_]\w*)(?:\.(\d+))?")
DEEPEST = 10  # variables that are other variables
# What the runner and we read of a configuration.
READ_KEYS = {
    *inspect.signature(Runner).parameters,
    *("custom_imports", "default_scope", "env_cfg", "log_level", "model_wrapper_cfg"),
    *("tta_model", "tta_pipeline", "tta_ratios"),
}
# Variables that others follow from.
SOURCES = {"arch", "classes", "data_root", "init", "masks", "resize_tables", "stages", "val_json", "workers"}
# What a variable must be: a whole number, from the one named here; a number; width and height, or height and width.
WHOLE = {
    **dict.fromkeys(("batch_size", "max_iters", "max_epochs", "val_interval", "proposals", "rois"), 1),
    **dict.fromkeys(("head_channels", "auxiliary_channels", "width", "box_features"), 1),
    **dict.fromkeys(("workers", "warmup", "ignore_index", "box_convs", "mask_convs"), 0),
}
NUMBERS, PAIRS = ("lr", "decay_rate", "drop_path_rate", "anchor_scale"), ("crop", "scale")
USUAL_KEYS = {"test_mode", "batch_size", "num_workers", "ignore_index", "num_classes", "in_channels"}  # of mm classes
_SYNC_BN = ("SyncBN", "MMSyncBN", "NaiveSyncBN")


@contextmanager
def bases_by_name() -> Iterator[None]:
    """Inside, `_base_ = "wbmm::own/upernet.py"` is a file of the project's configs, from wherever it is named."""
    original = Config._get_cfg_path

    def find(path: str, filename: str) -> tuple[str, str | None]:
        if path.startswith(PACKAGE):
            return str(find_config(f"configs/{path.removeprefix(PACKAGE)}", ".py").resolve()), None
        return original(path, filename)

    Config._get_cfg_path = staticmethod(find)
    try:
        yield
    finally:
        Config._get_cfg_path = staticmethod(original)


def fill_in(cfg: Config) -> Config:
    """Replaces `"$name"` by the variable, everywhere; a configuration without them stays as it is."""
    used = _referenced(cfg)
    if not used:
        return cfg
    _check_spelling(cfg, used | SOURCES)
    _check_values(cfg, used)
    variables = {**derived_variables(cfg), **{key: cfg[key] for key in cfg}}
    for key in list(cfg):
        cfg[key] = _filled(cfg[key], variables, str(cfg.filename), DEEPEST)
    return cfg


def _referenced(cfg: Config) -> set[str]:
    """The variables that values `"$name"` name."""
    return {match[1] for text in _texts(cfg._cfg_dict) if (match := REFERENCE.fullmatch(text))}


def _check_spelling(cfg: Config, used: set[str]) -> None:
    """Raises for a variable that nothing reads, and whose name is nearly one that is read."""
    for key in cfg:
        near = [] if key in used | READ_KEYS else difflib.get_close_matches(key, sorted(used), n=1, cutoff=0.88)
        if near:
            raise ValueError(f"{cfg.filename}: nothing reads {key!r}; did you mean {near[0]!r}?")


def _check_values(cfg: Config, used: set[str]) -> None:
    """Raises for a variable of the own-data configurations that is of another kind; a list of two becomes a pair."""
    for name in sorted(used & {*cfg} & {*WHOLE, *NUMBERS, *PAIRS}):
        value = cfg[name]
        if isinstance(value, str) and REFERENCE.fullmatch(value):
            continue
        if name in PAIRS:
            sides = value if isinstance(value, list | tuple) else ()
            sound = len(sides) == 2 and all(type(side) is int and side > 0 for side in sides)
            expected = "two whole numbers, such as (640, 480)"
        elif name in NUMBERS:
            sound, expected = is_number(value) and value >= 0, "a number from 0"
        else:
            sound, expected = type(value) is int and value >= WHOLE[name], f"a whole number from {WHOLE[name]}"
        if not sound:
            raise ValueError(f"{cfg.filename}: {name} is {value!r:.60}; expected {expected}")
        if name in PAIRS:
            cfg[name] = tuple(value)  # mmseg and mmdet take no list


def _check_options(cfg: Config, known: set[str], config: object) -> None:
    """Raises for a key that an option brought in and nothing reads."""
    read = READ_KEYS | SOURCES | _referenced(cfg)
    for key in cfg:
        if key not in known | read:
            near = difflib.get_close_matches(key, sorted(known | read), n=1)
            advice = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"--cfg-options {key}: nothing in {config} reads it{advice}")


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _texts(part)


def _filled(value: object, variables: dict, file: str, depth: int) -> object:
    if isinstance(value, dict):
        return type(value)({key: _filled(part, variables, file, depth) for key, part in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(_filled(part, variables, file, depth) for part in value)
    match = REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return copy.deepcopy(value)
    name, place = match.groups()
    if name not in variables or not depth:
        raise ValueError(f"{file}: {value!r} names no variable of this configuration")
    found = _filled(variables[name], variables, file, depth - 1)
    try:
        return found if place is None else found[int(place)]
    except (IndexError, TypeError, KeyError):
        raise ValueError(f"{file}: {value!r}: {name} is {found!r:.80}") from None


def derived_variables(cfg: Config) -> dict:
    """Variables that follow from others, unless the configuration sets them.

    `num_classes` and `palette` from `classes`; `backbone_type` and `channels` (of its four maps) from `arch`;
    `persistent_workers` from `workers`; `val_json_path` from `data_root` and `val_json`; `metrics` of a detector from
    `masks`; `init_cfg` of the backbone from `init` and `resize_tables`.
    """
    found = {"persistent_workers": bool(cfg.get("workers")), "init_cfg": None}
    if cfg.get("init"):
        found["init_cfg"] = {"type": "Pretrained", "checkpoint": cfg.init}
        found["init_cfg"] |= {"resize_tables": True} if cfg.get("resize_tables") else {}
    if cfg.get("val_json"):
        found["val_json_path"] = str(Path(cfg.data_root, cfg.val_json))
        found["metrics"] = ["bbox", "segm"] if cfg.get("masks", True) else ["bbox"]
    if isinstance(cfg.get("classes"), str):
        raise ValueError(
            f"{cfg.filename}: classes is the text {cfg.classes!r}: write a tuple of names, ({cfg.classes!r},) for one"
        )
    if cfg.get("classes"):
        count = len(cfg.classes)
        found |= {"num_classes": count, "palette": class_colours(count).tolist()}
    arch = (cfg.get("model") or {}).get("backbone", {}).get("arch")
    arch = cfg.get("arch") if arch in (None, "$arch") else arch
    if arch in load_zoo():
        dims = cfg.model.backbone.get("dims") or load_zoo()[arch].dims
        return found | {"backbone_type": "WBMMBackbone", "channels": list(dims)}
    if arch is not None:
        with torch.device("meta"):
            return found | {"backbone_type": "TimmBackbone", "channels": timm_channels(arch)}
    return found


def spread_stages(cfg: Config) -> Config:
    """A cascade whose box head is one dict gets three of them, each with the box coder and the overlap of its stage.

    So a file that inherits the configuration can change all heads at once: `roi_head=dict(bbox_head=dict(...))`.
    `stages` of the configuration has for each stage the least overlap with an object, and the standard deviations of a
    box's place and of its size.
    """
    head = cfg.model.get("roi_head") or {}
    if head.get("type") != "CascadeRoIHead" or not cfg.get("stages"):
        return cfg
    if isinstance(head.get("bbox_head"), dict):
        one = head.bbox_head
        heads = [copy.deepcopy(one) for _ in cfg.stages]
        for part, (_, place, size) in zip(heads, cfg.stages, strict=True):
            part.bbox_coder.target_stds = [place, place, size, size]
        head.bbox_head = heads
    rcnn = (cfg.model.get("train_cfg") or {}).get("rcnn")
    if isinstance(rcnn, dict):
        parts = [copy.deepcopy(rcnn) for _ in cfg.stages]
        for part, (overlap, _, _) in zip(parts, cfg.stages, strict=True):
            part.assigner.update(pos_iou_thr=overlap, neg_iou_thr=overlap, min_pos_iou=overlap)
        cfg.model.train_cfg.rcnn = parts
    return cfg


def build_segmentor(config: str | Path | Config, checkpoint: str | Path | None = None, fuse: str | None = None):
    """A segmentor in eval mode on the CPU; `model.cfg` is its configuration, `model.dataset_meta` its classes.

    Args:
        config: a file or a loaded configuration.
        checkpoint: its weights: of a runner, released, or fused by `wbmm reparam`; None leaves them random.
        fuse: `compact` or `dense` to fuse the backbone after loading.
    """
    require("seg")
    return build_mm_model(config, "mmseg", checkpoint, fuse)


def build_detector(config: str | Path | Config, checkpoint: str | Path | None = None, fuse: str | None = None):
    """A detector; as `build_segmentor`."""
    require("det")
    return build_mm_model(config, "mmdet", checkpoint, fuse)


def build_mm_model(
    config: str | Path | Config, scope: str, checkpoint: str | Path | None = None, fuse: str | None = None
) -> nn.Module:
    """`build_segmentor` and `build_detector` in one, for a scope of mmengine's."""
    use_safe_reader()
    cfg = load_mm_config(config)
    without_sync_bn(cfg.model)
    weights = None if checkpoint is None else _read_weights(checkpoint)
    if weights is not None and weights.signature is not None:
        cfg.model.backbone.form = weights.signature.form
    cfg.setdefault("default_scope", scope)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        model = MODELS.build(cfg.model)
    model.cfg = cfg
    if weights is not None:
        _load_strictly(model, weights.state_dict, checkpoint)
        model.dataset_meta = _meta_inside(weights)
    model.eval()
    return model if fuse is None else fuse_model(model, fuse)


def load_mm_config(config: str | Path | Config, options: dict | None = None, task: str = "segmentation") -> Config:
    """A copy of a configuration with `options` merged in; a file that cannot be read is a `ValueError`.

    A file such as `configs/ade20k/NAME.py` that is not in the current folder is taken from the package. Values
    `"$name"` are filled in.
    """
    if isinstance(config, Config):
        cfg = Config(config.to_dict(), filename=config.filename)
    else:
        path, changes = resolve_config(config, ".py", task)
        with bases_by_name():
            cfg = Config.fromfile(path)
        cfg.merge_from_dict(changes)
    known = {*cfg}
    try:
        cfg.merge_from_dict(options or {})
    except (TypeError, KeyError, AssertionError) as error:
        raise ValueError(f"--cfg-options cannot be applied to {config}: {error}") from None
    _check_options(cfg, known, cfg.filename)
    if "model" not in cfg:
        raise ValueError(f"{config}: no `model` in it; a configuration of a segmentor or detector has one")
    return spread_stages(fill_in(cfg))


@contextmanager
def settings_explained(cfg: Config) -> Iterator[None]:
    """Inside, a setting that a class does not take, or a class that no registry knows, is a `ValueError`."""
    try:
        yield
    except AssertionError as error:  # how the classes of mmseg and mmdet check their settings
        last = traceback.extract_tb(error.__traceback__)[-1]
        if last.name != "__init__":
            raise
        text = " ".join(str(error).split()) or last.line
        raise ValueError(f"{cfg.filename}: {Path(last.filename).stem} does not take its settings: {text}") from error
    except (TypeError, KeyError) as error:
        text = " ".join(str(error.args[0]).split()) if error.args else ""
        unexpected = re.search(r"unexpected keyword argument '(\w+)'", text)
        if unexpected is None and "registry" not in text:
            raise
        near = (
            difflib.get_close_matches(unexpected[1], sorted(_keys(cfg._cfg_dict) | USUAL_KEYS), n=2)
            if unexpected
            else []
        )
        near = [key for key in near if key != unexpected[1]]
        advice = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{cfg.filename}: {text}{advice}") from error


def _keys(config: object) -> set[str]:
    """Every key inside of a configuration."""
    parts = config.values() if isinstance(config, dict) else config if isinstance(config, list | tuple) else ()
    return {*(config if isinstance(config, dict) else ())}.union(*map(_keys, parts))


def without_sync_bn(config: object) -> object:
    """Replaces SyncBN by BN in a configuration, in place; the names of the weights are the same."""
    if isinstance(config, dict):
        if config.get("type") in _SYNC_BN:
            config["type"] = "BN"
        for value in config.values():
            without_sync_bn(value)
    elif isinstance(config, list | tuple):
        for value in config:
            without_sync_bn(value)
    return config


def _read_weights(path: str | Path) -> MMCheckpoint:
    contents = read_mm_checkpoint(path)
    try:
        return MMCheckpoint(contents)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _load_strictly(model: nn.Module, state_dict: dict[str, Tensor], name: str | Path) -> None:
    """Loads weights; every key must be there and fit, as mmengine's own loading does not ask."""
    reason = describe_misfit(model.state_dict(), state_dict)
    if reason:
        raise CheckpointError(f"{name} does not fit the configuration: {reason}")
    model.load_state_dict(state_dict)


def dataset_meta(model: nn.Module) -> dict:
    """Names (`classes`) and colours (`palette`) of a built model: its checkpoint's, or those of its test data."""
    if getattr(model, "dataset_meta", None):
        return model.dataset_meta
    dataset = (model.cfg.get("test_dataloader") or {}).get("dataset") or {}
    if dataset.get("metainfo"):
        return dataset["metainfo"]
    with DefaultScope.overwrite_default_scope(model.cfg.default_scope):
        registry = importlib.import_module(f"{model.cfg.default_scope}.registry")
        return getattr(registry.DATASETS.get(dataset.get("type", "")), "METAINFO", None) or {}


def _meta_inside(checkpoint: MMCheckpoint) -> dict | None:
    """Class names and colours inside a checkpoint; released files have them under older names."""
    older = {key.lower(): checkpoint.meta[key] for key in ("CLASSES", "PALETTE") if key in checkpoint.meta}
    return checkpoint.meta.get("dataset_meta") or older or None


def prepare_device(cfg: Config) -> str | None:
    """On a CPU: ordinary batch norms, gloo, and no device ids. Returns what was changed, None with CUDA.

    Several processes validate with the same statistics on either: the backbone's batch norms are not synchronised.
    The process group is opened here, since mmengine would ask CUDA for a device first.
    """
    launcher = cfg.get("launcher", "none")
    if launcher != "none":
        cfg.custom_hooks = [*cfg.get("custom_hooks", []), {"type": "BroadcastBuffersHook"}]
    if torch.cuda.is_available():
        return None
    without_sync_bn(cfg.model)
    text = "no CUDA device: SyncBN becomes BN"
    if launcher == "none":
        return text
    if launcher != "pytorch":
        raise ValueError(f"launcher {launcher!r} needs CUDA devices; on CPUs start the processes with torchrun")
    cfg.model_wrapper_cfg = {"type": "MMDistributedDataParallel", "device_ids": None, "broadcast_buffers": False}
    if not td.is_initialized():
        seconds = cfg.get("env_cfg", {}).get("dist_cfg", {}).get("timeout", 1800)
        td.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    return f"{text}, gloo between the {os.environ['WORLD_SIZE']} processes"

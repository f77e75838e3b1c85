"""Segmentors and detectors from a configuration and a checkpoint, on the packages and the device at hand."""

import importlib
import importlib.metadata
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as td
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope

from wbmm.config_files import resolve_config
from wbmm.models.fuse import fuse as fuse_model
from wbmm.models.state import CheckpointError, find_state_dict
from wbmm.text import printable

from .reparam import backbone_config, is_mm_checkpoint
from .resume import read_checkpoint, use_safe_reader

__all__ = [
    "build_detector",
    "build_model",
    "build_segmentor",
    "dataset_meta",
    "load_config",
    "load_strictly",
    "prepare_device",
    "require",
    "without_sync_bn",
]

_MODULES = {"seg": ("mmengine", "mmcv", "mmseg"), "det": ("mmengine", "mmcv", "mmdet")}
_TASKS = {"seg": "segmentation", "det": "detection"}


def require(extra: str) -> None:
    """Raises an `ImportError` that says what to install, unless the packages of an extra (`seg` or `det`) are there."""
    for name in _MODULES[extra]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            advice = MMCV_HELP if name == "mmcv" else f"in the checkout, pip install '.[{extra}]'"
            raise ImportError(f"{_TASKS[extra]} needs {name}, which cannot be imported ({error}): {advice}") from None
    if extra == "det":
        usable, detail = check_mmcv_ops()
        if not usable:
            raise ImportError(f"detection needs mmcv's operators: {detail}")


_SYNC_BN = ("SyncBN", "MMSyncBN", "NaiveSyncBN")


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


def prepare_device(cfg: Config) -> str | None:
    """On a CPU: ordinary batch norms, gloo, and no device ids. Returns what was changed, None with CUDA.

    The process group is opened here, since mmengine would ask CUDA for a device first.
    """
    if torch.cuda.is_available():
        return None
    without_sync_bn(cfg.model)
    text = "no CUDA device: SyncBN becomes BN"
    launcher = cfg.get("launcher", "none")
    if launcher == "none":
        return text
    if launcher != "pytorch":
        raise ValueError(f"launcher {launcher!r} needs CUDA devices; on CPUs start the processes with torchrun")
    cfg.model_wrapper_cfg = {"type": "MMDistributedDataParallel", "device_ids": None, "broadcast_buffers": False}
    cfg.custom_hooks = [*cfg.get("custom_hooks", []), {"type": "BroadcastBuffersHook"}]
    if not td.is_initialized():
        seconds = cfg.get("env_cfg", {}).get("dist_cfg", {}).get("timeout", 1800)
        td.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    return f"{text}, gloo between the {os.environ['WORLD_SIZE']} processes"


def build_segmentor(config: str | Path | Config, checkpoint: str | Path | None = None, fuse: str | None = None):
    """A segmentor in eval mode on the CPU; `model.cfg` is its configuration, `model.dataset_meta` its classes.

    Args:
        config: a file or a loaded configuration.
        checkpoint: its weights: of a runner, released, or fused by `wbmm reparam`; None leaves them random.
        fuse: `compact` or `dense` to fuse the backbone after loading.
    """
    require("seg")
    return build_model(config, "mmseg", checkpoint, fuse)


def build_detector(config: str | Path | Config, checkpoint: str | Path | None = None, fuse: str | None = None):
    """A detector; as `build_segmentor`."""
    require("det")
    return build_model(config, "mmdet", checkpoint, fuse)


def load_config(config: str | Path | Config, options: dict | None = None) -> Config:
    """A copy of a configuration with `options` merged in; a file that cannot be read is a `ValueError`."""
    if isinstance(config, Config):
        cfg = Config(config.to_dict(), filename=config.filename)
    else:
        path, changes = resolve_config(config, ".py")
        cfg = Config.fromfile(path)
        cfg.merge_from_dict(changes)
    try:
        cfg.merge_from_dict(options or {})
    except (TypeError, KeyError, AssertionError) as error:
        raise ValueError(f"--cfg-options cannot be applied to {config}: {error}") from None
    if "model" not in cfg:
        raise ValueError(f"{config}: no `model` in it; a configuration of a segmentor or detector has one")
    return cfg


def build_model(
    config: str | Path | Config, scope: str, checkpoint: str | Path | None = None, fuse: str | None = None
) -> nn.Module:
    """`build_segmentor` and `build_detector` in one, for a scope of mmengine's."""
    use_safe_reader()
    cfg = load_config(config)
    without_sync_bn(cfg.model)
    contents = None if checkpoint is None else read_checkpoint(checkpoint)
    if contents is not None and is_mm_checkpoint(contents):
        cfg.model.backbone.form = backbone_config(contents)["form"]
    cfg.setdefault("default_scope", scope)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        model = MODELS.build(cfg.model)
    model.cfg = cfg
    if contents is not None:
        load_strictly(model, contents, checkpoint)
        model.dataset_meta = _dataset_meta(contents)
    model.eval()
    if fuse is not None:
        model = fuse_model(model, fuse)
    return model


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


def _dataset_meta(contents: dict) -> dict | None:
    """Class names and colours inside a checkpoint; released files have them under older names."""
    meta = contents.get("meta")
    if not isinstance(meta, dict):
        return None
    older = {key.lower(): meta[key] for key in ("CLASSES", "PALETTE") if key in meta}
    return meta.get("dataset_meta") or older or None


def load_strictly(model: nn.Module, contents: dict, name: str | Path) -> None:
    """Loads a checkpoint's weights; every key must be there and fit, as mmengine's own loading does not ask."""
    try:
        state_dict = find_state_dict(contents)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    own = model.state_dict()
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as error:
        shapes = [
            f"{printable(key)} is {tuple(value.shape)} in the file and {tuple(own[key].shape)} in the model"
            for key, value in state_dict.items()
            if key in own and own[key].shape != value.shape
        ]
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        reason = "; ".join(shapes[:3]) if shapes else printable(" ".join(lines), limit=600)
        raise CheckpointError(f"{name} does not fit the configuration: {reason}") from None


MMCV_HELP = (
    "build it with a C++ compiler at hand: pip install ninja 'setuptools<82' wheel, then "
    "pip install --no-build-isolation --force-reinstall --no-deps onedl-mmcv (docs/install.md)"
)


def check_mmcv_ops() -> tuple[bool, str]:
    """Whether mmcv has its compiled operators, and what to do if not."""
    try:
        importlib.import_module("mmcv")
    except Exception:
        return False, f"mmcv is not installed; {MMCV_HELP}"
    try:
        importlib.import_module("mmcv.ops")
    except Exception:
        return False, f"mmcv was built without its operators; detection needs them: {MMCV_HELP}"
    return True, "nms, roi_align and the others are there"

"""Segmentors and detectors from a configuration and a checkpoint, on the packages and the device at hand."""

import importlib
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as td
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from torch import Tensor

from wbmm.config_files import resolve_config
from wbmm.models.fuse import fuse as fuse_model
from wbmm.models.state import CheckpointError

from . import register, require  # noqa: F401  (registers the backbones)
from .loading import describe_misfit, use_safe_reader
from .mm_checkpoint import MMCheckpoint, read_mm_checkpoint
from .variables import bases_by_name, fill_in, spread_stages

__all__ = [
    "build_detector",
    "build_mm_model",
    "build_segmentor",
    "dataset_meta",
    "load_mm_config",
    "prepare_device",
    "without_sync_bn",
]

_SYNC_BN = ("SyncBN", "MMSyncBN", "NaiveSyncBN")


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
    `"$name"` are filled in: see `variables.py`.
    """
    if isinstance(config, Config):
        cfg = Config(config.to_dict(), filename=config.filename)
    else:
        path, changes = resolve_config(config, ".py", task)
        with bases_by_name():
            cfg = Config.fromfile(path)
        cfg.merge_from_dict(changes)
    try:
        cfg.merge_from_dict(options or {})
    except (TypeError, KeyError, AssertionError) as error:
        raise ValueError(f"--cfg-options cannot be applied to {config}: {error}") from None
    if "model" not in cfg:
        raise ValueError(f"{config}: no `model` in it; a configuration of a segmentor or detector has one")
    return spread_stages(fill_in(cfg))


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

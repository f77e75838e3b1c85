"""Segmentors and detectors from a configuration and a checkpoint, ready for inference or export."""

import importlib
from pathlib import Path

import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope

from wbmm.checkpoint import CheckpointError, find_state_dict
from wbmm.deploy.fuse import fuse as fuse_model
from wbmm.text import printable

from . import register  # noqa: F401  (makes our classes known)
from .checkpoint import backbone_config, is_mm_checkpoint
from .device import without_sync_bn
from .require import require
from .safety import close_doors, read_checkpoint

__all__ = ["build_detector", "build_model", "build_segmentor", "dataset_meta", "load_config", "load_strictly"]


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
    elif not Path(config).is_file():
        raise ValueError(f"{config}: there is no such configuration file")
    else:
        cfg = Config.fromfile(config)
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
    close_doors()
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

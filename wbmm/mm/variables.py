"""Configurations whose parts follow a few variables, and that find their base files by `wbmm::NAME`.

A value `"$name"` is the variable `name` of the finished configuration, whichever file or `--cfg-options` sets it;
`"$name.2"` is an entry of it. mmengine itself would take the value that the base file had. Some variables follow from
others: see `derived_variables`.
"""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from mmengine.config import Config

from wbmm.config_files import find_config
from wbmm.zoo import load_zoo

from .backbone import timm_channels
from .pictures import class_colours

__all__ = ["bases_by_name", "derived_variables", "fill_in", "spread_stages"]

PACKAGE = "wbmm::"
REFERENCE = re.compile(r"\$([A-Za-z_]\w*)(?:\.(\d+))?")
DEEPEST = 10  # variables that are other variables


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
    if not any(REFERENCE.fullmatch(text) for text in _texts(cfg._cfg_dict)):
        return cfg
    variables = {**derived_variables(cfg), **{key: cfg[key] for key in cfg}}
    for key in list(cfg):
        cfg[key] = _filled(cfg[key], variables, str(cfg.filename), DEEPEST)
    return cfg


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
    `persistent_workers` from `workers`; `val_json_path` from `data_root` and `val_json`; `init_cfg` of the
    backbone from `init` and `resize_tables`.
    """
    found = {"persistent_workers": bool(cfg.get("workers")), "init_cfg": None}
    if cfg.get("init"):
        found["init_cfg"] = {"type": "Pretrained", "checkpoint": cfg.init}
        found["init_cfg"] |= {"resize_tables": True} if cfg.get("resize_tables") else {}
    if cfg.get("val_json"):
        found["val_json_path"] = str(Path(cfg.data_root, cfg.val_json))
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

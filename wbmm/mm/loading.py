"""What a run starts from: checked before training, and read for mmengine by the safe reader alone.

mmengine's own loader falls back to an unsafe load, and its `resume` runs a configuration found in the file.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import torch.nn as nn
from mmengine.config import Config
from mmengine.runner import CheckpointLoader
from torch import Tensor

from wbmm.models.state import CheckpointError, convert_released, find_state_dict, identify
from wbmm.text import printable, some

from .backbone import TimmBackbone, WBMMBackbone
from .mm_checkpoint import PREFIX, MMCheckpoint, read_mm_checkpoint
from .pretrained import fetch

__all__ = [
    "check_channels",
    "check_fits",
    "check_load_from",
    "describe_misfit",
    "find_checkpoints",
    "prepare_resume",
    "use_safe_reader",
]

CLASSIFIERS = {"conv_seg", "fc_cls", "fc_reg", "conv_logits"}  # layers that are new with another number of classes
_NEEDED = ("meta", "state_dict", "optimizer", "param_schedulers", "message_hub")
# Contents by file name, from when they are checked until mmengine asks for them: a file is read once.
_checked: dict[str, dict] = {}


def use_safe_reader() -> None:
    """From here on, mmengine reads checkpoints of this process with our reader alone, wherever they come from."""
    for scheme in list(CheckpointLoader._schemes):
        local = scheme == ""
        web = re.match(scheme, "https://x") is not None or re.match(scheme, "http://x") is not None
        loader = _load_from_checked_file if local or web else _load_from_nowhere
        CheckpointLoader.register_scheme(prefixes=scheme, loader=loader, force=True)


# mmengine logs the part of these names after `load_from_`.
def _load_from_checked_file(filename: str, map_location=None) -> dict:
    contents = _checked.pop(filename, None)
    return read_mm_checkpoint(fetch(filename)) if contents is None else contents


def _load_from_nowhere(filename: str, map_location=None) -> dict:
    raise CheckpointError(
        f"{filename}: checkpoints are read from files and http(s) only; download it and give its path"
    )


def prepare_resume(cfg: Config, resume: str | None) -> str | None:
    """Sets a configuration up to continue from a checkpoint; says from which, None for a run that starts.

    Args:
        cfg: changed in place.
        resume: None to start, `auto` for the newest readable checkpoint of the work folder (if any), or a file.
    """
    cfg.resume = False
    existing = find_checkpoints(cfg.work_dir)
    if resume is None:
        if existing:
            raise ValueError(
                f"{cfg.work_dir} already holds {existing[0].name} of a run: continue it with --resume, or choose "
                "another --work-dir"
            )
        return None
    texts = []
    for path in existing if resume == "auto" else [Path(resume)]:
        try:
            contents = _read_run(path)
        except CheckpointError as error:
            if resume != "auto":
                raise
            texts.append(f"passed over: {error}")
            continue
        cfg.resume, cfg.load_from = True, str(path)
        _checked[cfg.load_from] = contents
        if "seed" in contents["meta"]:  # of the order of the images, which is made before mmengine resumes
            cfg.randomness = {**cfg.get("randomness", {}), "seed": contents["meta"]["seed"]}
        if "init_cfg" in cfg.model.backbone:
            cfg.model.backbone.init_cfg = None  # the run's own weights follow
        return "; ".join([*texts, f"resuming from {path}, iteration {contents['meta']['iter']}"])
    return "; ".join([*texts, f"no checkpoint in {cfg.work_dir}: the run starts"])


def find_checkpoints(work_dir: str | Path) -> list[Path]:
    """Checkpoints of a run, the newest first."""
    found = []
    for path in Path(work_dir).glob("*.pth"):
        match = re.fullmatch(r"(?:iter|epoch)_(\d+)\.pth", path.name)
        if match:
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found, reverse=True)]


def _read_run(path: Path) -> dict:
    contents = read_mm_checkpoint(path)
    missing = [key for key in _NEEDED if key not in contents]
    if missing:
        raise CheckpointError(f"{path}: no checkpoint of a run that could continue; it has no {missing[0]}")
    return contents


def check_load_from(source: str) -> None:
    """Raises unless a file holds weights that training can start from; mmengine's own loading would say nothing."""
    if not source.startswith(("http://", "https://")) and not Path(source).expanduser().is_file():
        raise CheckpointError(f"load_from is {source}: there is no such file; name a checkpoint, or an http(s) URL")
    contents = read_mm_checkpoint(fetch(source))
    try:
        checkpoint = MMCheckpoint(contents)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None
    _check_startable(checkpoint, source)
    _checked[source] = {**contents, "state_dict": checkpoint.state_dict}


def check_fits(model: nn.Module, source: str, resume: bool) -> None:
    """Raises unless a checked file is of this model: mmengine would leave out what does not fit, and say little.

    Args:
        model: that will be trained.
        source: the file, of `prepare_resume` or `check_load_from`.
        resume: everything must fit; otherwise the layers that give classes may be of another shape, or missing.
    """
    try:
        given = find_state_dict(_checked[source])
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None
    reason = describe_misfit(model.state_dict(), given, set() if resume else CLASSIFIERS)
    if reason:
        advice = "" if resume else "; to start its backbone alone, name the file in model.backbone.init_cfg.checkpoint"
        raise CheckpointError(f"{source} does not fit the configuration: {reason}{advice}")


def check_channels(model: nn.Module) -> None:
    """Raises if the neck or a head takes other channels than a backbone of ours gives; the first batch would fail."""
    if not isinstance(model.backbone, WBMMBackbone | TimmBackbone):
        return
    given = [getattr(model.backbone, f"norm{i}").weight.numel() for i in model.backbone.out_indices]
    neck = getattr(model, "neck", None)
    parts = [("neck", neck, given)] if neck is not None else []
    for name in ("decode_head", "auxiliary_head") if neck is None else ():
        heads = getattr(model, name, None)
        for head in heads if isinstance(heads, nn.ModuleList) else [heads]:
            places = getattr(head, "in_index", [])
            maps = [given[i] for i in (places if isinstance(places, Sequence) else [places]) if i < len(given)]
            parts.append((name, head, [sum(maps)] if getattr(head, "input_transform", "") == "resize_concat" else maps))
    for name, part, maps in parts:
        taken = getattr(part, "in_channels", maps)
        if (list(taken) if isinstance(taken, Sequence) else [taken]) != maps:
            raise ValueError(f"model.{name}.in_channels is {taken}, but the backbone gives {maps}: set it to that")


def describe_misfit(own: dict[str, Tensor], given: dict[str, Tensor], free: Collection[str] = ()) -> str:
    """What of a file does not fit a model; empty if all does.

    Args:
        own: state dict of the model.
        given: state dict of the file.
        free: names of layers that need not fit.
    """
    own, given = (
        {key: value for key, value in part.items() if not set(free) & set(key.split("."))} for part in (own, given)
    )
    shapes = [
        f"{printable(key)} is {tuple(value.shape)} in the file and {tuple(own[key].shape)} in the model"
        for key, value in given.items()
        if key in own and own[key].shape != value.shape
    ]
    if shapes:
        return "; ".join(shapes[:3])
    texts = []
    for keys, text in ((own.keys() - given.keys(), "not in the file"), (given.keys() - own.keys(), "not in the model")):
        if keys:
            texts.append(f"{text}: {some(sorted(keys))}")
    return "; ".join(texts)


def _check_startable(checkpoint: MMCheckpoint, source: str) -> None:
    if checkpoint.signature is not None:
        form = checkpoint.signature.form
        if form != "training":
            raise CheckpointError(
                f"{source}: its backbone is fused ({form} form), from which no training can start; give load_from the "
                "training checkpoint that it was made from"
            )
        return
    if identify(convert_released(checkpoint.stored)) is not None:
        raise CheckpointError(
            f"{source}: a classifier's weights, not a segmentor's or detector's; start the backbone from them with "
            "model.backbone.init_cfg.checkpoint"
        )
    if not any(key.startswith(PREFIX) for key in checkpoint.stored):
        raise CheckpointError(
            f"{source}: no key starts with {PREFIX!r}; the first is {printable(next(iter(checkpoint.stored)))!r}"
        )

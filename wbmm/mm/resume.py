"""Continuing a run of mmengine's: which checkpoint, and what of the configuration follows from it."""

import re
from pathlib import Path

from mmengine.config import Config

from wbmm.checkpoint import CheckpointError, find_state_dict, identify
from wbmm.models.released import convert_released
from wbmm.text import printable

from .checkpoint import PREFIX, backbone_config, is_mm_checkpoint
from .safety import read_checkpoint

__all__ = ["check_load_from", "find_checkpoints", "prepare_resume"]

_NEEDED = ("meta", "state_dict", "optimizer", "param_schedulers", "message_hub")


def find_checkpoints(work_dir: str | Path) -> list[Path]:
    """Checkpoints of a run, the newest first."""
    found = []
    for path in Path(work_dir).glob("*.pth"):
        match = re.fullmatch(r"(?:iter|epoch)_(\d+)\.pth", path.name)
        if match:
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found, reverse=True)]


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
        if "seed" in contents["meta"]:  # of the order of the images, which is made before mmengine resumes
            cfg.randomness = {**cfg.get("randomness", {}), "seed": contents["meta"]["seed"]}
        if "init_cfg" in cfg.model.backbone:
            cfg.model.backbone.init_cfg = None  # the run's own weights follow
        return "; ".join([*texts, f"resuming from {path}, iteration {contents['meta']['iter']}"])
    return "; ".join([*texts, f"no checkpoint in {cfg.work_dir}: the run starts"])


def _read_run(path: Path) -> dict:
    contents = read_checkpoint(path)
    missing = [key for key in _NEEDED if key not in contents]
    if missing:
        raise CheckpointError(f"{path}: no checkpoint of a run that could continue; it has no {missing[0]}")
    return contents


def check_load_from(path: str) -> None:
    """Raises unless a file holds weights that training can start from; mmengine's own loading would say nothing."""
    contents = read_checkpoint(path)
    if is_mm_checkpoint(contents):
        form = backbone_config(contents)["form"]
        if form != "training":
            raise CheckpointError(
                f"{path}: its backbone is fused ({form} form), from which no training can start; give load_from the "
                "training checkpoint that it was made from"
            )
        return
    state_dict = convert_released(find_state_dict(contents))
    if identify(state_dict) is not None:
        raise CheckpointError(
            f"{path}: a classifier's weights, not a segmentor's or detector's; start the backbone from them with "
            "model.backbone.init_cfg.checkpoint"
        )
    if not any(key.startswith(PREFIX) for key in state_dict):
        raise CheckpointError(
            f"{path}: no key starts with {PREFIX!r}; the first is {printable(next(iter(state_dict)))!r}"
        )

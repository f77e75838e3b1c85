"""What mmengine loads: by the safe reader alone, and what of a configuration follows from the checkpoint.

mmengine's own loader falls back to an unsafe load, and its `resume` runs a configuration found in the file.
"""

import os
import re
from pathlib import Path

from mmengine.config import Config
from mmengine.runner import CheckpointLoader

from wbmm.io.reader import safe_load
from wbmm.models.identify import identify
from wbmm.models.released import convert_released
from wbmm.models.state import CheckpointError, find_state_dict
from wbmm.text import printable

from .pretrained import fetch
from .reparam import PREFIX, backbone_config, is_mm_checkpoint

__all__ = ["check_load_from", "find_checkpoints", "prepare_resume", "read_checkpoint", "use_safe_reader"]


def use_safe_reader() -> None:
    """From here on, mmengine reads checkpoints of this process with our reader alone, wherever they come from."""
    for scheme in list(CheckpointLoader._schemes):
        local = scheme == ""
        web = re.match(scheme, "https://x") is not None or re.match(scheme, "http://x") is not None
        loader = _load_from_checked_file if local or web else _load_from_nowhere
        CheckpointLoader.register_scheme(prefixes=scheme, loader=loader, force=True)


def read_checkpoint(path: str | os.PathLike) -> dict:
    """The contents of a segmentor's or detector's checkpoint, on the CPU, as plain data."""
    contents = safe_load(os.path.expanduser(path))
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path}: holds a {type(contents).__name__}, not a checkpoint")
    if isinstance(contents.get("meta"), dict):
        contents["meta"].pop("config", None)  # Python that mmengine's resume would run
    return contents


# mmengine logs the part of these names after `load_from_`.
def _load_from_checked_file(filename: str, map_location=None) -> dict:
    return read_checkpoint(fetch(filename))


def _load_from_nowhere(filename: str, map_location=None) -> dict:
    raise CheckpointError(
        f"{filename}: checkpoints are read from files and http(s) only; download it and give its path"
    )


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

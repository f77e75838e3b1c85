"""One reader for every checkpoint that mmengine loads, which never runs what is in it.

mmengine's own loader falls back to an unsafe load, and its `resume` runs a configuration found in the file.
"""

import os
import re

from mmengine.runner import CheckpointLoader

from wbmm.checkpoint import CheckpointError, safe_load

from .pretrained import fetch

__all__ = ["close_doors", "read_checkpoint"]


def close_doors() -> None:
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

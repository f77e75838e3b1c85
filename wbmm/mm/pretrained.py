"""Starting weights of a backbone: where they come from, what of them fits, and what is said about it."""

import hashlib
import logging
import re
import shutil
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.nn as nn
from timm.models._hub import download_from_hf
from torch import Tensor

from wbmm.io.atomic import replacing
from wbmm.io.digest import mapped
from wbmm.io.files import load_weights
from wbmm.io.reader import safe_load
from wbmm.models.hub import local_weights
from wbmm.models.state import CheckpointError, Signature, convert_released, explain_mismatch, find_state_dict, identify
from wbmm.text import first_line, printable, some
from wbmm.zoo import load_zoo, weights_folder

__all__ = ["LEAST_MATCH", "fetch", "load_pretrained", "match_report", "read_weights"]

LEAST_MATCH = 0.9  # of the backbone's own tensors; below, the file is taken for another model's
TIMEOUT_S = 30  # of a server that says nothing
_OUTPUT_NORM = re.compile(r"norm[0-3]\.(weight|bias)")
_logger = logging.getLogger(__name__)


def fetch(source: str) -> Path:
    """A local file: the one named, or one downloaded once from a URL or from the hub.

    A download is compared with the zoo's checksum of a file of that name. If it has none, a warning names the host.

    Args:
        source: a path, an http(s) URL, or a model with published weights, such as `wbmm_t_dense` (or with the tag of
            its weights, `wbmm_t_dense.in1k`).
    """
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if (local := local_weights(source)) is not None:
        return local
    name, _, tag = source.partition(".")
    zoo = load_zoo()
    try:
        if source.startswith(("http://", "https://")):
            return _download(source)
        if name in zoo and (zoo[name].weights if not tag else tag in zoo[name].weights):
            weights = zoo[name].weights[tag or next(iter(zoo[name].weights))]
            if "local" in weights:
                raise CheckpointError(f"{source}: its weights should be in {weights_folder() / weights['local']}")
            path = Path(download_from_hf(weights["hub"], weights["file"]))
            _compare(source, path, weights["file"])
            return path
    except CheckpointError:
        raise
    except Exception as error:  # whatever the network and its libraries raise
        raise CheckpointError(
            f"{source}: could not be downloaded ({first_line(error)}); give a local file instead"
        ) from None
    published = ", ".join(model for model, entry in zoo.items() if entry.weights)
    raise CheckpointError(
        f"{source}: there is no such file, and no weights of that name are published (those of {published} are). "
        "Train them first, or name another file with --cfg-options model.backbone.init_cfg.checkpoint=FILE"
    )


def _download(url: str) -> Path:
    """The file of an http(s) address, from torch's cache if it was downloaded before; whole, or not at all."""
    parts = urlsplit(url)
    name = re.sub(r"[^\w.-]", "_", Path(parts.path).name)[-100:]
    target = Path(torch.hub.get_dir()) / "checkpoints" / f"{hashlib.sha256(url.encode()).hexdigest()[:12]}-{name}"
    if target.is_file():
        _compare(url, target, name)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    request = urllib.request.Request(url, headers={"User-Agent": "wbmm"})
    with replacing(target) as temporary:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response, open(temporary, "wb") as file:
            length = response.headers.get("Content-Length")
            shutil.copyfileobj(response, file)
        size = temporary.stat().st_size
        if length is not None and size != int(length):
            raise OSError(f"{size} of {length} bytes came")
        if not _compare(url, temporary, name):
            _logger.warning(
                "%s: no checksum is known for this file, so it is whatever %s has sent", url, parts.hostname
            )
    return target


def _compare(source: str, path: Path, name: str) -> bool:
    """Whether the zoo knows the checksum of a file of this name; a `CheckpointError` if it is another one."""
    weights = [entry for model in load_zoo().values() for entry in model.weights.values()]
    known = next((entry["sha256"] for entry in weights if entry.get("file") == name and "sha256" in entry), None)
    if known is None:
        return False
    with mapped(path) as data:
        found = hashlib.sha256(data).hexdigest()
    if found != known:
        raise CheckpointError(
            f"{source}: its SHA-256 is {found[:16]}..., and {known[:16]}... of the published {name}: not used"
        )
    return True


def load_pretrained(
    backbone: nn.Module, checkpoint: str, prefix: str | None = None, resize_tables: bool = False
) -> str:
    """Loads weights into a backbone and says what matched; too little is a `CheckpointError`.

    Args:
        backbone: in training form.
        checkpoint: as in `fetch`: ours, a released one, or a segmentor's or detector's.
        prefix: what stands before the backbone's names; found by itself for `backbone.`.
        resize_tables: interpolate tables whose window differs.
    """
    path = fetch(checkpoint)
    state_dict = read_weights(path, prefix)
    own = {key: value for key, value in backbone.state_dict().items() if not key.endswith("num_batches_tracked")}
    needed = [key for key in own if not _OUTPUT_NORM.fullmatch(key)]
    present = [key for key in own if key in state_dict]
    matched = [key for key in present if _fits(key, state_dict[key], own[key], resize_tables)]
    share = len(set(matched) & set(needed)) / len(needed)
    seen = identify(state_dict)
    if share < LEAST_MATCH or len(matched) < len(present) or (seen is not None and seen.form != "training"):
        reason = explain_mismatch(backbone, state_dict)
        raise CheckpointError(
            f"{path}: {len(matched)} of the backbone's {len(own)} tensors match; {LEAST_MATCH:.0%} must, and none "
            f"may be of another shape{_first_odd(present, matched, state_dict, own)}. "
            f"{reason}{_settings(seen, reason)}"
        )
    interpolated = {key for key in own if resize_tables and key.endswith("local_table")}  # from zero, where missing
    fresh = {k: v for k, v in backbone.state_dict().items() if k not in matched and k not in interpolated}
    load_weights(backbone, {**{key: state_dict[key] for key in matched}, **fresh}, resize_tables=resize_tables)
    return match_report(path, matched, own, state_dict)


def _first_odd(present: list[str], matched: list[str], given: dict[str, Tensor], own: dict[str, Tensor]) -> str:
    key = next((key for key in present if key not in matched), None)
    if key is None:
        return ""
    return f" ({key} is {tuple(given[key].shape)} in the file and {tuple(own[key].shape)} in the backbone)"


def _settings(seen: Signature | None, reason: str) -> str:
    """What to set in a configuration, where one of two things would help."""
    names = seen.names() if seen is not None and seen.form == "training" else []
    ways = [f"model.backbone.arch={names[0]!r}"] if names else []
    ways += ["model.backbone.init_cfg.resize_tables=True"] if "resize_tables=True" in reason else []
    return f"\nIn a configuration: {', or '.join(ways)}." if ways else ""


def read_weights(path: Path, prefix: str | None) -> dict[str, Tensor]:
    """The backbone's part of a file, in our names."""
    try:
        state_dict = find_state_dict(safe_load(path))
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(str(path)) else f"{path}: {text}") from None
    if prefix is None:
        prefix = "backbone." if any(key.startswith("backbone.") for key in state_dict) else ""
    prefix = prefix if not prefix or prefix.endswith(".") else f"{prefix}."
    inner = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
    if not inner:
        raise CheckpointError(
            f"{path}: no key starts with {prefix!r}; the first is {printable(next(iter(state_dict)))!r}"
        )
    return convert_released(inner)


def _fits(key: str, value: Tensor, own: Tensor, resize_tables: bool) -> bool:
    return value.shape == own.shape or (resize_tables and key.endswith("table") and value.shape[0] == own.shape[0])


def match_report(path: Path, matched: list[str], own: dict[str, Tensor], state_dict: dict[str, Tensor]) -> str:
    missing = [key for key in own if key not in matched]
    unexpected = [key for key in state_dict if key not in own and not key.endswith("num_batches_tracked")]
    lines = [f"the backbone starts from {path}: {len(matched)} of {len(own)} tensors match"]
    if missing:
        lines.append(f"  not in the file, and new: {some(missing, 8)}")
    if unexpected:
        lines.append(f"  in the file and not used: {some(unexpected, 8)}")
    return "\n".join(lines)

"""Weights by name: files that come with the project, and published ones, fetched once; one line if that fails."""

import logging
import urllib.request
from pathlib import Path

import timm
from huggingface_hub import hf_hub_url, try_to_load_from_cache
from timm.models._hub import download_from_hf

from wbmm.text import first_line
from wbmm.zoo import load_zoo, weights_folder

from .state import CheckpointError

__all__ = ["fetch_weights", "local_weights", "published_weights"]

TIMEOUT_S = 10
TIMM_FILE = "model.safetensors"  # of timm's own models on the hub
_logger = logging.getLogger(__name__)


def published_weights(name: str) -> Path | None:
    """The file of a model's published weights, downloaded if need be; None if none are published.

    A file that comes with the project is preferred: it needs no network.

    Args:
        name: a model of ours or of timm's, with or without the tag of its weights: `wbmm_t`, `wbmm_t.in1k`.
    """
    if (local := local_weights(name)) is not None:
        return local
    model, _, tag = name.partition(".")
    if model not in load_zoo():
        return _timm_weights(name)
    weights = {key: source for key, source in load_zoo()[model].weights.items() if "hub" in source}
    if not weights or (tag and tag not in weights):
        return None
    source = weights[tag or next(iter(weights))]
    return fetch_weights(model, source["hub"], source["file"])


def local_weights(name: str) -> Path | None:
    """The file of a model's weights that comes with the project; None if there is none.

    Args:
        name: with the tag of its weights, `wbmm_a.tiny50`, or without, which means the first that there are.
    """
    model, _, tag = name.partition(".")
    weights = load_zoo()[model].weights if model in load_zoo() else {}
    files = (
        weights_folder() / weights[key]["local"] for key in weights if key == (tag or key) and "local" in weights[key]
    )
    return next((file for file in files if file.is_file()), None)


def _timm_weights(name: str) -> Path | None:
    cfg = timm.get_pretrained_cfg(name)
    if cfg is None or not cfg.hf_hub_id or cfg.custom_load:
        return None
    return fetch_weights(name, cfg.hf_hub_id, cfg.hf_hub_filename or TIMM_FILE)


def fetch_weights(model: str, hub: str, file: str) -> Path:
    """A file of the hub: from its cache, or else from the network, which is asked twice."""
    cached = try_to_load_from_cache(hub, file)
    if isinstance(cached, str):
        return Path(cached)
    address = hf_hub_url(hub, file)
    for attempt in (1, 2):
        try:
            _reach(address)
            return Path(download_from_hf(hub, file))
        except Exception as error:  # whatever the network and its libraries raise
            reason = first_line(error)
            if attempt == 1:
                _logger.info("%s: %s; trying once more", model, reason)
    raise CheckpointError(
        f"{model}: its weights could not be downloaded ({reason}). Fetch {address} by other means and name the file: "
        "to a command in place of the model, to `wbmm train` as --init FILE, in Python "
        f'timm.create_model("{model}", pretrained=True, pretrained_cfg_overlay=dict(file="{file}"))'
    )


def _reach(address: str) -> None:
    """Raises soon if there is no network: the hub's library would try for half a minute, with a line each time."""
    request = urllib.request.Request(address, method="HEAD", headers={"User-Agent": "wbmm"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S):
        pass

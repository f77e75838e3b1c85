"""The weights that a run on one's own pictures starts from: a file, published ones, or none."""

from dataclasses import dataclass
from pathlib import Path

import timm

import wbmm.models  # noqa: F401  (registers them)
from wbmm.io.card import ModelCard, read_card
from wbmm.io.files import run_checkpoint
from wbmm.io.reader import read_checkpoint
from wbmm.models.hub import local_weights, published_weights
from wbmm.models.state import CheckpointError

__all__ = ["MODEL", "SCRATCH", "Start", "check_name", "find_start"]

MODEL = "wbmm_t"
SCRATCH = "scratch"  # --init scratch: no weights, though there may be some


@dataclass
class Start:
    """The weights that a run starts from.

    Attributes:
        file: None for a start from scratch.
        why: in a few words.
        card: what the file says of its model, if it says anything.
        note: a sentence about what is missing.
    """

    file: Path | None
    why: str
    card: ModelCard | None = None
    note: str = ""


def find_start(model: str | None, init: str | None) -> Start:
    """Looks for weights.

    Args:
        model: a name that timm knows, with or without the tag of its weights; `MODEL` if None.
        init: a file or a run's folder; `SCRATCH` for none; None for those that are published, if they can be reached.
    """
    if init == SCRATCH:
        return Start(None, "as given")
    if init is not None:
        return _given_start(run_checkpoint(init), model)
    model = model or MODEL
    check_name(model)
    scratch = "so it starts from scratch, which needs more pictures and epochs than fine-tuning"
    try:
        file = published_weights(model)
    except CheckpointError as error:
        return Start(None, "see below", note=f"{error}, or --init FILE. Until then it starts from scratch.")
    if file is None:
        note = f"No weights are published for {model}, {scratch}; --init FILE starts from others."
        return Start(None, "see below", note=note)
    why = "comes with the project" if file == local_weights(model) else "published for this model"
    return Start(file, why, read_card(read_checkpoint(file)))


def _given_start(file: Path, model: str | None) -> Start:
    if not file.is_file():
        raise ValueError(f"--init {file}: there is no such file (or give the folder of a run, or {SCRATCH})")
    card = read_card(read_checkpoint(file))
    if card and model and model.partition(".")[0] != card.model:
        raise ValueError(f"--init {file} has the weights of {card.model}, not of {model}: leave --model out")
    return Start(file, "as given", card)


def check_name(name: str) -> None:
    """Raises unless timm knows a model, and weights, of that name."""
    if not timm.is_model(name):
        raise ValueError(f"--model {name}: neither ours nor timm's; `wbmm list` shows ours")
    if "." in name and name not in timm.list_models(f"{name.partition('.')[0]}.*", pretrained=True):
        raise ValueError(f"--model {name}: timm knows no weights of that name for {name.partition('.')[0]}")

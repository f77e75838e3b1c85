"""Model files: any checkpoint to a model ready for inference, and a model to a file that describes itself."""

import hashlib
import io
import logging
from pathlib import Path

import timm
import torch
import torch.nn as nn
from safetensors.torch import save
from torch import Tensor

from wbmm.models.fuse import fuse
from wbmm.models.released import convert_released
from wbmm.models.state import CheckpointError, find_state_dict

from .atomic import atomic_path
from .card import ModelCard, card_of, check_args, check_model_name, check_timm_name, read_card, recognise
from .digest import DIGEST_KEY, digest
from .reader import METADATA_KEY, CheckpointFile, read_checkpoint
from .weights import load_converted

__all__ = [
    "SUFFIXES",
    "build_from_card",
    "describe_source",
    "file_size",
    "load_model",
    "open_checkpoint",
    "save_model",
    "write_weights",
]

SUFFIXES = (".safetensors", ".pth", ".pt")
SPARE_ELEMENTS = 1_000_000  # a small model in training form beside its fused file
_logger = logging.getLogger(__name__)


def load_model(path: str | Path, model: str | None = None, ema: bool = True, args: dict | None = None) -> nn.Module:
    """A model from any checkpoint file, in eval mode and float32; `model.card` says what it is.

    Args:
        path: our training checkpoint, a file of `save_model` or `wbmm reparam`, a released one; pth or safetensors.
        model: its name, where the file does not tell (or to insist on one).
        ema: the moving average of the weights, where the file has one.
        args: keyword arguments of `timm.create_model`, where the file does not tell.
    """
    net, card = open_checkpoint(path, model, ema, args)
    _logger.info("%s: %s", path, card.describe())
    net.card = card
    return net


def open_checkpoint(
    path: str | Path,
    model: str | None = None,
    ema: bool = True,
    args: dict | None = None,
    file: CheckpointFile | None = None,
) -> tuple[nn.Module, ModelCard]:
    """The model and what its file says, or a `CheckpointError` with what was seen.

    Args:
        path, model, ema, args: as of `load_model`.
        file: what `read_checkpoint` gave, where the file has been read already.
    """
    path = Path(path)
    file = file or read_checkpoint(path)
    try:
        card = read_card(file)
        state_dict = convert_released(find_state_dict(file.contents, ema))
        if card:
            check_args({key: value for key, value in card.args.items() if key not in (args or {})})
            check_model_name(card, model)
            card = card.replace(args={**card.args, **(args or {})})
        else:
            card = recognise(state_dict, model, args)
        dtypes = {value.dtype for value in state_dict.values() if value.is_floating_point()}
        card = card.replace(dtype=str(next(iter(dtypes))).removeprefix("torch.") if len(dtypes) == 1 else "float32")
        _check_claim(card, state_dict)
        net = build_from_card(card)
        load_converted(net, state_dict)
    except (ValueError, TypeError) as error:  # TypeError: an argument that the model does not take
        text = str(error)
        raise CheckpointError(text if text.startswith(str(path)) else f"{path}: {text}") from None
    return net, card


def build_from_card(card: ModelCard) -> nn.Module:
    """The model of a card, in its form, with weights yet to be loaded; in eval mode."""
    net = _create(card).eval()
    return net if card.form == "training" else fuse(net, card.form)


def _create(card: ModelCard) -> nn.Module:
    return timm.create_model(
        check_timm_name(card.model), num_classes=card.num_classes, in_chans=card.input_size[0], **card.args
    )


def _check_claim(card: ModelCard, state_dict: dict[str, Tensor]) -> None:
    """Raises if the model of a card is far larger than what the file holds, before memory is taken for it."""
    try:
        with torch.device("meta"):
            net = _create(card)
    except NotImplementedError:  # a model that computes with its weights while it is built
        return
    claimed = sum(value.numel() for value in net.state_dict().values())
    held = sum(value.numel() for value in state_dict.values())
    if claimed > 2 * held + SPARE_ELEMENTS:
        raise CheckpointError(
            f"its description, {card.describe()}, is of a model of {claimed / 1e6:.1f} million numbers; it holds "
            f"{held / 1e6:.1f} million"
        )


def save_model(model: nn.Module, path: str | Path, card: ModelCard | None = None, force: bool = False) -> Path:
    """Writes a model's weights with its description: `wbmm.load_model(path)` gives the same model back.

    Args:
        model: a model of timm's, in any form.
        path: ends with .safetensors, .pth or .pt; an existing file stays unless `force` is given.
        card: its description, where it cannot be told from the model.
    """
    return write_weights(model.state_dict(), card or card_of(model), path, force)


def write_weights(state_dict: dict[str, Tensor], card: ModelCard, path: str | Path, force: bool = False) -> Path:
    """Writes a state dict with its card, whole or not at all."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: a model file ends with one of {', '.join(SUFFIXES)}")
    tensors = {key: value.detach().cpu().contiguous() for key, value in state_dict.items()}
    description = {METADATA_KEY: card.to_json(), DIGEST_KEY: digest(tensors, card.to_json())}
    if path.suffix == ".safetensors":
        data = save(_unshared(tensors), metadata=description)
    else:
        data = to_pth({**description, "state_dict": tensors})
    with atomic_path(path, force) as temporary:
        temporary.write_bytes(data)
    return path


def to_pth(contents: dict) -> bytes:
    """The bytes of a .pth file. Not written by torch itself: on a full disk its writer ends the process."""
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    return buffer.getvalue()


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses tensors that share memory."""
    seen: set[int] = set()
    result = {}
    for key, value in tensors.items():
        result[key] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    return result


def _file_hash(path: str | Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def describe_source(path: str | Path) -> dict:
    """Name and SHA-256 of a file, for the card of what is made from it. Reads the whole file, as nothing else needs."""
    return {"file": Path(path).name, "sha256": _file_hash(path)}


def file_size(path: Path) -> int:
    """In bytes, an OpenVINO file with its weights."""
    weights = path.with_suffix(".bin")
    return path.stat().st_size + (weights.stat().st_size if path.suffix == ".xml" else 0)

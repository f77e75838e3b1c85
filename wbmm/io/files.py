"""Model files: any checkpoint to weights or to a model for inference, and a model to a file that describes itself."""

import hashlib
import io
import logging
import math
import re
from pathlib import Path

import timm
import torch
import torch.nn as nn
from safetensors.torch import save
from torch import Tensor

from wbmm.models.fuse import fuse
from wbmm.models.hub import local_weights
from wbmm.models.state import CheckpointError, check_finite, convert_released, find_state_dict, identify
from wbmm.ops import resize_table

from .atomic import atomic_path
from .card import ModelCard, card_of, check_args, check_model_name, check_timm_name, read_card, recognise
from .digest import DIGEST_KEY, digest
from .reader import METADATA_KEY, CheckpointFile, read_checkpoint, safe_load

__all__ = [
    "SUFFIXES",
    "build_from_card",
    "describe_source",
    "file_size",
    "load_converted",
    "load_model",
    "load_weights",
    "open_checkpoint",
    "read_state_dict",
    "round_weights",
    "run_checkpoint",
    "save_model",
    "with_own_classifier",
    "write_weights",
]

SUFFIXES = (".safetensors", ".pth", ".pt")
OF_A_RUN = ("best.pt", "last.pt")  # the first that its folder has
SPARE_ELEMENTS = 1_000_000  # a small model in training form beside its fused file
_logger = logging.getLogger(__name__)


def load_model(
    path: str | Path,
    model: str | None = None,
    ema: bool = True,
    args: dict | None = None,
    num_classes: int | None = None,
) -> nn.Module:
    """A model from any checkpoint file, in eval mode and float32; `model.card` says what it is.

    Args:
        path: our training checkpoint, a file of `save_model` or `wbmm reparam`, a released one, pth or safetensors; or
            the folder of a training run.
        model: its name, where the file does not tell (or to insist on one).
        ema: the moving average of the weights, where the file has one.
        args: keyword arguments of `timm.create_model`, where the file does not tell.
        num_classes: for fine-tuning on other classes: the model gets a new classifier of so many. If the file has as
            many, its own stays.
    """
    net, card = open_checkpoint(path, model, ema, args)
    if num_classes is not None and num_classes != card.num_classes:
        card = _replace_classifier(net, card, num_classes, path)
    _logger.info("%s: %s", path, card.describe())
    net.card = card
    return net


def _replace_classifier(net: nn.Module, card: ModelCard, num_classes: int, path: str | Path) -> ModelCard:
    if num_classes < 1:
        raise ValueError(f"num_classes {num_classes}: give 1 or more")
    if card.form != "training":
        raise CheckpointError(
            f"{path} is fused ({card.form} form), which cannot be trained on other classes: give the training form"
        )
    net.reset_classifier(num_classes)
    return card.replace(num_classes=num_classes, class_names=None, kind="classifier")


def run_checkpoint(path: str | Path) -> Path:
    """The file itself; the best checkpoint of a run, given its folder; or weights of the project by name and tag."""
    path = Path(path)
    if not path.is_dir():
        by_name = local_weights(str(path)) if "." in path.name and not path.exists() else None
        return by_name or path
    for name in OF_A_RUN:
        if (path / name).is_file():
            return path / name
    raise CheckpointError(f"{path} is a folder without {' or '.join(OF_A_RUN)}: give a file, or the folder of a run")


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
    path = run_checkpoint(path)
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


def read_state_dict(path: str | Path, ema: bool = True) -> dict[str, Tensor]:
    """The state dict of any checkpoint file, or of a run's folder, in our names."""
    path = run_checkpoint(path)
    try:
        return convert_released(find_state_dict(safe_load(path), ema))
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def load_weights(
    model: nn.Module,
    weights: str | Path | dict[str, Tensor],
    resize_tables: bool = False,
    ema: bool = True,
    new_classifier: bool = False,
) -> nn.Module:
    """Load a checkpoint into a model, strictly; returns the model.

    Args:
        model: a WBMM model, training form or fused.
        weights: a file (ours, released, .pth or .safetensors) or a state dict.
        resize_tables: interpolate tables whose window differs from the model's. The result is a starting point for
            fine-tuning, not the same function.
        ema: prefer an exponential moving average where the file has one.
        new_classifier: if the file's classifier is for another number of classes, or missing, keep the model's own, to
            be trained. Otherwise that is an error.
    """
    if isinstance(weights, dict):
        state_dict, where = convert_released(find_state_dict(weights, ema)), ""
    else:
        state_dict, where = read_state_dict(weights, ema), str(weights)
    if new_classifier:
        state_dict, _ = with_own_classifier(state_dict, model)
    return load_converted(model, state_dict, resize_tables, where=where)


def with_own_classifier(state_dict: dict[str, Tensor], model: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
    """A state dict with the model's own classifier where the file's has another number of classes, and its keys."""
    own, classifier = model.state_dict(), model.get_classifier()
    names = [name for name, module in model.named_modules() if module is classifier]
    fresh = [
        key
        for key in (f"{name}.{part}" for name in names for part in ("weight", "bias"))
        if key in own and (key not in state_dict or _has_other_classes(state_dict[key], own[key]))
    ]
    return state_dict | {key: own[key] for key in fresh}, fresh


def _has_other_classes(value: Tensor, own: Tensor) -> bool:
    return value.ndim == own.ndim and value.shape[1:] == own.shape[1:] and len(value) != len(own)


def load_converted(
    model: nn.Module, state_dict: dict[str, Tensor], resize_tables: bool = False, where: str = ""
) -> nn.Module:
    """`load_weights` for a state dict that has been found and is in our names; `where` names its file in errors."""
    try:
        check_finite(state_dict)
        if resize_tables:
            state_dict = _resize_tables(state_dict, model)
        _check_kinds(state_dict, model)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}" if where else str(error)) from None
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as error:
        raise CheckpointError(f"{where or 'the state dict'} does not fit the model. {_few_keys(error)}") from None
    return model


def _few_keys(error: RuntimeError) -> str:
    """PyTorch lists every key that is missing or not expected; three of them say as much."""

    def shorten(keys: re.Match) -> str:
        left_out = keys[2].count(", ")
        return f"{keys[1]} and {left_out} more"

    return re.sub(r'((?:"[^"]*", ){2}"[^"]*")((?:, "[^"]*")+)', shorten, str(error))


def round_weights(state_dict: dict[str, Tensor], dtype: torch.dtype, advice: str) -> dict[str, Tensor]:
    """The state dict with its floating-point tensors in a smaller type; if one would overflow, an error with advice."""
    rounded = {key: value.to(dtype) if value.is_floating_point() else value for key, value in state_dict.items()}
    lost = [key for key, value in rounded.items() if value.is_floating_point() and not value.isfinite().all()]
    if lost:
        most = torch.finfo(dtype).max
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(f"{lost[0]} has values above {most:.0f}, which {kind} does not hold: {advice}")
    return rounded


def _check_kinds(state_dict: dict[str, Tensor], model: nn.Module) -> None:
    """Raises where whole numbers stand for weights: `load_state_dict` would convert them without a word."""
    for key, own in model.state_dict().items():
        value = state_dict.get(key)
        if value is not None and own.is_floating_point() and not value.is_floating_point():
            raise CheckpointError(f"{key} is of type {value.dtype}, the model's of {own.dtype}: these are not weights")


def _resize_tables(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Interpolate tables whose window differs from the model's; a missing local table starts at zero."""
    signature = identify(state_dict)
    if signature is not None and signature.form != "training":
        raise CheckpointError("the tables of a fused checkpoint hold its shortcuts and cannot be interpolated")
    resized = dict(state_dict)
    for name, module in model.named_modules():
        windows = {"table": getattr(module, "window", None), "local_table": getattr(module, "local_window", None)}
        for leaf, window in windows.items():
            key, own = f"{name}.{leaf}", getattr(module, leaf, None)
            if own is None or window is None:
                continue
            if key in state_dict:
                resized[key] = _resize(key, state_dict[key], own, window)
            elif leaf == "local_table" and f"{name}.table" in state_dict:
                resized[key] = torch.zeros_like(own)
    return resized


def _resize(key: str, table: Tensor, own: Tensor, window: tuple[int, int]) -> Tensor:
    if table.shape == own.shape:
        return table
    side = math.isqrt(table.shape[1])
    if side * side != table.shape[1] or side % 2 == 0 or table.shape[0] != own.shape[0]:
        raise CheckpointError(f"{key}: the checkpoint's window is not square, so its table cannot be interpolated")
    return resize_table(table, ((side + 1) // 2,) * 2, window)

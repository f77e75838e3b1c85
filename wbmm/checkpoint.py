"""One reader for every checkpoint file, which never runs what is in it."""

import argparse
import importlib
import math
import pickle
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from .models.identify import explain_mismatch, identify
from .models.released import convert_released
from .models.state import CheckpointError, find_state_dict
from .ops import resize_table

# Harmless classes that checkpoints hold beside tensors. Nothing here can run code when it is unpickled; mmengine's own
# list also has `getattr`, which can.
_ALLOWED = [argparse.Namespace, np.ndarray, np.dtype, *{type(np.dtype(kind)) for kind in "?bhilqBHILQefd"}]
_ALLOWED_BY_NAME = [
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("mmengine.logging.history_buffer", "HistoryBuffer"),
]
_STATISTICS = ("min", "max", "current", "mean")


def _allow_list() -> list:
    allowed = list(_ALLOWED)
    for module, name in _ALLOWED_BY_NAME:
        try:
            allowed.append(getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError):
            continue  # the package is not installed, so no file that needs it can be read here
    return allowed + _history_statistics()


def _history_statistics() -> list:
    """A stand-in for `getattr` that gives four functions; empty without mmengine.

    The log buffers in a runner's checkpoint are stored with their statistics, each as `getattr(HistoryBuffer, name)`.
    The real `getattr` would reach any function of Python from there.
    """
    try:
        buffer = importlib.import_module("mmengine.logging.history_buffer").HistoryBuffer
    except (ImportError, AttributeError):
        return []

    def statistic(owner: object, name: object):
        if owner is not buffer or name not in _STATISTICS:
            raise pickle.UnpicklingError(f"getattr of {name!r} is not allowed")
        return getattr(buffer, name)

    return [(statistic, "builtins.getattr")]


def safe_load(path: str | Path) -> object:
    """The contents of a .pth, .pt or .safetensors file, on the CPU.

    A pickle may hold tensors and plain data only; one that asks for more is refused and never run.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        with torch.serialization.safe_globals(_allow_list()), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # the error, if there is one, says enough
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("WeightsUnpickler error:")[-1].strip().splitlines()[0]
        raise CheckpointError(
            f"{path}: refused, since it is not only tensors and plain data and could run code when loaded ({reason})"
        ) from None
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: not a readable checkpoint, perhaps truncated ({reason})") from None


def read_state_dict(path: str | Path, ema: bool = True) -> dict[str, Tensor]:
    """The state dict of any checkpoint file, in our names."""
    try:
        return convert_released(find_state_dict(safe_load(path), ema))
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(str(path)) else f"{path}: {text}") from None


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
    if side * side != table.shape[1] or side % 2 == 0:
        raise CheckpointError(f"{key}: the checkpoint's window is not square, so its table cannot be interpolated")
    return resize_table(table, ((side + 1) // 2,) * 2, window)


def load_weights(
    model: nn.Module, weights: str | Path | dict[str, Tensor], resize_tables: bool = False, ema: bool = True
) -> nn.Module:
    """Load a checkpoint into a model, strictly; returns the model.

    Args:
        model: a WBMM model, training form or fused.
        weights: a file (ours, released, .pth or .safetensors) or a state dict.
        resize_tables: interpolate tables whose window differs from the model's. The result is a starting point for
            fine-tuning, not the same function.
        ema: prefer an exponential moving average where the file has one.
    """
    state_dict = (
        convert_released(find_state_dict(weights, ema)) if isinstance(weights, dict) else read_state_dict(weights, ema)
    )
    if resize_tables:
        state_dict = _resize_tables(state_dict, model)
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as error:
        where = "the state dict" if isinstance(weights, dict) else str(weights)
        raise CheckpointError(f"{where} does not fit the model. {error}") from None
    return model


__all__ = [
    "CheckpointError",
    "explain_mismatch",
    "find_state_dict",
    "identify",
    "load_weights",
    "read_state_dict",
    "safe_load",
]

"""The weights of any checkpoint file, and a model that takes them."""

import math
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.models.identify import identify
from wbmm.models.released import convert_released
from wbmm.models.state import CheckpointError, check_finite, find_state_dict
from wbmm.ops import resize_table

from .reader import safe_load

__all__ = ["load_converted", "load_weights", "read_state_dict", "round_weights"]


def read_state_dict(path: str | Path, ema: bool = True) -> dict[str, Tensor]:
    """The state dict of any checkpoint file, in our names."""
    try:
        return convert_released(find_state_dict(safe_load(path), ema))
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(str(path)) else f"{path}: {text}") from None


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
    if isinstance(weights, dict):
        return load_converted(model, convert_released(find_state_dict(weights, ema)), resize_tables)
    return load_converted(model, read_state_dict(weights, ema), resize_tables, where=str(weights))


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
        raise CheckpointError(f"{where or 'the state dict'} does not fit the model. {error}") from None
    return model


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
            raise CheckpointError(f"{key} is of type {value.dtype}, the model's of {own.dtype}: these are no weights")


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

"""Where the state dict stands inside what a file holds, and whether it is one."""

import torch
from torch import Tensor

from wbmm.text import printable

# The first one present wins.
_WRAPPERS = ("state_dict_ema", "model_ema", "ema", "state_dict", "model")
MOST_WRAPPERS = 4
_PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COUNTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not fit the model."""


def find_state_dict(contents: object, ema: bool = True) -> dict[str, Tensor]:
    """The state dict inside a file's contents: itself, or under `state_dict`, `model`, or an EMA of it.

    Args:
        contents: what a file holds.
        ema: prefer an exponential moving average where there is one.
    """
    outer = contents
    for _ in range(MOST_WRAPPERS):  # a dict may contain itself
        if not isinstance(outer, dict):
            break
        inner = next((outer[key] for key in _WRAPPERS if _is_state(outer.get(key)) and (ema or "ema" not in key)), None)
        if inner is None:
            break
        outer = inner
    if isinstance(outer, dict) and outer and all(isinstance(value, Tensor) for value in outer.values()):
        _check_tensors(outer)
        return {_strip(key): value for key, value in outer.items()}
    held = type(outer).__name__
    if isinstance(outer, dict):
        held = f"keys {', '.join(map(printable, list(outer)[:5]))}"
    raise CheckpointError(
        f"no state dict found: expected one, or one under {', '.join(_WRAPPERS)}; the file holds {held}"
    )


def _is_state(value: object) -> bool:
    return isinstance(value, dict) and bool(value)


def _check_tensors(state_dict: dict) -> None:
    """Raises unless every name is text and every tensor a dense one of ordinary numbers."""
    for key, value in state_dict.items():
        if not isinstance(key, str):
            raise CheckpointError(f"the state dict has the key {key!r:.40}, a {type(key).__name__}: names are text")
        if value.layout != torch.strided or value.is_nested or value.is_quantized:
            raise CheckpointError(f"{key!r:.80} is a sparse, nested or quantised tensor; weights are dense ones")
        if value.is_meta:
            raise CheckpointError(f"{key!r:.80} is on the meta device: it has a shape and no values")
        if value.dtype not in _DTYPES + _COUNTS:
            valid = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise CheckpointError(f"{key!r:.80} is of type {value.dtype}; weights are of {valid}")


def check_finite(state_dict: dict[str, Tensor]) -> None:
    """Raises on NaN and infinite values."""
    bad = [key for key, value in state_dict.items() if value.is_floating_point() and not value.isfinite().all()]
    if bad:
        raise CheckpointError(
            f"{len(bad)} of {len(state_dict)} tensors hold NaN or infinite values, the first is {bad[0]}: "
            "the training that wrote this had diverged; take an earlier checkpoint"
        )


def _strip(key: str) -> str:
    for prefix in _PREFIXES:
        key = key.removeprefix(prefix)
    return key

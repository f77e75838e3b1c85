"""Where the state dict stands inside what a file holds, whether it is one, and released key names mapped to ours."""

import re

import torch
from torch import Tensor

from wbmm.layers.depthwise import DILATED_BRANCHES
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


# UniRepLKNet's dilated branches are named by kernel size and dilation, `k5_1`; ours are `k5d1`.
_BRANCHES = {f"k{size}_{d}": f"k{size}d{d}" for branches in DILATED_BRANCHES.values() for size, d in branches}

# Released name -> ours, for what stands inside `stages.I.J.`.
_BLOCK = {
    "gamma": "gamma",
    "dwconv.weight": "mixer.weight",
    "dwconv.bias": "mixer.bias",
    "dwconv.relative_position_bias_table": "mixer.table",
    "dwconv.R_fused": "mixer.table",
    "dwconv.M_fused": "mixer.weight",
    "dwconv.bias_fused": "mixer.bias",
    "dwconv.dwconv5.weight": "mixer.kernels.5",
    "dwconv.dwconv3.weight": "mixer.kernels.3",
    "dwconv.lk_origin": "mixer.conv",
    "dwconv.origin_bn": "mixer.norm",
    **{f"dwconv.dil_conv_{theirs}": f"mixer.branches.{ours}" for theirs, ours in _BRANCHES.items()},
    **{f"dwconv.dil_bn_{theirs}": f"mixer.norms.{ours}" for theirs, ours in _BRANCHES.items()},
    "norm": "norm",
    "dwconv.bn1": "mixer.norm",
    "dwconv.bn2": "mixer.norms.5",
    "dwconv.bn3": "mixer.norms.3",
    "se.down": "se.fc1",
    "se.up": "se.fc2",
    "pwconv1.1": "ffn.fc1",
    "act.1.gamma": "ffn.grn.gamma",
    "act.1.beta": "ffn.grn.beta",
    "pwconv2.0": "ffn.fc2",
    "pwconv2.2": "ffn.norm",
}

_OUTER = {
    "downsample_layers.0.0": "stem.conv1",
    "downsample_layers.0.1": "stem.norm1",
    "downsample_layers.0.3": "stem.conv2",
    "downsample_layers.0.4": "stem.norm2",
    "norm": "head.norm",
    "head": "head.fc",
    **{f"downsample_layers.{i}.0": f"stages.{i}.downsample.conv" for i in (1, 2, 3)},
    **{f"downsample_layers.{i}.1": f"stages.{i}.downsample.norm" for i in (1, 2, 3)},
}

_FUSED_LEAVES = ("dwconv.R_fused", "dwconv.M_fused", "dwconv.bias_fused")


def is_released(state_dict: dict[str, Tensor], prefix: str = "") -> bool:
    """Whether a state dict has the released names (below `prefix`)."""
    return f"{prefix}downsample_layers.0.0.weight" in state_dict


def _rename(name: str, table: dict[str, str]) -> str:
    if name in table:
        return table[name]
    module, _, leaf = name.rpartition(".")
    return f"{table[module]}.{leaf}" if module in table else name


def convert_released(state_dict: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """A state dict with released names, in ours; one that has none comes back as it is.

    Keys outside `prefix` and names that the mapping does not know are kept, the derivable index is dropped. A fused
    checkpoint's GRN gamma goes to the fused feed-forward.
    """
    if not is_released(state_dict, prefix):
        return state_dict
    fused = any(key.endswith(_FUSED_LEAVES) for key in state_dict)
    converted = {}
    for key, value in state_dict.items():
        if not key.startswith(prefix):
            converted[key] = value
            continue
        name = key[len(prefix) :]
        if name.endswith("relative_position_index"):
            continue
        block = re.fullmatch(r"stages\.(\d+)\.(\d+)\.(.+)", name)
        if block is None:
            name = _rename(name, _OUTER)
        else:
            inner = _rename(block[3], _BLOCK)
            if inner.startswith("se.") and value.ndim == 4:
                value = value.flatten(1)
            if fused and inner == "ffn.grn.gamma":
                inner, value = "ffn.gamma", value.flatten()
            if inner == "mixer.bias":
                value = value.flatten()
            name = f"stages.{block[1]}.blocks.{block[2]}.{inner}"
        converted[prefix + name] = value
    return converted

"""State dicts: where one stands inside what a file holds, released names mapped to ours, and what its shapes say."""

import math
import re
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.layers.depthwise import DILATED_BRANCHES
from wbmm.text import printable
from wbmm.zoo import load_zoo

from .named_mixers import StageWindow, name_when_fused, parse_pattern, parse_windows

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


# A parameter that only one mixer has, in training form and fused. `no_shortcut` has those of `wbmm`.
MIXER_KEYS = {
    "conv.weight": "dw13_reparam",
    "wide.weight": "slak",
    "qkv.weight": "win_attn",
    "full": "full",
    "beside.weight": "parallel",
    "after.weight": "serial",
    "rest.weight": "half",
}


@dataclass(frozen=True)
class Signature:
    """What the keys and shapes of a state dict say.

    Attributes:
        form: `training`, or fused: `compact` (tables) or `dense` (matrices).
        dims: channels of each stage.
        patterns: blocks of each stage.
        windows: the windows seen in each stage, None in a stage without WBMM blocks.
        mixer: what stands in W blocks, as far as it can be told: see `MIXER_KEYS` and `name_when_fused`.
        num_classes: rows of the classifier, or None.
    """

    form: str
    dims: tuple[int, ...]
    patterns: tuple[str, ...]
    windows: tuple[StageWindow | None, ...]
    num_classes: int | None
    mixer: str = "wbmm"

    def names(self) -> list[str]:
        """The models of the zoo with this architecture; branches that only training has are gone once fused."""
        fused = self.form != "training"

        def plain(patterns: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(stage.replace("M", "W") for stage in patterns) if fused else patterns

        return [
            name
            for name, model in load_zoo().items()
            if model.dims == self.dims
            and (name_when_fused(model.mixer) if fused else model.mixer) == self.mixer
            and plain(parse_pattern(model.pattern)) == plain(self.patterns)
            and all(
                seen is None or seen == expected
                for seen, expected in zip(self.windows, parse_windows(model.window), strict=True)
            )
        ]

    def __str__(self) -> str:
        names = self.names()
        what = " or ".join(names) if names else "a model outside the zoo"
        form = "training form" if self.form == "training" else f"fused, {self.form} form"
        blocks = " ".join(self.patterns)
        operator = self.mixer
        if any(self.windows):
            windows = "windows " + " ".join(str(window or "-") for window in self.windows)
            operator = windows if operator == "wbmm" else f"{operator}, {windows}"
        classes = "no classifier" if self.num_classes is None else f"{self.num_classes} classes"
        return f"{what} ({form}, channels {self.dims}, blocks {blocks}, {operator}, {classes})"


def _square(positions: int) -> tuple[int, int]:
    side = math.isqrt(positions)
    return (side, side) if side * side == positions else (1, positions)


def _window(block: dict[str, Tensor]) -> StageWindow | None:
    for key in ("table", "bias_table"):
        if key in block and block[key].ndim == 2:
            side = (_square(block[key].shape[1])[0] + 1) // 2
            return StageWindow((side, side), hierarchical="local_table" in block)
    for key in ("weight", "full"):
        if key in block and block[key].ndim == 3:
            return StageWindow(_square(block[key].shape[1]))
    return None


def _mixer(block: dict[str, Tensor]) -> str | None:
    """The operator of a W or M block; None for a 3x3 depthwise convolution, which is taken for a D block."""
    for key, name in MIXER_KEYS.items():
        if key in block:
            return name
    if "weight" in block and block["weight"].ndim == 4:
        size = block["weight"].shape[-1]
        return None if size == 3 else f"dw{size}"
    return "wbmm"


def _letter(block: dict[str, Tensor]) -> str:
    if any(key.startswith("kernels") for key in block):
        return "M"
    return "D" if _mixer(block) is None else "W"


def identify(state_dict: dict[str, Tensor]) -> Signature | None:
    """The signature of a state dict in our names (windows are taken to be square), or None if it is of no WBMM."""
    blocks: dict[tuple[int, int], dict[str, Tensor]] = {}
    dims: dict[int, int] = {}
    fused = False
    for key, value in state_dict.items():
        match = re.fullmatch(r"stages\.(\d+)\.blocks\.(\d+)\.(\w+)\.(.+)", key)
        if match is None:
            continue
        stage, index = int(match[1]), int(match[2])
        if match[3] == "mixer":
            blocks.setdefault((stage, index), {})[match[4].removeprefix("wbmm.")] = value
        elif match[3] == "ffn" and match[4] == "fc1.weight" and value.ndim == 2:
            dims[stage] = value.shape[1]
        elif match[3] == "ffn" and match[4] == "fc2.bias":
            fused = True
    if not blocks or not dims or set(dims) != set(range(len(dims))):
        return None
    mixers = list(blocks.values())
    dense = any("weight" in block and block["weight"].ndim == 3 for block in mixers)
    patterns, windows = [], []
    for stage in sorted(dims):
        stage_blocks = [block for (s, _), block in sorted(blocks.items()) if s == stage]
        patterns.append("".join(map(_letter, stage_blocks)))
        windows.append(next(filter(None, map(_window, stage_blocks)), None))
    head = state_dict.get("head.fc.weight")
    return Signature(
        form="dense" if dense else "compact" if fused else "training",
        dims=tuple(dims[stage] for stage in sorted(dims)),
        patterns=tuple(patterns),
        windows=tuple(windows),
        num_classes=None if head is None or head.ndim != 2 else head.shape[0],
        mixer=next(filter(None, map(_mixer, mixers)), "wbmm"),
    )


def explain_mismatch(model: nn.Module, state_dict: dict[str, Tensor]) -> str:
    """One paragraph on why a state dict does not fit: what it looks like, what the model is, what to do."""
    seen, wanted = identify(state_dict), identify(model.state_dict())
    if seen is None or wanted is None:
        some = ", ".join(map(printable, sorted(map(str, state_dict))[:3])) or "nothing"
        return f"The checkpoint is of no WBMM model: its keys are {some}, ..."
    lines = [f"The checkpoint looks like {seen}.", f"The model is {wanted}."]
    lines += _advice(seen, wanted)
    return "\n".join(lines)


def _advice(seen: Signature, wanted: Signature) -> list[str]:
    if seen.form != wanted.form:
        if wanted.form == "training":
            return [
                "A fused checkpoint cannot go back to the training form. For inference: wbmm.load_model(file), or fuse "
                "the model first; for fine-tuning, take the training checkpoint that it was made from."
            ]
        if seen.form == "training":
            return ["Load it into the model before wbmm.fuse(model)."]
        return [f"Fuse the model in the checkpoint's form: wbmm.fuse(model, form={seen.form!r})."]
    if seen.mixer != wanted.mixer and not seen.names():
        return [f"Its W blocks hold another operator: pass mixer={seen.mixer!r}."]
    same_blocks = seen.patterns == wanted.patterns and seen.dims == wanted.dims and seen.mixer == wanted.mixer
    if same_blocks and seen.windows != wanted.windows:
        return ["To interpolate tables to other windows: wbmm.load_weights(model, file, resize_tables=True)."]
    if seen.names() and seen.names() != wanted.names():
        return [f"Create that model instead: timm.create_model({seen.names()[0]!r})."]
    if seen.num_classes is not None and seen.num_classes != wanted.num_classes:
        return [
            f"It has {seen.num_classes} classes: pass num_classes={seen.num_classes}, or for a new classifier "
            "wbmm.load_weights(model, file, new_classifier=True)."
        ]
    return []

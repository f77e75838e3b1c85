"""What a state dict looks like: which variant, which windows, which form. For errors that tell people what to do."""

import math
import re
from dataclasses import dataclass

import torch.nn as nn
from torch import Tensor

from wbmm.text import printable
from wbmm.zoo import load_zoo

from .named_mixers import name_when_fused
from .pattern import StageWindow, parse_pattern, parse_windows

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
        return [f"It has {seen.num_classes} classes: pass num_classes={seen.num_classes}."]
    return []

"""WBMM in the place of the large depthwise convolutions of any model of timm's."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
import torch.nn as nn
from timm.layers import Conv2dSame, trunc_normal_
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from wbmm.layers import WBMM2d
from wbmm.layers.mixers import FusedWBMM2d, batch_norm_affine
from wbmm.ops import to_window
from wbmm.text import render_table, some

__all__ = ["BiasedWBMM2d", "ReplaceReport", "replace_depthwise"]

LETTERS = ("W", "D")


class BiasedWBMM2d(WBMM2d):
    """WBMM and a bias `[C]`: what a depthwise convolution with bias becomes, where no batch norm follows it."""

    def __init__(self, dim: int, window_size: int | tuple[int, int] = 7, device=None, dtype=None) -> None:
        super().__init__(dim, window_size, device=device, dtype=dtype)
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.windowed(x, self.tables(), shortcuts=int(self.shortcut)) + self.bias[:, None, None]

    @torch.no_grad()
    def fuse(self, norm: nn.BatchNorm2d | None = None) -> FusedWBMM2d:
        """The inference form, with the bias inside the product and the batch norm that follows folded in, if given."""
        scale, shift = batch_norm_affine(norm, self.table)
        bias = self.bias * scale + shift
        return FusedWBMM2d(self.folded_table() * scale[:, None], bias, self.window, self.padding_mode)


@dataclass(frozen=True)
class Replaced:
    """A convolution that became something else."""

    name: str
    channels: int
    was: str
    now: str


@dataclass(frozen=True)
class LeftAlone:
    """A convolution that stays, and why."""

    name: str
    was: str
    why: str


@dataclass(frozen=True)
class ReplaceReport:
    """What `replace_depthwise` did to each convolution of a model, in the model's order."""

    replaced: tuple[Replaced, ...]
    left_alone: tuple[LeftAlone, ...]

    def __str__(self) -> str:
        rows = [[entry.name, entry.channels, entry.was, entry.now] for entry in self.replaced]
        return "\n".join([render_table(("module", "channels", "was", "is now"), rows), *self.reasons()])

    def reasons(self) -> list[str]:
        """One line for each reason to leave convolutions alone."""
        names: dict[str, list[str]] = {}
        for entry in self.left_alone:
            names.setdefault(entry.why, []).append(entry.name or "the model itself")
        return [f"left alone, {why}: {some(found, 4)}" for why, found in names.items()]


def replace_depthwise(
    model: nn.Module,
    min_kernel: int = 7,
    window: int | tuple[int, int] = 7,
    pattern: str | Sequence[str] | None = None,
) -> ReplaceReport:
    """Puts WBMM in the place of each large depthwise convolution of a model, in place, and says what it did.

    A convolution's bias stays, as do its device, dtype, memory format and train or eval mode. The new weights are those
    of a fresh layer (truncated normal, 0.02) and trainable, in a frozen model too: the model is to be trained.
    `wbmm.fuse` gives its inference form.

    Args:
        model: of timm's or any other; not compiled, not scripted. Optimisers are built after this.
        min_kernel: convolutions with a smaller side stay, as do those with a stride, a dilation or fewer groups than
            channels.
        window: of WBMM, an int or (wh, ww).
        pattern: one letter per convolution: W for WBMM, D for a 3x3 depthwise convolution, which carries information
            across windows. None for W everywhere, a string that is repeated over the whole model (`"WD"`), or one
            string per stage (`("WDW", "WDW", "WDWDWDWDW", "WWW")`). Stages are the first number in module names.
    """
    _check_python(model)
    window = to_window(window)
    if not isinstance(min_kernel, int) or isinstance(min_kernel, bool) or min_kernel < 1:
        raise ValueError(f"min_kernel {min_kernel!r}: expected a positive int, such as 7")
    chosen, left_alone = _survey(model, min_kernel)
    if not chosen:
        reasons = "\n".join(ReplaceReport((), tuple(left_alone)).reasons()) or "it has no convolution at all"
        raise ValueError(
            f"nothing to replace in this {type(model).__name__}: expected a depthwise convolution of stride 1 with a "
            f"kernel of at least {min_kernel}\n{reasons}"
        )
    letters = _letters(pattern, [names[0] for names in chosen.values()])
    replaced = []
    for (conv, names), letter in zip(chosen.items(), letters, strict=True):
        layer = _build(letter, conv, window)
        for name in names:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, layer)
        now = "3x3 depthwise" if letter == "D" else f"WBMM {window[0]}x{window[1]}"
        replaced.append(Replaced(names[0], conv.in_channels, _describe(conv), now))
    return ReplaceReport(tuple(replaced), tuple(left_alone))


def _check_python(model: nn.Module) -> None:
    """Raises where a change of the modules would not reach what runs."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError("the model is scripted, so that its modules are fixed: replace first, then script")
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError("the model is compiled: replace first, then compile")


def _survey(model: nn.Module, min_kernel: int) -> tuple[dict[nn.Conv2d, list[str]], list[LeftAlone]]:
    """Convolutions to replace, each with all of its names, and the others."""
    chosen: dict[nn.Conv2d, list[str]] = {}
    left_alone = []
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        if not isinstance(module, nn.Conv2d):
            continue
        why = _obstacle(module, min_kernel) or _owner(name, modules)
        if why is None:
            chosen.setdefault(module, []).append(name)
        else:
            left_alone.append(LeftAlone(name, _describe(module), why))
    return chosen, left_alone


def _obstacle(conv: nn.Conv2d, min_kernel: int) -> str | None:
    """What about a convolution keeps it from being replaced."""
    if conv.groups == 1 or not conv.groups == conv.in_channels == conv.out_channels:
        return "not depthwise"
    if min(conv.kernel_size) < min_kernel:
        return f"a kernel below {min_kernel}"
    if set(conv.stride) != {1}:
        return "a stride"
    if set(conv.dilation) != {1}:
        return "a dilation"
    if conv.padding_mode != "zeros":
        return f"padded by {conv.padding_mode}"
    if conv._forward_hooks or conv._forward_pre_hooks or conv._backward_hooks or conv._backward_pre_hooks:
        return "a hook on it"
    if is_parametrized(conv):
        return "parametrised weights"
    same = conv.padding == "same" or isinstance(conv, Conv2dSame)
    if not same and any(2 * pad != side - 1 for pad, side in zip(conv.padding, conv.kernel_size, strict=True)):
        return "a padding that changes the map's size"
    return None


def _owner(name: str, modules: dict[str, nn.Module]) -> str | None:
    """A module above that folds its convolutions by itself, and could not fold another layer."""
    if not name:
        return "no module to put another one into"
    while "." in name:
        name = name.rpartition(".")[0]
        owner = modules[name]
        if hasattr(owner, "fuse") or hasattr(owner, "reparameterize"):
            return f"inside a {type(owner).__name__}, which folds it when fused"
    return None


def _letters(pattern: str | Sequence[str] | None, names: list[str]) -> list[str]:
    """A letter for each convolution."""
    pattern = "W" if pattern is None else pattern
    parts: list[Any] = list(pattern) if isinstance(pattern, list | tuple) else [pattern]
    for part in parts:
        if not isinstance(part, str) or not part or set(part) - set(LETTERS):
            raise ValueError(
                f"pattern {pattern!r}: {part!r} is not made of W (WBMM) and D (3x3 depthwise convolution), as in 'WDW'"
            )
    if isinstance(pattern, str):
        return list(islice(cycle(pattern), len(names)))
    stages = Counter(found[0] for name in names if (found := re.match(r"(?:\D*\d+)?", name)))
    if [len(part) for part in parts] != list(stages.values()):
        expected = ", ".join(f"{count} in {stage or 'the model'}" for stage, count in stages.items())
        raise ValueError(
            f"pattern {tuple(parts)!r}: expected one string for each of {len(stages)} stages, with a letter for each "
            f"convolution to replace: {expected}"
        )
    return list("".join(parts))


def _build(letter: str, conv: nn.Conv2d, window: tuple[int, int]) -> nn.Module:
    """The layer that takes a convolution's place, with its bias."""
    dd = {"device": conv.weight.device, "dtype": conv.weight.dtype}
    channels = conv.in_channels
    if letter == "D":
        layer = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False, **dd)
        trunc_normal_(layer.weight, std=0.02)
        if conv.weight.stride(1) == 1:  # with one channel a group, contiguity tells nothing
            layer.to(memory_format=torch.channels_last)
    else:
        layer = (WBMM2d if conv.bias is None else BiasedWBMM2d)(channels, window, **dd)
    if conv.bias is not None:
        layer.bias = conv.bias
    return layer.train(conv.training)


def _describe(conv: nn.Conv2d) -> str:
    kind = "depthwise" if 1 < conv.groups == conv.in_channels == conv.out_channels else "convolution"
    return f"{conv.kernel_size[0]}x{conv.kernel_size[1]} {kind}"

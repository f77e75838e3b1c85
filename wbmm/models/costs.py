"""Parameters, multiply-adds and receptive field of a model, computed, on the meta device: no memory, no weights."""

from dataclasses import dataclass

import timm
import torch
import torch.nn as nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .named_mixers import StageWindow, find_mixer


def count_params(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def count_macs(model: nn.Module, size: tuple[int, int], in_chans: int = 3) -> dict[str, int]:
    """Multiply-adds of convolutions, linears and batched products for one image, by module name; "" is the whole.

    Args:
        model: on any device; it is run on the device of its parameters.
        size: (H, W) of the image.
    """
    device = next(model.parameters()).device
    counter = FlopCounterMode(display=False, depth=None)
    # The counter knows attention as two batched products, not as the one kernel that a CPU has for it.
    with torch.no_grad(), counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(1, in_chans, *size, device=device, dtype=next(model.parameters()).dtype))
    root = type(model).__name__
    macs = {}
    for name, flops in counter.get_flop_counts().items():
        total = sum(flops.values()) // 2
        if name == "Global":
            macs[""] = total
        else:
            macs[name.removeprefix(root).removeprefix(".")] = total
    return macs


def build_on_meta(name: str, **kwargs) -> nn.Module:
    """A model without memory, in eval mode."""
    return timm.create_model(name, device=torch.device("meta"), **kwargs).eval()


@dataclass(frozen=True)
class Reach:
    """Which input pixels each position of a map sees along one axis: from `low[i]` to `high[i]`."""

    low: list[int]
    high: list[int]

    @classmethod
    def of_input(cls, length: int) -> "Reach":
        return cls(list(range(length)), list(range(length)))

    def _see(self, spans: list[tuple[int, int]]) -> "Reach":
        last = len(self.low) - 1
        return Reach([self.low[max(a, 0)] for a, _ in spans], [self.high[min(b, last)] for _, b in spans])

    def conv(self, kernel: int, stride: int) -> "Reach":
        """After a convolution with padding kernel // 2."""
        half = kernel // 2
        return self._see([(i - half, i + half) for i in range(0, len(self.low), stride)])

    def windows(self, side: int) -> "Reach":
        """After any map inside windows of a given side."""
        starts = [i - i % side for i in range(len(self.low))]
        return self._see([(start, start + side - 1) for start in starts])

    def __or__(self, other: "Reach") -> "Reach":
        """What either of two maps of the same size sees."""
        return Reach(list(map(min, self.low, other.low)), list(map(max, self.high, other.high)))

    def largest(self) -> int:
        return max(b - a + 1 for a, b in zip(self.low, self.high, strict=True))


def receptive_fields(
    size: tuple[int, int], patterns: tuple[str, ...], windows: tuple[StageWindow, ...], mixer: str = "wbmm"
) -> list[tuple[int, int]]:
    """The largest extent in input pixels, (H, W), that a position sees after the stem and after each stage.

    Through convolutions and windows, clipped to the image; SE and GRN see the whole map besides.
    """
    operator = find_mixer(mixer)
    reach = [Reach.of_input(side).conv(3, 2).conv(3, 2) for side in size]
    fields = [(reach[0].largest(), reach[1].largest())]
    for stage, (pattern, window) in enumerate(zip(patterns, windows, strict=True)):
        if stage:
            reach = [axis.conv(3, 2) for axis in reach]
        for letter in pattern:
            if letter == "D":
                reach = [axis.conv(3, 1) for axis in reach]
            else:
                reach = [operator.reach(axis, side, stage) for axis, side in zip(reach, window.size, strict=True)]
        fields.append((reach[0].largest(), reach[1].largest()))
    return fields

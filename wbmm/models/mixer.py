"""What a letter of a pattern is built as, given the operator that stands in W blocks."""

import re
from dataclasses import dataclass

import torch.nn as nn

from wbmm.layers import DepthwiseConv2d, DilatedReparamConv2d, HierarchicalWBMM2d, MultiKernelWBMM2d, WBMM2d
from wbmm.layers.depthwise import DILATED_BRANCHES

from .pattern import StageWindow

WBMM_MIXER = "wbmm"


@dataclass(frozen=True)
class Kernel:
    """A depthwise convolution in the place of WBMM; `reparam` if dilated branches stand beside it in training."""

    size: int
    reparam: bool = False

    def __str__(self) -> str:
        return f"dw{self.size}_rep" if self.reparam else f"dw{self.size}"


def parse_mixer(mixer: str) -> Kernel | None:
    """The depthwise convolution that a name stands for, None for `wbmm`."""
    if mixer == WBMM_MIXER:
        return None
    match = re.fullmatch(r"dw(\d+)(_rep)?", str(mixer))
    kernel = Kernel(int(match[1]), match[2] is not None) if match else None
    if kernel is None or kernel.size % 2 == 0 or (kernel.reparam and kernel.size not in DILATED_BRANCHES):
        reparam = ", ".join(f"'dw{size}_rep'" for size in DILATED_BRANCHES)
        raise ValueError(
            f"mixer {mixer!r}: expected 'wbmm', a depthwise convolution of odd size such as 'dw5', or {reparam}"
        )
    return kernel


def create_mixer(
    letter: str,
    dim: int,
    window: StageWindow,
    mixer: str = WBMM_MIXER,
    padding_mode: str = "zeros",
    large_kernel: str | None = None,
    device=None,
    dtype=None,
) -> nn.Module:
    """The spatial mixer of one block of a pattern.

    Args:
        letter: of the block.
        dim: channels.
        window: of the block's stage, for WBMM.
        mixer: what stands in W blocks; see `parse_mixer`.
        padding_mode: how maps are padded to whole windows.
        large_kernel: the convolution that runs a depthwise mixer, see `wbmm.layers.large_kernel`.
    """
    dd = {"device": device, "dtype": dtype}
    if letter == "D":
        return DepthwiseConv2d(dim, **dd)
    kernel = parse_mixer(mixer)
    if kernel is not None:
        layer = DilatedReparamConv2d if kernel.reparam else DepthwiseConv2d
        return layer(dim, kernel.size, large_kernel=large_kernel, **dd)
    if large_kernel is not None:
        raise ValueError(f"large_kernel {large_kernel!r} is for depthwise mixers such as 'dw13'; the mixer is 'wbmm'")
    if letter == "M":
        if window.hierarchical:
            raise ValueError(f"an M block has no hierarchical form; its window is {window}: use W blocks there")
        return MultiKernelWBMM2d(dim, window.size, padding_mode=padding_mode, **dd)
    if window.hierarchical:
        local = (window.size[0] // 2, window.size[1] // 2)
        return HierarchicalWBMM2d(dim, local, padding_mode=padding_mode, **dd)
    return WBMM2d(dim, window.size, padding_mode=padding_mode, **dd)

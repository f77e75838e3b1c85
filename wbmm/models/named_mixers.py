"""The mixers that can stand in W blocks, by name, and what each letter of a pattern is built as."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch.nn as nn

from wbmm.layers import (
    DepthwiseConv2d,
    DilatedReparamConv2d,
    FullConnection2d,
    HalfWBMM2d,
    HierarchicalWBMM2d,
    MultiKernelWBMM2d,
    ParallelWBMM2d,
    SerialWBMM2d,
    SLaKConv2d,
    WBMM2d,
    WindowAttention2d,
)

from .pattern import StageWindow, parse_windows

SLAK_KERNELS = (51, 49, 47, 13)  # of each stage
HIER_WINDOWS = ("14+7", "14+7", 14, 7)


@dataclass(frozen=True)
class MixerArgs:
    """What a mixer is built from: the block it stands in, and the net's options.

    Attributes:
        letter: of the block.
        dim: channels.
        stage: from 0.
        window: of the stage, for mixers that have one.
        mixer: its name, for errors.
        padding_mode: how maps are padded to whole windows.
        large_kernel: the convolution that runs a depthwise mixer, see `wbmm.layers.depthwise`.
        factory: device and dtype.
    """

    letter: str
    dim: int
    stage: int
    window: StageWindow
    mixer: str = "wbmm"
    padding_mode: str = "zeros"
    large_kernel: str | None = None
    factory: dict = field(default_factory=dict)


def _wbmm(args: MixerArgs) -> nn.Module:
    options = {"padding_mode": args.padding_mode, **args.factory}
    if args.letter == "M":
        if args.window.hierarchical:
            raise ValueError(f"an M block has no hierarchical form; its window is {args.window}: use W blocks there")
        return MultiKernelWBMM2d(args.dim, args.window.size, **options)
    if args.window.hierarchical:
        local = (args.window.size[0] // 2, args.window.size[1] // 2)
        return HierarchicalWBMM2d(args.dim, local, **options)
    return WBMM2d(args.dim, args.window.size, **options)


def _windowed(layer: Callable[..., nn.Module]) -> Callable[[MixerArgs], nn.Module]:
    """The builder of a layer with one window."""

    def build(args: MixerArgs) -> nn.Module:
        if args.window.hierarchical:
            raise ValueError(
                f"mixer {args.mixer!r} has no hierarchical form; the window of stage {args.stage + 1} is "
                f"{args.window}: give a plain one, such as window_size=7"
            )
        return layer(args.dim, args.window.size, padding_mode=args.padding_mode, **args.factory)

    return build


def _slak(args: MixerArgs) -> nn.Module:
    return SLaKConv2d(args.dim, SLAK_KERNELS[args.stage], **args.factory)


def _kernel(layer: Callable[..., nn.Module], size: int) -> Callable[[MixerArgs], nn.Module]:
    """The builder of a depthwise convolution."""
    return lambda args: layer(args.dim, size, large_kernel=args.large_kernel, **args.factory)


def _see_window(axis, side: int, stage: int):
    return axis.windows(side)


@dataclass(frozen=True)
class MixerKind:
    """A mixer for W blocks, as its name stands for it.

    Attributes:
        build: gives the layer.
        reach: what a position sees along one axis after it, from (`Reach` before it, side of the window, stage).
        large_kernel: whether the large-kernel CUDA package can run it.
        block: options of the blocks that it stands in, where they are not the family's.
        fused: the name of what it is once fused, where that is another mixer.
    """

    build: Callable[[MixerArgs], nn.Module]
    reach: Callable = _see_window
    large_kernel: bool = False
    block: dict = field(default_factory=dict)
    fused: str | None = None


def _depthwise(size: int) -> MixerKind:
    return MixerKind(_kernel(DepthwiseConv2d, size), lambda axis, side, stage: axis.conv(size, 1), large_kernel=True)


MIXERS = {
    "wbmm": MixerKind(_wbmm),
    "wbmm_hier": MixerKind(_wbmm),  # with windows of its own: `resolve_mixer`
    "dw13_reparam": MixerKind(
        _kernel(DilatedReparamConv2d, 13), lambda axis, side, stage: axis.conv(13, 1), large_kernel=True, fused="dw13"
    ),
    "slak_all": MixerKind(
        _slak, lambda axis, side, stage: axis.conv(SLAK_KERNELS[stage], 1)
    ),  # in D blocks too: `resolve_mixer`
    "slak": MixerKind(_slak, lambda axis, side, stage: axis.conv(SLAK_KERNELS[stage], 1)),
    # Without SE and with the narrower feed-forward part, its net is about as large as WBMM's.
    "win_attn": MixerKind(_windowed(WindowAttention2d), block={"ffn_ratio": 2.5, "se": False}),
    "full": MixerKind(_windowed(FullConnection2d)),
    "no_shortcut": MixerKind(_windowed(partial(WBMM2d, shortcut=False)), fused="wbmm"),
    "parallel": MixerKind(_windowed(ParallelWBMM2d), lambda axis, side, stage: axis.windows(side) | axis.conv(3, 1)),
    "serial": MixerKind(_windowed(SerialWBMM2d), lambda axis, side, stage: axis.windows(side).conv(3, 1)),
    "half": MixerKind(_windowed(HalfWBMM2d), lambda axis, side, stage: axis.windows(side) | axis.conv(3, 1)),
}


def find_mixer(name: str) -> MixerKind:
    """The operator of a name: one of `MIXERS`, or dwK for a KxK depthwise convolution."""
    if str(name) in MIXERS:
        return MIXERS[name]
    kernel = re.fullmatch(r"dw([1-9]\d*)", str(name))
    if kernel is None or int(kernel[1]) % 2 == 0:
        raise ValueError(
            f"mixer {name!r}: expected one of {', '.join(MIXERS)}, or a depthwise convolution of odd size, such as dw5"
        )
    return _depthwise(int(kernel[1]))


def name_when_fused(name: str) -> str:
    """The mixer that a fused one cannot be told from: branches of training are gone, a shortcut is in the table."""
    return find_mixer(name).fused or name


def resolve_mixer(
    name: str, patterns: tuple[str, ...], windows: tuple[StageWindow, ...]
) -> tuple[str, tuple[str, ...], tuple[StageWindow, ...]]:
    """A mixer, the blocks and the windows of each stage, with shorthands written out."""
    find_mixer(name)
    if name == "slak_all":
        return "slak", tuple("W" * len(stage) for stage in patterns), windows
    if name == "wbmm":
        return name, patterns, windows
    if name != "wbmm_hier":  # the kernels of M blocks are WBMM's
        return name, tuple(stage.replace("M", "W") for stage in patterns), windows
    own = parse_windows(HIER_WINDOWS)
    if windows not in (own, parse_windows(7)):
        raise ValueError(
            f"mixer 'wbmm_hier' means windows {' '.join(map(str, own))}; those given are "
            f"{' '.join(map(str, windows))}: leave window_size out, or take mixer='wbmm' with it"
        )
    return "wbmm", patterns, own


def create_mixer(args: MixerArgs) -> nn.Module:
    """The spatial mixer of one block of a pattern."""
    if args.letter == "D":
        return DepthwiseConv2d(args.dim, **args.factory)
    mixer = find_mixer(args.mixer)
    if args.large_kernel is not None and not mixer.large_kernel:
        raise ValueError(
            f"large_kernel {args.large_kernel!r} is for depthwise mixers such as 'dw13'; the mixer is {args.mixer!r}"
        )
    return mixer.build(args)


def block_options(letter: str, mixer: str) -> dict:
    """Options of the block that a mixer stands in, beside the family's."""
    return {} if letter == "D" else find_mixer(mixer).block

"""What each block of each stage is: patterns and windows as data, and the mixers that stand in W blocks, by name."""

import re
from collections.abc import Callable, Sequence
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
from wbmm.ops import to_window

NUM_STAGES = 4
MOST_BLOCKS = 512  # of a stage: the paper's largest has 27
LETTERS = {
    "W": "WBMM",
    "D": "3x3 depthwise convolution",
    "M": "WBMM with 5x5 and 3x3 depthwise kernels beside it in training",
}


@dataclass(frozen=True)
class StageWindow:
    """The window of a stage: (wh, ww); `hierarchical` if the four windows of half its size act inside it as well."""

    size: tuple[int, int]
    hierarchical: bool = False

    def __str__(self) -> str:
        h, w = self.size
        size = str(h) if h == w else f"{h}x{w}"
        return f"{size}+{h // 2}" if self.hierarchical else size


def _expand(stage: int, text: str | Sequence[str]) -> str:
    """`(WD)x3` to `WDWDWD`, a list of letters to a string; checks the letters."""
    letters = text if isinstance(text, str) else "".join(text)
    repeated = re.fullmatch(r"\((\w+)\)x(\d+)", letters)
    if repeated:
        letters = repeated[1] * min(int(repeated[2]), MOST_BLOCKS + 1)
    if len(letters) > MOST_BLOCKS:
        raise ValueError(f"pattern {text!r:.60} of stage {stage}: more than {MOST_BLOCKS} blocks")
    wrong = sorted(set(letters) - set(LETTERS))
    if wrong or not letters:
        known = ", ".join(f"{letter} ({meaning})" for letter, meaning in LETTERS.items())
        raise ValueError(
            f"pattern {text!r} of stage {stage}: {wrong[0] if wrong else 'empty'!r} is not a block; use {known}"
        )
    return letters


def parse_pattern(pattern: Sequence[str | Sequence[str]], depths: Sequence[int] | None = None) -> tuple[str, ...]:
    """The blocks of each stage as one string of letters.

    Args:
        pattern: one entry a stage: `"WDW"`, `["W", "D", "W"]` or `"(WD)x9"`.
        depths: blocks of each stage, checked where given.
    """
    if isinstance(pattern, str) or len(pattern) != NUM_STAGES:
        raise ValueError(
            f"pattern {pattern!r}: expected one entry for each of the {NUM_STAGES} stages, "
            'such as ("DDD", "WDW", "(WD)x9", "WWW")'
        )
    stages = tuple(_expand(i, stage) for i, stage in enumerate(pattern, 1))
    if depths is not None and len(depths) != NUM_STAGES:
        raise ValueError(f"depths {tuple(depths)!r}: expected one number for each of the {NUM_STAGES} stages")
    for i, (stage, depth) in enumerate(zip(stages, depths or map(len, stages), strict=True), 1):
        if len(stage) != depth:
            raise ValueError(f"pattern {stage!r} of stage {i} has {len(stage)} blocks; depths says {depth}")
    return stages


def parse_window(window: int | str | tuple[int, int]) -> StageWindow:
    """A window from 7, (7, 14), or "14+7" for a hierarchical one."""
    if isinstance(window, StageWindow):
        return window
    if isinstance(window, str):
        scales = re.fullmatch(r"(\d+)\+(\d+)", window)
        if scales is None or int(scales[1]) != 2 * int(scales[2]) or int(scales[2]) == 0:
            raise ValueError(
                f"window {window!r}: a hierarchical window is written 'G+L' with G twice L, such as '14+7'; "
                "a plain one is an int or a pair"
            )
        return StageWindow(to_window(int(scales[1])), hierarchical=True)
    return StageWindow(to_window(window))


def parse_windows(window_size) -> tuple[StageWindow, ...]:
    """The window of each stage, from one window for all or a sequence of four."""
    if isinstance(window_size, Sequence) and not isinstance(window_size, str) and len(window_size) != 2:
        if len(window_size) != NUM_STAGES:
            raise ValueError(
                f"window_size {window_size!r}: expected one window, or one for each of {NUM_STAGES} stages"
            )
        return tuple(parse_window(window) for window in window_size)
    return (parse_window(window_size),) * NUM_STAGES


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

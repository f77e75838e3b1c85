"""Patterns and windows as data: what each block of each stage is."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

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

"""Layer groups for layer-wise learning-rate decay: which group of the family's layers a parameter belongs to.

The stem is group 0, stage 1 group 1, stage 2 group 2; stage 3 has a group for each three of its blocks, from 3 on;
stage 4 is the last group, and whatever is not in the backbone (heads) lies one above it. A downsampling layer belongs
to the first group of the stage that it leads into. Names are those of a model (`stages.2.blocks.5.`) or of timm's
feature extractors, which write the first level with an underscore (`stages_2.blocks.5.`).
"""

import math
import re
from collections.abc import Sequence

__all__ = ["layer_group", "layer_scale", "num_groups"]

BLOCKS_PER_GROUP = 3
_STEM = re.compile(r"stem[._]")
_STAGE = re.compile(r"stages[._]([0-3])\.(?:blocks\.(\d+)\.|downsample\.)")


def num_groups(depths: Sequence[int]) -> int:
    """The number of groups above the stem, which is the group of stage 4: 9 for T, 12 for S."""
    if len(depths) != 4:
        raise ValueError(f"depths {tuple(depths)!r}: expected the blocks of 4 stages, such as (3, 3, 18, 3)")
    return 3 + math.ceil(depths[2] / BLOCKS_PER_GROUP)


def layer_group(name: str, depths: Sequence[int], groups: int | None = None) -> int:
    """The group of a parameter.

    Args:
        name: The parameter's name in the model, such as `stages.2.blocks.5.ffn.fc1.weight`. Any other name counts as
            part of a head.
        depths: Blocks of each stage.
        groups: The number of the last group; at least, and when not given, `num_groups(depths)`.
    """
    least = num_groups(depths)
    if groups is None:
        groups = least
    if groups < least:
        raise ValueError(f"{groups} layer groups are too few for depths {tuple(depths)!r}; use {least} or more")
    if _STEM.match(name):
        return 0
    match = _STAGE.match(name)
    if match is None:
        return groups + 1
    stage, block = int(match[1]), int(match[2] or 0)
    return (1, 2, 3 + block // BLOCKS_PER_GROUP, groups)[stage]


def layer_scale(name: str, depths: Sequence[int], rate: float, groups: int | None = None) -> float:
    """The factor on a parameter's learning rate: 1 for heads, times `rate` for each group below them."""
    groups = num_groups(depths) if groups is None else groups
    return rate ** (groups + 1 - layer_group(name, depths, groups))

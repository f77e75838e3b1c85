"""Nets small enough to trace in seconds, whose outputs depend on their images."""

import timm
import torch
from timm.layers import LayerNorm2d

from tests.helpers import randomize

TINY = {"num_classes": 5, "dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1)}
PATTERNS = {"wbmm_a": "WDWM", "wbmm_a_dense": "WDWW", "wbmm_a_hier": "WDWW"}


def tiny(name: str = "wbmm_a", **changes) -> torch.nn.Module:
    """A block a stage, every statistic far from its initial value, in eval mode."""
    model = randomize(timm.create_model(name, pattern=tuple(PATTERNS[name]), **{**TINY, **changes})).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LayerNorm2d):
                module.weight += 1  # around 0, as it comes, little of the image would pass
    return model

"""The names of the released files around any weights."""

import torch

from tests.reference import released_state_dict
from wbmm.models.state import convert_released


def released_names(state_dict):
    """Our names of a training-form segmentor turned into the released ones."""
    marker = {"downsample_layers.0.0.weight": torch.zeros(1)}
    names = {}
    for key, value in released_state_dict("wbmm_t_dense").items():
        for ours in convert_released({key: value, **marker}):
            names[ours] = key if ours != "stem.conv1.weight" else "downsample_layers.0.0.weight"
    renamed = {}
    for key, value in state_dict.items():
        inner = key.removeprefix("backbone.")
        if key.startswith("backbone.") and inner in names:
            value = value[:, :, None, None] if ".se." in inner and inner.endswith("weight") else value
            key = f"backbone.{names[inner]}"
        renamed[key] = value
    return renamed

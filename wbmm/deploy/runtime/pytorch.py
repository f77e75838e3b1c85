"""Models that PyTorch itself runs."""

from collections.abc import Sequence

import timm
import torch
import torch.nn as nn
from torch import Tensor

from wbmm.io.card import ModelCard, card_of, form_of
from wbmm.models.state import CheckpointError
from wbmm.text import first_line

from .runner import Runner

__all__ = ["pretrained", "torch_runner"]


def torch_runner(model: nn.Module, card: ModelCard | None = None, device: str = "cpu") -> Runner:
    """A PyTorch model as a runner."""
    card = card or card_of(model)
    model = model.to(device).eval()
    features = card.kind == "features"

    @torch.inference_mode()
    def forward(images: Tensor) -> Sequence[Tensor]:
        images = images.to(device)
        outputs = model.forward_intermediates(images, intermediates_only=True) if features else (model(images),)
        return [output.float().cpu() for output in outputs]

    return Runner(f"PyTorch, {form_of(model)}", card, forward, net=model)


def pretrained(name: str) -> nn.Module:
    """A model of timm's with its pretrained weights, or an error that says why they cannot be had."""
    try:
        return timm.create_model(name, pretrained=True)
    except Exception as error:  # no weights known, no network, a hub's own errors
        raise CheckpointError(
            f"{name}: its pretrained weights cannot be had ({first_line(error)}); give a file"
        ) from None

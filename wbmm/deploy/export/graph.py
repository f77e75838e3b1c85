"""What is exported: a model, with normalisation in front and plain tensors as outputs."""

from collections.abc import Sequence

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.deploy.card import ModelCard

__all__ = ["INPUT_NAME", "Features", "Graph", "Normalize"]

INPUT_NAME = "images"


class Normalize(nn.Module):
    """Bytes 0..255 to normalised images: one multiplication and one addition a channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (mean, std))
        self.register_buffer("scale", (1 / (255 * std)).float())
        self.register_buffer("shift", (-mean / std).float())

    def forward(self, images: Tensor) -> Tensor:
        return images.float() * self.scale + self.shift


class Features(nn.Module):
    """The maps of every stage of a model of timm's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if not hasattr(model, "forward_intermediates"):
            raise ValueError(f"a {type(model).__name__} has no forward_intermediates, so there are no feature maps")
        self.model = model

    def forward(self, images: Tensor) -> list[Tensor]:
        return self.model.forward_intermediates(images, intermediates_only=True)


class Graph(nn.Module):
    """What an exported file computes.

    Args:
        net: from normalised images to a tensor or several.
        card: what the file will say; its `input` tells whether normalisation is inside.
        output_names: one a tensor.
    """

    def __init__(self, net: nn.Module, card: ModelCard, output_names: Sequence[str]) -> None:
        super().__init__()
        self.net = net
        self.normalize = Normalize(card.mean, card.std) if card.input == "uint8" else nn.Identity()
        self.card = card
        self.output_names = list(output_names)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs = self.net(self.normalize(images))
        return outputs if isinstance(outputs, Tensor) else tuple(outputs)

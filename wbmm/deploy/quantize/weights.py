"""Weights stored in 16 bits, in a safetensors file; what is computed with them stays float32."""

from pathlib import Path

import torch
from torch import Tensor

from wbmm.deploy.card import ModelCard
from wbmm.deploy.files import load_model, write_weights

__all__ = ["Weights"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Weights:
    """What can be done with a model in a safetensors file.

    Args:
        path: the file.
        card: its card.
    """

    suffix = ".safetensors"
    runtime = "PyTorch"
    packages = ("safetensors",)

    def __init__(self, path: Path, card: ModelCard) -> None:
        self.path, self.card = path, card

    def convert(self, precision: str, path: Path) -> None:
        """Writes the weights rounded to fp16 or bf16."""
        dtype = DTYPES[precision]
        state_dict = {key: _round(key, value, dtype) for key, value in load_model(self.path).state_dict().items()}
        write_weights(state_dict, self.card.replace(dtype=str(dtype).removeprefix("torch.")), path, force=True)


def _round(key: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    if not value.is_floating_point():
        return value
    rounded = value.to(dtype)
    if not rounded.isfinite().all():
        raise ValueError(f"{key} has values above 65504, which float16 does not hold: take --precision bf16")
    return rounded

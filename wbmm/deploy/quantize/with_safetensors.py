"""Weights in FP16 or BF16, in a safetensors file that PyTorch runs in float32."""

from pathlib import Path

import torch

from wbmm.io.card import ModelCard
from wbmm.io.files import load_model, write_weights
from wbmm.io.weights import round_weights

__all__ = ["Safetensors"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Safetensors:
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
        state_dict = round_weights(load_model(self.path).state_dict(), dtype, "take --precision bf16")
        write_weights(state_dict, self.card.replace(dtype=str(dtype).removeprefix("torch.")), path, force=True)

"""The parity data: released key names, deterministic weights for them, and the logits that the released code gives."""

import json
import zlib
from pathlib import Path

import numpy as np
import torch

from wbmm.layers import DenseWBMM2d
from wbmm.layers.mixers import CompactMixer
from wbmm.models.state import convert_released

FOLDER = Path(__file__).parent / "released"


def fill(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The values of one tensor, which depend on its key and shape alone."""
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "running_var":
        return (1 + 0.5 * rng.random(shape)).astype(np.float32)
    noise = rng.standard_normal(shape)
    if leaf in ("running_mean", "bias", "beta", "relative_position_bias_table"):
        return (0.1 * noise).astype(np.float32)
    if leaf == "gamma":
        return (0.3 + 0.1 * noise).astype(np.float32)
    if len(shape) == 1:
        return (1 + 0.1 * noise).astype(np.float32)
    return (noise / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


def image(height: int, width: int) -> torch.Tensor:
    values = np.random.Generator(np.random.PCG64(0)).standard_normal((2, 3, height, width))
    return torch.from_numpy(values.astype(np.float32))


def released_state_dict(name: str) -> dict[str, torch.Tensor]:
    """What the released file of a model holds, with deterministic weights."""
    keys = json.loads((FOLDER / f"{name}.keys.json").read_text())
    state_dict = {}
    for key, shape in keys.items():
        if key.endswith(("num_batches_tracked", "relative_position_index")):
            state_dict[key] = torch.zeros(shape, dtype=torch.int64)
        else:
            state_dict[key] = torch.from_numpy(fill(key, tuple(shape)))
    return state_dict


def released_logits(name: str) -> tuple[tuple[int, int], torch.Tensor]:
    """(H, W) of the image and the released code's logits."""
    with np.load(FOLDER / f"{name}.npz") as data:
        return tuple(data["size"].tolist()), torch.from_numpy(data["logits"])


def released_fused_state_dict(fused):
    """A fused model's tensors under the names that the released code gives them."""
    marker = "downsample_layers.0.0.weight"
    names = {}
    for key in released_state_dict("wbmm_p"):
        for ours in convert_released({key: torch.zeros(1, 1), marker: torch.zeros(1)}):
            names.setdefault(ours, key)
    names["stem.conv1.weight"] = marker
    released = {}
    for key, value in fused.state_dict().items():
        block = key.split(".mixer.")[0].split(".ffn.")[0].replace(".blocks.", ".")
        mixer = fused.get_submodule(key.split(".mixer.")[0] + ".mixer") if ".mixer." in key else None
        windowed = isinstance(mixer, (CompactMixer, DenseWBMM2d))
        if key.endswith("mixer.table"):
            key = f"{block}.dwconv.R_fused"
        elif key.endswith("mixer.weight") and windowed:
            key = f"{block}.dwconv.M_fused"
        elif key.endswith("mixer.bias"):
            key = f"{block}.dwconv.{'bias_fused' if windowed else 'bias'}"
        elif key.endswith("ffn.gamma"):
            key, value = f"{block}.act.1.gamma", value.view(1, 1, 1, -1)
        elif key.endswith("ffn.fc2.bias"):
            key = f"{block}.pwconv2.0.bias"
        else:
            key = names[key]
        released[key] = value
    return released

"""What several tests of the OpenMMLab side need."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.helpers import randomize
from tests.reference import FOLDER, released_state_dict
from wbmm.io import reader
from wbmm.mm.backbone import WBMMBackbone
from wbmm.mm.mm_checkpoint import MMCheckpoint
from wbmm.ops import relative_index

ROOT = Path(__file__).parents[2]
NARROW = {"arch": "wbmm_a_hier", "dims": (8, 16, 32, 64)}


def backbone(seed: int = 0, **kwargs) -> WBMMBackbone:
    """A narrow backbone in eval mode with every parameter and statistic far from its initial value."""
    return randomize(WBMMBackbone(**{**NARROW, **kwargs}), seed).eval()


@contextmanager
def on_meta():
    """What is built inside takes no memory. The operator keeps each index that it builds, so these come first."""
    for side in (7, 14):
        relative_index((side, side))
    with torch.device("meta"):
        yield


def checkpoint(model: torch.nn.Module, **meta) -> dict:
    """What a runner would save of a model with this backbone and a one-layer head."""
    state_dict = {f"backbone.{key}": value for key, value in model.state_dict().items()}
    state_dict["decode_head.conv_seg.weight"] = torch.arange(128.0).view(2, 64, 1, 1)
    return {"meta": meta, "state_dict": state_dict, "optimizer": {"state": {}}, "message_hub": {}}


@torch.no_grad()
def largest_difference(before: dict, after: dict, images: torch.Tensor) -> float:
    """Between the maps that the backbones of two checkpoints give."""
    maps = (MMCheckpoint(contents).backbone(images) for contents in (before, after))
    return max((a - b).abs().max().item() for a, b in zip(*maps, strict=True))


def released_dense_backbone(name: str, values: bool = True) -> dict[str, torch.Tensor]:
    """The backbone's part of a released segmentor: the classifier's names, and norm0..3 in place of its head.

    Args:
        name: the classifier.
        values: deterministic ones; without, zeros that take no memory.
    """
    if values:
        released = released_state_dict(name)
    else:
        keys = json.loads((FOLDER / f"{name}.keys.json").read_text())
        released = {key: torch.zeros(()).expand(shape) for key, shape in keys.items()}
    state_dict = {key: value for key, value in released.items() if not key.startswith(("head.", "norm."))}
    generator = torch.Generator().manual_seed(1)
    for i, key in enumerate(("0.4", "1.1", "2.1", "3.1")):
        dim = state_dict[f"downsample_layers.{key}.weight"].numel()
        state_dict[f"norm{i}.weight"] = torch.rand(dim, generator=generator) + 0.5
        state_dict[f"norm{i}.bias"] = torch.randn(dim, generator=generator)
    return state_dict


def tool(name: str, *arguments, **kwargs) -> subprocess.CompletedProcess:
    """Runs one of tools/, as a user does."""
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **kwargs)


def logged(work_dir: Path) -> list[list[dict]]:
    """What each start of a run logged, in order, a dict an iteration."""
    files = sorted(work_dir.glob("*/vis_data/scalars.json"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def count_reads(monkeypatch) -> list[str]:
    """A list that gets the name of each checkpoint file that is read from now on, by whoever reads it."""
    names, original = [], reader._read_zip

    def note(file):
        names.append(Path(file.name).name)
        return original(file)

    monkeypatch.setattr(reader, "_read_zip", note)
    return names

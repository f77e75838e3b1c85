"""Small folders of pictures, and batches to compare."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from wbmm.train.config import TrainConfig, config_from_dict


def picture(seed: int, size: int = 40) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size + 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png_bytes(seed: int) -> bytes:
    buffer = io.BytesIO()
    picture(seed).save(buffer, "png")
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path):
    """Three classes, 8 training and 3 validation images each."""
    for split, count in (("train", 8), ("val", 3)):
        for label, name in enumerate(("ant", "bee", "cat")):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                picture(1000 * label + i).save(tmp_path / split / name / f"{i}.png")
    return tmp_path


def config(root=None, **changes) -> TrainConfig:
    data = {"root": str(root) if root else None, "size": 32, "workers": 0, **changes.pop("data", {})}
    return config_from_dict({"data": data, "batch": 4, "global_batch": 4, **changes})


def collect(loader, epoch=0, start=0):
    return [batch for step in loader.epoch(epoch, start) for batch in step]


def assert_same(left, right):
    assert len(left) == len(right) > 0
    for (images, labels), (others, other_labels) in zip(left, right, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)

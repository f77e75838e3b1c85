"""A small model trained to tell four colours, images of them, and the model's files in several forms."""

from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image

import wbmm
from tests.deploy.colours import COLOURS, write_images
from wbmm.deploy.card import ModelCard
from wbmm.deploy.describe import card_of
from wbmm.deploy.export import export_model
from wbmm.deploy.files import save_model

ARCHITECTURE = {
    "dims": (8, 16, 32, 64),
    "depths": (1, 1, 2, 1),
    "pattern": ("D", "W", "WD", "W"),
    "ls_init_value": 0.1,
}


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """A folder with `train` (16 images of each class) and `val` (8)."""
    root = tmp_path_factory.mktemp("images")
    write_images(root / "train", 16, 0)
    write_images(root / "val", 8, 1000)
    return root


@pytest.fixture(scope="session")
def trained(images) -> torch.nn.Module:
    """The model in training form, after real optimiser steps."""
    torch.manual_seed(0)
    model = timm.create_model("wbmm_a", num_classes=4, **ARCHITECTURE)
    card = card_of(model.eval()).replace(input_size=(3, 32, 32), crop_pct=1.0, class_names=list(COLOURS))
    model.card = card
    transform, files = card.transform(), sorted((images / "train").glob("*/*.png"))
    inputs = torch.stack([transform(Image.open(file)) for file in files])
    labels = torch.tensor([list(COLOURS).index(file.parent.name) for file in files])
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=2e-3)
    for step in range(24):
        batch = torch.arange(step % 4, len(files), 4)
        loss = F.cross_entropy(model(inputs[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="session")
def card(trained) -> ModelCard:
    return trained.card


@pytest.fixture(scope="session")
def files(trained, tmp_path_factory) -> dict[str, Path]:
    """The same model as training, compact, dense, ONNX and OpenVINO files."""
    folder = tmp_path_factory.mktemp("files")
    found = {"training": save_model(trained, folder / "training.pth")}
    for form in ("compact", "dense"):
        fused = wbmm.fuse(trained, form)
        fused.card = trained.card
        found[form] = save_model(fused, folder / f"{form}.safetensors")
    for name, suffix in (("onnx", ".onnx"), ("openvino", ".xml")):
        found[name] = export_model(trained, folder / f"{name}{suffix}", trained.card, dynamic_batch=True).path
    return found


@pytest.fixture
def command():
    """Runs `wbmm ...` in this process and gives its exit code."""
    from wbmm.cli import main

    return lambda *arguments: main([str(argument) for argument in arguments])

"""Weights for other classes than they were trained on: only when asked."""

import pytest
import timm
import torch

import wbmm
from wbmm.io.card import ModelCard
from wbmm.models.state import CheckpointError

DIMS = (8, 8, 16, 16)


@pytest.fixture
def file(tmp_path):
    model = timm.create_model("wbmm_a", num_classes=3, dims=DIMS)
    names = ["ant", "bee", "cat"]
    card = ModelCard("wbmm_a", args={"dims": list(DIMS)}, num_classes=3, input_size=(3, 32, 32), class_names=names)
    return wbmm.save_model(model, tmp_path / "three.safetensors", card)


def test_a_model_for_other_classes(file, tmp_path):
    three, five = wbmm.load_model(file), wbmm.load_model(file, num_classes=5)
    assert five(torch.zeros(1, 3, 32, 32)).shape == (1, 5)
    assert torch.equal(five.stem.conv1.weight, three.stem.conv1.weight)
    assert (five.card.num_classes, five.card.class_names) == (5, None)
    same = wbmm.load_model(file, num_classes=3)
    assert torch.equal(same.head.fc.weight, three.head.fc.weight)
    assert same.card.class_names == ["ant", "bee", "cat"]
    again = wbmm.load_model(wbmm.save_model(five, tmp_path / "five.safetensors"))
    assert again.card.num_classes == 5


def test_a_fused_model_cannot_be_fine_tuned(file, tmp_path):
    fused = wbmm.save_model(wbmm.fuse(wbmm.load_model(file)), tmp_path / "fused.safetensors")
    with pytest.raises(CheckpointError, match=r"is fused .* cannot be trained on other classes"):
        wbmm.load_model(fused, num_classes=5)
    with pytest.raises(ValueError, match="num_classes 0: give 1 or more"):
        wbmm.load_model(file, num_classes=0)


def test_weights_for_other_classes_only_when_asked(file):
    model = timm.create_model("wbmm_a", num_classes=7, dims=DIMS)
    before = model.head.fc.weight.clone()
    with pytest.raises(CheckpointError, match="does not fit the model"):
        wbmm.load_weights(model, file)
    wbmm.load_weights(model, file, new_classifier=True)
    assert torch.equal(model.head.fc.weight, before)
    assert torch.equal(model.stem.conv1.weight, wbmm.load_model(file).stem.conv1.weight)


def test_a_new_classifier_excuses_nothing_else(file):
    model = timm.create_model("wbmm_a", num_classes=7, dims=(8, 8, 16, 24))
    with pytest.raises(CheckpointError, match="does not fit the model"):
        wbmm.load_weights(model, file, new_classifier=True)


def test_the_folder_of_a_run(file, tmp_path):
    (tmp_path / "run").mkdir()
    model = wbmm.load_model(file)
    wbmm.save_model(model, tmp_path / "run" / "last.pt")
    assert wbmm.load_model(tmp_path / "run").card.num_classes == 3
    wbmm.load_weights(timm.create_model("wbmm_a", num_classes=3, dims=DIMS), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"is a folder without best\.pt or last\.pt"):
        wbmm.load_model(tmp_path)

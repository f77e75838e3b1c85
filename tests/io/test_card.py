"""A file's description: every field is checked, and it cannot make the program read or fetch anything else."""

import dataclasses
import json
import socket

import pytest
import timm
import torch
from safetensors.torch import save_file

import wbmm
from tests.fuzz.mutate import CARD_JUNK, HOSTILE_ARGS
from tests.helpers import randomize
from wbmm.io.card import ModelCard, card_of
from wbmm.io.picture_pipeline import MOST_PIXELS, PicturePipeline
from wbmm.io.reader import METADATA_KEY
from wbmm.models.state import CheckpointError

DIMS = [8, 16, 32, 64]


def make():
    return randomize(timm.create_model("wbmm_a", dims=DIMS, num_classes=4)).eval()


def described(path, **changes):
    """A file whose description says what a stranger wants."""
    model = make()
    card = json.loads(card_of(model).to_json()) | changes
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, path, {METADATA_KEY: json.dumps(card)})
    return path


@pytest.fixture
def no_network(monkeypatch):
    tried = []

    def refuse(*args, **_):
        tried.append(args)
        raise OSError("no network in this test")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tried


@pytest.mark.parametrize("args", HOSTILE_ARGS, ids=lambda args: next(iter(args)))
def test_arguments_that_reach_out_or_ask_for_too_much(tmp_path, args, no_network):
    path = described(tmp_path / "a.safetensors", args={"dims": DIMS, **args})
    with pytest.raises(CheckpointError, match=r"a.safetensors: its description|pattern") as caught:
        wbmm.load_model(path)
    assert len(str(caught.value)) < 1000
    assert not no_network


def test_the_same_in_the_checkpoint_of_a_run(tmp_path, no_network):
    data = {"in_chans": 3, "size": 64, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop_pct": 1.0}
    for args in HOSTILE_ARGS:
        config = {"model": {"name": "wbmm_a", "args": {"dims": DIMS, **args}}, "data": data}
        torch.save({"model": make().state_dict(), "config": config, "num_classes": 4}, tmp_path / "a.pt")
        with pytest.raises(CheckpointError):
            wbmm.load_model(tmp_path / "a.pt")
    assert not no_network


@pytest.mark.parametrize(
    "name", ["hf-hub:someone/model", "local-dir:/tmp", "https://host/model", "os.system", "wbmm_q"]
)
def test_names_that_are_no_model(tmp_path, name, no_network):
    path = described(tmp_path / "a.safetensors", model=name)
    with pytest.raises(CheckpointError, match="timm knows no model"):
        wbmm.load_model(path)
    assert not no_network


@pytest.mark.parametrize("name", ["convnext_xxlarge", "vit_giant_patch14_224", "wbmm_b"])
def test_a_description_of_a_far_larger_model(tmp_path, name):
    """The file holds 0.1 million numbers: no memory is taken for 800 million."""
    path = described(tmp_path / "a.safetensors", model=name, args={})
    with pytest.raises(CheckpointError, match=r"is of a model of .* million"):
        wbmm.load_model(path)


def test_what_one_trusts_can_be_passed(tmp_path):
    path = described(tmp_path / "a.safetensors", args={"dims": DIMS, "scriptable": False})
    with pytest.raises(CheckpointError, match=r"'scriptable'.*load_model\(file, args="):
        wbmm.load_model(path)
    assert wbmm.load_model(path, args={"scriptable": False}).num_classes == 4


@pytest.mark.parametrize("field", json.loads(ModelCard(model="wbmm_a").to_json()))
def test_every_field_refuses_junk(field):
    """Whatever stands in a field: the card is refused in one line, or it can be used."""
    good = json.loads(ModelCard(model="wbmm_a").to_json())
    errors = []
    for junk in CARD_JUNK:
        try:
            card = ModelCard.from_json(json.dumps({**good, field: junk}))
        except CheckpointError as error:
            errors.append(str(error))
        else:
            card.describe()
            card.describe_transform()
    assert len(errors) >= 5
    for text in errors:
        assert field in text or "values of mean" in text or "classes and counts" in text
        assert len(text.splitlines()) == 1


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(PicturePipeline)])
def test_every_field_of_a_test_pipeline_refuses_junk(field):
    """Whatever stands in a field: the card is refused in one line, or sizes follow from it."""
    good = json.loads(ModelCard(model="wbmm_a", kind="segmentor", pictures=PicturePipeline()).to_json())
    errors = []
    for junk in CARD_JUNK:
        try:
            card = ModelCard.from_json(json.dumps({**good, "pictures": {**good["pictures"], field: junk}}))
        except CheckpointError as error:
            errors.append(str(error))
        else:
            assert card == ModelCard.from_json(card.to_json())
            width, height = card.pictures.padded(*card.pictures.resized(40, 30))
            assert 0 < width * height <= 2 * MOST_PIXELS
            card.describe_transform()
    assert len(errors) >= 5
    for text in errors:
        assert f"pictures.{field}" in text
        assert len(text.splitlines()) == 1


def test_a_test_pipeline_that_would_take_all_memory():
    for values in ({"scale": [16384, 16384]}, {"pad_size": [10**9, 1]}, {"scale_factor": [1e6, 1.0]}):
        with pytest.raises(CheckpointError, match="valid"):
            PicturePipeline.from_json(values)
    with pytest.raises(ValueError, match="would enlarge 4000x3000 to 256000x192000"):
        PicturePipeline(scale_factor=(64, 64)).resized(4000, 3000)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"x"', "[" * 100_000, '{"model": "a", "model": 3}', "{}"])
def test_text_that_is_no_description(text):
    with pytest.raises(CheckpointError):
        ModelCard.from_json(text)

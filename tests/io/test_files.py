"""Model files: what `save_model` writes, `load_model` gives back; every other checkpoint is recognised or refused."""

import json
import logging
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import wbmm
from tests.helpers import randomize
from tests.reference import image, released_logits, released_state_dict
from wbmm.io.card import ModelCard
from wbmm.io.files import open_checkpoint
from wbmm.models.state import CheckpointError

NARROW = {"dims": (8, 16, 32, 64), "num_classes": 10}
IMAGES = torch.randn(2, 3, 60, 75, generator=torch.Generator().manual_seed(0))


def make(name="wbmm_a", **kwargs):
    return randomize(timm.create_model(name, **{**NARROW, **kwargs})).eval()


def same(a, b):
    with torch.no_grad():
        torch.testing.assert_close(a(IMAGES), b(IMAGES), rtol=0, atol=1e-6)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("form", ["training", "compact", "dense"])
def test_a_saved_model_comes_back(tmp_path, form, suffix, caplog):
    model = make("wbmm_a_hier")
    model = model if form == "training" else wbmm.fuse(model, form)
    path = wbmm.save_model(model, tmp_path / f"a{suffix}")
    with caplog.at_level(logging.INFO):
        loaded = wbmm.load_model(path)
    same(loaded, model)
    assert loaded.card.form == form
    assert not loaded.training
    assert form in caplog.text
    again = wbmm.load_model(wbmm.save_model(loaded, tmp_path / f"b{suffix}"))
    same(again, model)


def test_what_the_weights_do_not_tell_is_in_the_card(tmp_path):
    model = make(window_size=(5, 3), padding_mode="replicate", ls_init_value=None, in_chans=1)
    images = IMAGES[:, :1]
    for net in (model, wbmm.fuse(model), wbmm.fuse(model, "dense")):
        loaded = wbmm.load_model(wbmm.save_model(net, tmp_path / "a.safetensors", force=True))
        with torch.no_grad():
            torch.testing.assert_close(loaded(images), model(images), rtol=0, atol=1e-5)
    assert loaded.card.input_size[0] == 1
    assert len(loaded.card.mean) == 1


@pytest.mark.parametrize(("name", "args"), [("wbmm_a_dense", {"mixer": "dw5"}), ("unireplknet_a", {})])
def test_baselines(tmp_path, name, args):
    model = make(name, **args)
    for i, net in enumerate((model, wbmm.fuse(model))):
        same(wbmm.load_model(wbmm.save_model(net, tmp_path / f"{i}.pth")), model)
        torch.save(net.state_dict(), tmp_path / f"bare{i}.pth")
        same(wbmm.load_model(tmp_path / f"bare{i}.pth"), model)


def test_the_file_describes_itself(tmp_path):
    wbmm.save_model(wbmm.fuse(make()), tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        card = json.loads(file.metadata()["wbmm"])
    assert (card["model"], card["form"], card["num_classes"]) == ("wbmm_a", "compact", 10)
    assert card["input_size"] == [3, 224, 224]
    assert {"wbmm", "torch", "timm", "python"} <= card["versions"].keys()


def test_a_model_that_cannot_say_what_it_is(tmp_path):
    with pytest.raises(ValueError, match=r"Linear.*card=ModelCard"):
        wbmm.save_model(torch.nn.Linear(2, 2), tmp_path / "a.safetensors")


def test_other_models_of_timm(tmp_path):
    model = timm.create_model("convnext_atto", num_classes=4).eval()
    loaded = wbmm.load_model(wbmm.save_model(model, tmp_path / "a.pth"))
    same(loaded, model)


@pytest.mark.parametrize("name", ["wbmm_p", "wbmm_t_dense"])
def test_a_released_file_is_recognised(tmp_path, name):
    torch.save({"model": released_state_dict(name)}, tmp_path / "a.pth")
    model = wbmm.load_model(tmp_path / "a.pth")
    assert (model.card.model, model.card.form, model.card.num_classes) == (name, "training", 1000)
    size, expected = released_logits(name)
    with torch.no_grad():
        torch.testing.assert_close(model(image(*size)), expected, rtol=1e-4, atol=1e-5)


def test_an_architecture_outside_the_zoo_is_read_off_its_weights(tmp_path):
    model = make(pattern=("D", "W", "MD", "W"), depths=(1, 1, 2, 1), window_size=[7, 5, 7, 7])
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, tmp_path / "a.safetensors")
    loaded = wbmm.load_model(tmp_path / "a.safetensors")
    same(loaded, model)
    assert loaded.card.args["pattern"] == ["D", "W", "MD", "W"]
    fused = wbmm.fuse(model)
    torch.save(fused.state_dict(), tmp_path / "fused.pth")
    same(wbmm.load_model(tmp_path / "fused.pth"), model)


def test_a_half_precision_file_runs_in_float32(tmp_path):
    model = wbmm.fuse(make())
    halves = {key: value.half() for key, value in model.state_dict().items()}
    torch.save(halves, tmp_path / "a.pth")
    loaded, card = open_checkpoint(tmp_path / "a.pth")
    assert card.dtype == "float16"
    assert next(loaded.parameters()).dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(loaded(IMAGES), model(IMAGES), rtol=0.02, atol=0.02)


def test_a_training_checkpoint_prefers_its_average(tmp_path):
    weights, average = make(), randomize(timm.create_model("wbmm_a", **NARROW), seed=5).eval()
    config = {
        "model": {"name": "wbmm_a", "args": {"dims": [8, 16, 32, 64]}},
        "data": {
            "in_chans": 3,
            "size": 56,
            "mean": [0.1] * 3,
            "std": [0.2] * 3,
            "interpolation": "bilinear",
            "crop_pct": 0.9,
        },
    }
    names = [f"class {i}" for i in range(10)]
    contents = {"model": weights.state_dict(), "ema": average.state_dict(), "config": config}
    torch.save({**contents, "num_classes": 10, "class_names": names}, tmp_path / "last.pt")
    same(wbmm.load_model(tmp_path / "last.pt"), average)
    model = wbmm.load_model(tmp_path / "last.pt", ema=False)
    same(model, weights)
    assert (model.card.input_size, model.card.interpolation) == ((3, 56, 56), "bilinear")
    assert model.card.class_names == names


def test_names_that_do_not_fit(tmp_path):
    path = wbmm.save_model(make(), tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=r"says that it is a wbmm_a, not a wbmm_t"):
        wbmm.load_model(path, model="wbmm_t")
    torch.save(timm.create_model("wbmm_a").state_dict(), tmp_path / "b.pth")
    with pytest.raises(CheckpointError, match=r"looks like wbmm_a .*, not like wbmm_f"):
        wbmm.load_model(tmp_path / "b.pth", model="wbmm_f")
    torch.save({"a.weight": torch.ones(2)}, tmp_path / "c.pth")
    with pytest.raises(CheckpointError, match=r"a\.weight.*give the model's name"):
        wbmm.load_model(tmp_path / "c.pth")
    with pytest.raises(CheckpointError, match="timm knows no model 'wbmm_q'"):
        wbmm.load_model(tmp_path / "c.pth", model="wbmm_q")


def test_a_file_that_misses_keys_says_which(tmp_path):
    state_dict = timm.create_model("wbmm_a").state_dict()
    del state_dict["stages.1.blocks.0.norm.bias"]
    torch.save(state_dict, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=r"stages\.1\.blocks\.0\.norm\.bias"):
        wbmm.load_model(tmp_path / "a.pth")


def test_card_survives_json_and_ignores_what_it_does_not_know():
    card = ModelCard(model="wbmm_a", class_names=["a", "b"], num_classes=2)
    values = json.loads(card.to_json()) | {"of_a_later_version": 1}
    assert ModelCard.from_json(json.dumps(values)) == card
    for text in ("{", "[]", '{"form": "compact"}', '{"model": "a", "kind": "poem"}'):
        with pytest.raises(CheckpointError, match="description"):
            ModelCard.from_json(text)


def test_the_transform_is_that_of_training():
    from PIL import Image

    from wbmm.data.augment import eval_transform
    from wbmm.train.config import TrainConfig

    cfg = TrainConfig()
    cfg.data.size = 64
    photo = Image.effect_noise((90, 120), 80).convert("RGB")
    card = ModelCard(model="wbmm_a", input_size=(3, 64, 64))
    torch.testing.assert_close(card.transform()(photo), eval_transform(cfg.data)(photo))
    pixels = card.replace(input="uint8").transform()(photo)
    assert pixels.dtype == torch.uint8
    assert "64x64" in card.describe_transform()


def test_files_are_whole_or_not_there(tmp_path):
    model = wbmm.fuse(make())
    path = wbmm.save_model(model, tmp_path / "a.safetensors")
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"a\.safetensors exists already.*force"):
        wbmm.save_model(model, path)
    assert path.read_bytes() == before
    wbmm.save_model(model, path, force=True)
    with pytest.raises(ValueError, match="there is no folder"):
        wbmm.save_model(model, tmp_path / "nowhere" / "a.pth")
    with pytest.raises(ValueError, match=r"a\.txt: a model file ends with"):
        wbmm.save_model(model, tmp_path / "a.txt")
    assert [p.name for p in Path(tmp_path).iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_file_is_read_once_and_its_names_converted_once(suffix, tmp_path, count_reads):
    ours, released = tmp_path / f"ours{suffix}", tmp_path / f"released{suffix}"
    wbmm.save_model(timm.create_model("wbmm_a", num_classes=10).eval(), ours)
    state_dict = released_state_dict("wbmm_p")
    if suffix == ".pth":
        torch.save(state_dict, released)
    else:
        save_file({key: value.contiguous() for key, value in state_dict.items()}, released)
    for path, converted in ((ours, 0), (released, 1)):
        with count_reads() as counts:
            model = wbmm.load_model(path)
        assert counts == {"read": 1, "state dict found": 1, "names converted": converted, "hashed": 0}
        with count_reads() as counts:
            wbmm.load_weights(model, path)
        assert counts == {"read": 1, "state dict found": 1, "names converted": converted, "hashed": 0}

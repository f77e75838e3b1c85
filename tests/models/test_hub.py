"""Weights by name: published ones where there is no network, and files that come with the project."""

import copy
import dataclasses
import warnings
from types import SimpleNamespace

import pytest
import timm
import torch

from wbmm import cli
from wbmm.deploy.runtime import open_runner
from wbmm.io.card import ModelCard, card_of
from wbmm.io.files import load_model, save_model
from wbmm.models import hub, wbmm
from wbmm.models.state import CheckpointError
from wbmm.zoo import load_zoo


@pytest.fixture
def asked(monkeypatch):
    """No cache and no network; the addresses that were asked for."""
    found = []

    def refuse(request, timeout):
        found.append((request.full_url, timeout))
        raise OSError("no route")

    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(hub.urllib.request, "urlopen", refuse)
    return found


def test_one_retry_then_one_line_with_the_address_and_file(asked):
    with pytest.raises(CheckpointError) as error:
        timm.create_model("wbmm_t", pretrained=True)
    text = str(error.value)
    assert len(asked) == 2
    assert asked[0][0] in text
    assert asked[0][0].endswith("/wansong-s/WBMM/resolve/main/wbmm_t_in1k_224_w7.pth")
    assert 'file="wbmm_t_in1k_224_w7.pth"' in text
    assert "no route" in text
    assert "\n" not in text


def test_a_model_without_published_weights_asks_nobody(asked):
    assert hub.published_weights("wbmm_f") is None
    assert hub.published_weights("wbmm_t.other") is None
    assert asked == []


def test_what_is_in_the_cache_needs_no_network(asked, monkeypatch):
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: "/cache/file.pth")
    assert str(hub.published_weights("wbmm_t")) == "/cache/file.pth"
    assert asked == []


def test_the_weights_of_timms_own_models_are_asked_for_at_their_place(asked):
    with pytest.raises(
        CheckpointError, match=r"https://.*/timm/convnext_atto\.d2_in1k/resolve/main/model\.safetensors"
    ):
        hub.published_weights("convnext_atto.d2_in1k")
    assert hub.published_weights("convnext_atto_wbmm") is None


MEAN, STD = (0.4, 0.4, 0.4), (0.2, 0.2, 0.2)
ENTRY = {"local": "wbmm_a.small.safetensors", "num_classes": 3, "size": 64, "mean": MEAN, "std": STD}


@pytest.fixture
def local(tmp_path, monkeypatch):
    """A folder of weights, and a zoo whose wbmm_a has an entry for a file in it, which is not there yet."""
    zoo = load_zoo() | {"wbmm_a": dataclasses.replace(load_zoo()["wbmm_a"], weights={"small": ENTRY})}
    for module in (hub, wbmm):
        monkeypatch.setattr(module, "weights_folder", lambda: tmp_path)
    monkeypatch.setattr(hub, "load_zoo", lambda: zoo)
    registry = timm.models._registry
    for name in ("_model_entrypoints", "_model_pretrained_cfgs", "_model_default_cfgs", "_model_has_pretrained"):
        monkeypatch.setattr(registry, name, copy.copy(getattr(registry, name)))
    monkeypatch.setattr(wbmm, "default_cfgs", timm.models.generate_default_cfgs(wbmm._zoo_cfgs(zoo["wbmm_a"])))
    with warnings.catch_warnings(action="ignore"):  # the name is there already
        wbmm._register(zoo["wbmm_a"])
    return SimpleNamespace(folder=tmp_path, file=tmp_path / ENTRY["local"])


def _write(path) -> torch.nn.Module:
    model = timm.create_model("wbmm_a", num_classes=3)
    names = ["ant", "bee", "cat"]
    save_model(
        model, path, ModelCard("wbmm_a", num_classes=3, input_size=(3, 64, 64), mean=MEAN, std=STD, class_names=names)
    )
    return model


def test_a_file_of_the_project_is_found_without_a_network(local, asked):
    trained = _write(local.file)
    model = timm.create_model("wbmm_a.small", pretrained=True)
    assert model.num_classes == 3
    assert torch.equal(model.head.fc.weight, trained.head.fc.weight)
    card = card_of(model)
    assert (card.input_size, card.mean, card.std) == ((3, 64, 64), MEAN, STD)
    assert hub.published_weights("wbmm_a") == hub.published_weights("wbmm_a.small") == local.file
    assert hub.published_weights("wbmm_a.other") is None
    runner = open_runner("wbmm_a.small")
    assert runner.card.class_names == ["ant", "bee", "cat"]
    assert asked == []


def test_other_classes_get_a_new_classifier(local):
    trained = _write(local.file)
    model = timm.create_model("wbmm_a.small", pretrained=True, num_classes=7)
    assert model.head.fc.weight.shape[0] == 7
    assert torch.equal(model.stem.conv1.weight, trained.stem.conv1.weight)


def test_without_the_tag_a_model_stays_what_it_was(local):
    _write(local.file)
    with torch.device("meta"):
        assert timm.create_model("wbmm_a").num_classes == 1000
    assert timm.get_pretrained_cfg("wbmm_a").input_size == (3, 224, 224)


def test_a_file_of_the_project_that_is_not_there_is_named(local):
    assert hub.published_weights("wbmm_a") is None
    with pytest.raises(CheckpointError, match=r"wbmm_a: its weights should be in .*wbmm_a\.small\.safetensors"):
        timm.create_model("wbmm_a.small", pretrained=True)


def test_the_zoo_says_of_its_own_files_what_their_cards_say():
    for name, model in load_zoo().items():
        for tag, source in model.weights.items():
            file = hub.local_weights(f"{name}.{tag}") if "local" in source else None
            if file is None:
                continue
            card, cfg = load_model(file).card, timm.get_pretrained_cfg(f"{name}.{tag}")
            assert (card.model, card.num_classes, card.input_size) == (name, cfg.num_classes, cfg.input_size)
            assert (card.mean, card.std) == (tuple(cfg.mean), tuple(cfg.std))
            assert (card.crop_pct, card.interpolation) == (cfg.crop_pct, cfg.interpolation)
            assert (card.form, file.stat().st_size < 10e6) == ("training", True)


def test_the_weights_of_the_project_go_through_every_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert load_model("wbmm_a.tiny50").num_classes == 50
    assert cli.main(["reparam", "wbmm_a.tiny50", "fused.safetensors"]) == 0
    half = ["--precision", "fp16", "--format", "safetensors"]
    assert cli.main(["quantize", "wbmm_a.tiny50", *half]) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"fused.safetensors", "wbmm_a.tiny50.fp16.safetensors"}
    assert cli.main(["quantize", "wbmm_a.tiny50.fp16.safetensors", *half]) == 1
    assert "is in float16 already" in capsys.readouterr().err
    pytest.importorskip("onnxruntime")
    assert cli.main(["export", "wbmm_a", "--format", "onnx"]) == 1  # without a tag, a name has no weights
    assert "say --random-weights" in capsys.readouterr().err

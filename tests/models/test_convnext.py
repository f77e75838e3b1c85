"""ConvNeXt with WBMM: the paper's size, timm's contract, files."""

import pytest
import timm
import torch
import torch.nn as nn

import wbmm
from tests.helpers import randomize
from wbmm.layers import WBMM2d
from wbmm.models.convnext import alternating_pattern
from wbmm.models.costs import build_on_meta, count_macs, count_params

SMALL = {"dims": (8, 16, 24, 32), "depths": (2, 1, 3, 1)}


def small(**kwargs):
    return timm.create_model("convnext_tiny_wbmm", **{**SMALL, "num_classes": 5, **kwargs})


@pytest.mark.parametrize(("name", "params", "flops"), [("convnext_tiny", 28.6, 4.5), ("convnext_tiny_wbmm", 29.1, 4.4)])
def test_the_papers_size(name, params, flops):
    model = build_on_meta(name)
    assert round(count_params(model) / 1e6, 1) == params
    assert round(count_macs(model, (224, 224))[""] / 1e9, 1) == flops


def test_the_papers_pattern():
    assert alternating_pattern((3, 3, 9, 3)) == ("WDW", "WDW", "WDWDWDWDW", "WWW")
    model = build_on_meta("convnext_tiny_wbmm")
    letters = [
        "".join("W" if isinstance(block.conv_dw, WBMM2d) else "D" for block in stage.blocks) for stage in model.stages
    ]
    assert letters == ["WDW", "WDW", "WDWDWDWDW", "WWW"]
    assert len(model.replaced.replaced) == 18


def test_another_pattern_and_window():
    model = small(pattern="W", window_size=5)
    layers = [module for module in model.modules() if isinstance(module, WBMM2d)]
    assert len(layers) == 7
    assert {layer.window for layer in layers} == {(5, 5)}
    atto = timm.create_model("convnext_atto_wbmm")
    assert [entry.now for entry in atto.replaced.replaced][:2] == ["WBMM 7x7", "3x3 depthwise"]


def test_timms_arguments():
    model = small(in_chans=1, num_classes=7, drop_path_rate=0.3, drop_rate=0.1, conv_mlp=True, use_grn=True)
    assert model(torch.randn(2, 1, 45, 64)).shape == (2, 7)
    assert model.stages[-1].blocks[-1].drop_path.drop_prob == pytest.approx(0.3)
    model.reset_classifier(3)
    assert model.get_classifier().out_features == 3
    model.set_grad_checkpointing()
    model(torch.randn(2, 1, 32, 32)).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    features = small(features_only=True, out_indices=(1, 3))
    assert [part.shape[1:] for part in features(torch.randn(1, 3, 64, 96))] == [(16, 8, 12), (32, 2, 3)]
    assert small(num_classes=0)(torch.randn(1, 3, 32, 32)).shape == (1, 32)


def test_state_dict_round_trip():
    source, target = randomize(small()).eval(), small().eval()
    target.load_state_dict(source.state_dict())
    x = torch.randn(1, 3, 40, 56)
    with torch.no_grad():
        torch.testing.assert_close(target(x), source(x))


@pytest.mark.parametrize("form", ["training", "compact", "dense"])
def test_model_files(tmp_path, form):
    model = randomize(timm.create_model("convnext_atto_wbmm", num_classes=5)).eval()
    if form != "training":
        model = wbmm.fuse(model, form)
    loaded = wbmm.load_model(wbmm.save_model(model, tmp_path / "a.safetensors"))
    assert loaded.card.form == form
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(x))


def test_the_benchmark_builds_it():
    from wbmm.bench.setting import build

    model = build("convnext_tiny_wbmm:compact")
    assert not any(isinstance(module, WBMM2d) for module in model.modules())
    assert isinstance(model.stages[0].blocks[1].conv_dw, nn.Conv2d)


def test_what_there_is_not():
    with pytest.raises(RuntimeError, match="No pretrained weights exist for convnext_tiny_wbmm"):
        timm.create_model("convnext_tiny_wbmm", pretrained=True)
    with pytest.raises(ValueError, match="output_stride 16: expected 32"):
        small(output_stride=16)
    with pytest.raises(ValueError, match="expected one string for each of 4 stages"):
        small(pattern=("W", "W", "W", "W"))

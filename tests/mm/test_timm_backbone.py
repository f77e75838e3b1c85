"""timm's models as backbones: maps, training options, starting weights, layer decay, a segmentor."""

import argparse

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F

pytest.importorskip("mmengine")

from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS

import wbmm
import wbmm.mm.register
from tests.helpers import randomize
from tests.mm.helpers import Bomb, on_meta
from wbmm.mm.backbone import TimmBackbone, load_timm_weights
from wbmm.models.state import CheckpointError

ARGS = {"dims": (8, 16, 24, 32), "depths": (2, 1, 3, 1)}
ARCHS = ["convnext_tiny", "convnext_tiny_wbmm"]


def backbone(arch="convnext_tiny_wbmm", **kwargs):
    return randomize(TimmBackbone(arch, **{"model_args": ARGS, **kwargs}))


def classifier(arch="convnext_tiny_wbmm", seed=0, **kwargs):
    return randomize(timm.create_model(arch, **{**ARGS, "num_classes": 5, **kwargs}), seed)


def save(path, contents):
    torch.save(contents, path)
    return str(path)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("size", [(64, 64), (96, 160), (57, 130)])
def test_maps_are_timms_with_a_layer_norm(arch, size):
    model, x = backbone(arch).eval(), torch.randn(2, 3, *size)
    with torch.no_grad():
        maps, plain = model(x), model.body(x)
    assert [part.shape[1] for part in maps] == [8, 16, 24, 32]
    for i, (mapped, raw) in enumerate(zip(maps, plain, strict=True)):
        norm = model.get_submodule(f"norm{i}")
        expected = F.layer_norm(raw.permute(0, 2, 3, 1), norm.weight.shape, norm.weight, norm.bias, 1e-6)
        torch.testing.assert_close(mapped, expected.permute(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("arch", "args", "channels"),
    [
        ("test_resnet", {}, [32, 48, 192, 96]),
        ("wbmm_a", {"dims": (8, 16, 32, 64)}, [8, 16, 32, 64]),
        ("swin_tiny_patch4_window7_224", {"embed_dim": 12, "depths": (1, 1, 1, 1), "img_size": 64}, [12, 24, 48, 96]),
    ],
)
def test_other_models(arch, args, channels):
    maps = TimmBackbone(arch, model_args=args)(torch.randn(1, 3, 64, 64))
    assert [part.shape[1:] for part in maps] == [(c, 16 // 2**i, 16 // 2**i) for i, c in enumerate(channels)]


def test_fewer_maps_leave_no_parameter_without_a_gradient():
    model = backbone(out_indices=(1, 2), drop_path_rate=0.2)
    maps = model(torch.randn(2, 3, 64, 64))
    assert [part.shape[1] for part in maps] == [16, 24]
    sum(part.square().mean() for part in maps).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert not hasattr(model, "norm0")
    assert model.depths == (2, 1, 3, 0)


def test_activation_checkpointing_changes_no_gradient():
    plain, saving = backbone(), backbone(with_cp=True)
    assert saving.body.stages_0.grad_checkpointing
    x = torch.randn(2, 3, 64, 64)
    for model in (plain, saving):
        sum(part.square().mean() for part in model(x)).backward()
    for (name, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=name)


@pytest.mark.parametrize("stages", [0, 2])
def test_frozen_stages(stages):
    model = backbone(frozen_stages=stages, drop_path_rate=0.2)
    frozen = {name.split(".")[1] for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"stem_0", "stem_1", *(f"stages_{i}" for i in range(stages))}
    assert model.body.stages_0.training == (stages == 0)
    assert model.body.stages_2.training
    assert not model.eval().body.stages_2.training


def test_norm_eval():
    model = TimmBackbone("test_resnet", norm_eval=True, frozen_stages=1)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert not any(norm.training for norm in norms)
    assert model.body.layer2.training
    assert not model.body.layer1.training
    assert {name.split(".")[1] for name, p in model.named_parameters() if not p.requires_grad} >= {"conv1", "layer1"}


def test_it_fuses():
    model = backbone().double().eval()
    fused, x = wbmm.fuse(model), torch.randn(1, 3, 57, 80, dtype=torch.float64)
    with torch.no_grad():
        for a, b in zip(fused(x), model(x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_weights_of_a_classifier(tmp_path):
    source, ema = classifier(), classifier(seed=1)
    file = save(tmp_path / "best.pt", {"model": source.state_dict(), "ema": ema.state_dict()})
    model = TimmBackbone("convnext_tiny_wbmm", model_args=ARGS, init_cfg={"type": "Pretrained", "checkpoint": file})
    model.init_weights()
    torch.testing.assert_close(model.body.stages_2.state_dict(), ema.stages[2].state_dict())
    torch.testing.assert_close(model.body.stem_0.state_dict(), ema.stem[0].state_dict())
    assert model.norm0.weight.eq(1).all()
    text = load_timm_weights(model, file)
    own = len(model.state_dict())
    assert f"{own - 8} of {own} tensors match" in text
    assert "and new: norm0.weight" in text
    assert "not used: head.norm.weight" in text
    TimmBackbone("convnext_tiny_wbmm", model_args=ARGS).init_weights()  # without init_cfg it is a no-op


def test_weights_of_a_segmentor(tmp_path):
    source, model = backbone(), TimmBackbone("convnext_tiny_wbmm", model_args=ARGS)
    state = {f"backbone.{key}": value for key, value in source.state_dict().items()}
    file = save(tmp_path / "iter_1.pth", {"state_dict": {**state, "decode_head.weight": torch.zeros(1)}})
    assert "and new" not in load_timm_weights(model, file)
    torch.testing.assert_close(model.state_dict(), source.state_dict())


def test_weights_of_timm_by_name(monkeypatch):
    source, asked = classifier("convnext_tiny"), []
    model = TimmBackbone("convnext_tiny", model_args=ARGS)
    monkeypatch.setattr(timm, "create_model", lambda name, **kwargs: asked.append((name, kwargs)) or source)
    load_timm_weights(model, "convnext_tiny.fb_in1k")
    assert asked == [("convnext_tiny.fb_in1k", {"pretrained": True, "in_chans": 3})]
    torch.testing.assert_close(model.body.stages_3.state_dict(), source.stages[3].state_dict())

    def fail(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(timm, "create_model", fail)
    with pytest.raises(CheckpointError, match=r"convnext_tiny: could not be downloaded .no route to host."):
        load_timm_weights(model, "convnext_tiny")
    with pytest.raises(CheckpointError, match=r"no such weights .those of convnext_tiny are .*convnext_tiny.fb_in1k"):
        load_timm_weights(model, "convnext_tiny.in99k")
    with pytest.raises(CheckpointError, match=r"timm has none for convnext_tiny_wbmm.. Train them"):
        load_timm_weights(model, "convnext_tiny_wbmm")


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (lambda: classifier("convnext_tiny").state_dict(), r"body.stages_0.blocks.0.conv_dw"),
        (lambda: {"conv1.weight": torch.zeros(1)}, r"0 of the \d+ tensors of convnext_tiny_wbmm match; 90% must"),
        (lambda: {"step": 3}, "no state dict found"),
    ],
)
def test_weights_that_do_not_fit(tmp_path, contents, message):
    file = save(tmp_path / "a.pth", contents())
    model = TimmBackbone("convnext_tiny_wbmm", model_args=ARGS)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"a\.pth: .*{message}"):
        load_timm_weights(model, file)
    torch.testing.assert_close(model.state_dict(), before)


def test_a_malicious_pickle_never_runs(tmp_path):
    target, file = tmp_path / "pwned", save(tmp_path / "evil.pth", {"model": Bomb(tmp_path / "pwned")})
    with pytest.raises(CheckpointError, match=r"refused.*could run code"):
        load_timm_weights(TimmBackbone("convnext_tiny_wbmm", model_args=ARGS), file)
    assert not target.exists()


# name -> group for ConvNeXt-T: depths 3, 3, 9, 3, so that the last group is 6.
GROUPS = {
    "body.stem_0.weight": 0,
    "body.stem_1.bias": 0,
    "body.stages_0.blocks.0.conv_dw.bias": 1,
    "body.stages_0.blocks.2.mlp.fc1.weight": 1,
    "body.stages_1.downsample.1.weight": 2,
    "body.stages_2.downsample.0.weight": 3,
    "body.stages_2.blocks.2.gamma": 3,
    "body.stages_2.blocks.3.norm.weight": 4,
    "body.stages_2.blocks.8.mlp.fc2.weight": 5,
    "body.stages_3.downsample.1.bias": 6,
    "body.stages_3.blocks.2.gamma": 6,
    "norm0.weight": 7,
    "norm3.bias": 7,
}


class Model(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        self.backbone = TimmBackbone(*args, **kwargs)
        self.head = nn.Conv2d(8, 2, 1)


def layer_decay(model, rate=0.9):
    config = {
        "type": "WBMMLayerDecay",
        "optim_wrapper_cfg": {"type": "OptimWrapper", "optimizer": {"type": "AdamW", "lr": 1.0, "weight_decay": 0.05}},
        "paramwise_cfg": {"decay_rate": rate},
    }
    groups = OPTIM_WRAPPER_CONSTRUCTORS.build(config)(model).optimizer.param_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: group for group in groups for p in group["params"]}


@pytest.mark.parametrize("arch", ARCHS)
def test_layer_decay(arch):
    with on_meta():
        model = Model(arch)
    assert model.backbone.depths == (3, 3, 9, 3)
    found = layer_decay(model)
    assert len(found) == len(list(model.parameters()))
    for name, layer in GROUPS.items():
        group = found[f"backbone.{name}"]
        assert group["layer"] == layer, name
        assert group["lr"] == pytest.approx(0.9 ** (7 - layer)), name
    assert found["head.weight"]["lr"] == 1.0
    assert {group["layer"] for group in found.values()} == set(range(8))
    if arch == "convnext_tiny_wbmm":
        assert found["backbone.body.stages_0.blocks.0.conv_dw.table"]["weight_decay"] == 0.05
    assert found["backbone.body.stages_0.blocks.0.gamma"]["weight_decay"] == 0


def test_layer_decay_needs_stages_of_blocks():
    model = Model("test_resnet")
    with pytest.raises(ValueError, match=r"decay_rate 0.9.* that of Model has none: set decay_rate to 1"):
        layer_decay(model)
    found = layer_decay(model, rate=1.0)
    assert len(found) == len(list(model.parameters()))
    assert {group["lr"] for group in found.values()} == {1.0}
    assert found["head.weight"]["weight_decay"] == 0.05
    assert found["backbone.norm0.weight"]["weight_decay"] == 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"arch": "convnext_t"}, "'convnext_t': timm knows no such model"),
        ({"arch": "test_vit"}, "'test_vit' gives maps of strides .* a backbone's are .4, 8, 16, 32."),
        ({"out_indices": (2, 1)}, "out_indices .2, 1.: expected increasing numbers from 0 to 3"),
        ({"frozen_stages": 5}, "frozen_stages 5: expected .* 1 to 4"),
        ({"frozen_stages": 3, "out_indices": (0, 1)}, "frozen_stages 3: expected .* 1 to 2"),
        ({"arch": "test_resnet", "model_args": {}, "with_cp": True}, "no stage of test_resnet has activation"),
        ({"init_cfg": {"type": "Normal"}}, "init_cfg .*expected dict.type='Pretrained'"),
        ({"init_cfg": {"type": "Pretrained", "checkpoint": "a", "resize_tables": True}}, "resize_tables is for WBMM"),
    ],
)
def test_wrong_arguments(kwargs, message):
    model_args = {} if kwargs.get("arch") else ARGS
    with pytest.raises(ValueError, match=message):
        TimmBackbone(**{"arch": "convnext_tiny_wbmm", "model_args": model_args, **kwargs})


@pytest.mark.parametrize("scope", ["mmseg", "mmdet"])
def test_registered_once_and_seen_by_both(scope):
    import mmengine.registry

    registry = pytest.importorskip(f"{scope}.registry").MODELS
    assert "TimmBackbone" not in registry.module_dict
    assert mmengine.registry.MODELS.module_dict["TimmBackbone"] is TimmBackbone
    built = registry.build({"type": "TimmBackbone", "arch": "convnext_tiny_wbmm", "model_args": ARGS})
    assert isinstance(built, TimmBackbone)


def test_a_segmentor_trains_and_is_tested_fused(tmp_path):
    pytest.importorskip("mmseg")
    from tests.mm.shapes import write_config, write_shapes
    from wbmm.mm.runner import add_test_arguments, run_testing
    from wbmm.mm.tools import train_tool

    tiny = write_config(tmp_path / "tiny.py", write_shapes(tmp_path / "data", train=2, val=1), interval=2)
    args = {**ARGS, "dims": [8, 16, 32, 64]}
    file = save(tmp_path / "best.pt", classifier(**args).state_dict())
    backbone = {"_delete_": True, "type": "TimmBackbone", "arch": "convnext_tiny_wbmm", "model_args": args}
    backbone["init_cfg"] = {"type": "Pretrained", "checkpoint": file}
    config = tmp_path / "convnext.py"
    config.write_text(f"_base_ = [{str(tiny)!r}]\nmodel = dict(backbone={backbone!r})\n")
    assert train_tool("seg", [str(config), "--work-dir", str(tmp_path / "run")]) == 0
    parser = argparse.ArgumentParser()
    add_test_arguments(parser, "seg")
    results = []
    for i, options in enumerate(([], ["--fuse"])):
        argv = [str(config), str(tmp_path / "run" / "iter_2.pth"), "--work-dir", str(tmp_path / f"test{i}"), *options]
        results.append(run_testing("seg", parser.parse_args(argv))["mIoU"])
    assert results[1] == pytest.approx(results[0], abs=0.01)

"""The backbone of dense prediction: maps, forms, freezing, and the released segmentors' names."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import wbmm
from tests.mm.helpers import NARROW, backbone, checkpoint, on_meta, released_dense_backbone
from tests.reference import image, released_logits, released_state_dict
from wbmm.mm.backbone import TimmBackbone, WBMMBackbone
from wbmm.mm.mm_checkpoint import MMCheckpoint


@pytest.mark.parametrize("size", [(64, 64), (57, 130), (9, 33)])
def test_maps_are_those_of_the_model_with_a_layer_norm(size):
    model, x = backbone(), torch.randn(2, 3, *size)
    with torch.no_grad():
        maps = model(x)
        raw = model.forward_intermediates(x, intermediates_only=True)
    assert len(maps) == 4
    for i, (mapped, plain) in enumerate(zip(maps, raw, strict=True)):
        norm = model.get_submodule(f"norm{i}")
        expected = F.layer_norm(plain.permute(0, 2, 3, 1), norm.weight.shape, norm.weight, norm.bias, 1e-6)
        torch.testing.assert_close(mapped, expected.permute(0, 3, 1, 2))
        assert mapped.shape == (2, 8 * 2**i, *(-(-side // (4 * 2**i)) for side in size))


def test_released_weights_give_the_released_codes_maps():
    """Its logits are the reference; they follow from the last map, and the other maps lead to it."""
    released = released_state_dict("wbmm_t_dense")
    model = WBMMBackbone(arch="wbmm_t_dense").eval()
    model.load_state_dict(released_dense_backbone("wbmm_t_dense"))
    size, expected = released_logits("wbmm_t_dense_odd")
    with torch.no_grad():
        last = model.forward_intermediates(image(*size), intermediates_only=True)[-1].mean((2, 3))
        normed = F.layer_norm(last, last.shape[1:], released["norm.weight"], released["norm.bias"], 1e-6)
        logits = F.linear(normed, released["head.weight"], released["head.bias"])
    assert (logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["wbmm_t_dense", "wbmm_s_dense"])
def test_released_segmentors_names_load_strictly(name):
    with on_meta():
        model = nn.ModuleDict({"backbone": WBMMBackbone(arch=name)})
    released = {f"backbone.{k}": v for k, v in released_dense_backbone(name, values=False).items()}
    result = model.load_state_dict(released, assign=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    torch.testing.assert_close(model["backbone"].norm2.bias.data, released["backbone.norm2.bias"])


@pytest.mark.parametrize("form", ["compact", "dense"])
@pytest.mark.parametrize("arch", ["wbmm_a", "wbmm_a_hier"])
def test_a_fused_checkpoint_loads_into_a_fused_backbone(arch, form):
    model = backbone(arch=arch)
    target = WBMMBackbone(**{**NARROW, "arch": arch}, form=form).eval()
    target.load_state_dict(wbmm.fuse(model, form).state_dict())
    assert (model.form, target.form) == ("training", form)
    x = torch.randn(1, 3, 50, 70)
    with torch.no_grad():
        for a, b in zip(target(x), model(x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=f"fused .{form} form. and cannot be trained"):
        target.train()(x)


def test_fewer_maps_leave_no_parameter_without_a_gradient():
    model = WBMMBackbone(**NARROW, out_indices=(1, 2))
    maps = model(torch.randn(2, 3, 32, 32))
    assert [m.shape[1] for m in maps] == [16, 32]
    sum(m.square().mean() for m in maps).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert not hasattr(model, "norm0")
    assert len(model.stages) == 3


def test_activation_checkpointing_changes_no_gradient():
    plain, saving = backbone().train(), backbone(with_cp=True).train()
    x = torch.randn(2, 3, 32, 32)
    for model in (plain, saving):
        sum(m.square().mean() for m in model(x)).backward()
    for (name, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=name)


@pytest.mark.parametrize(
    "build",
    [lambda: WBMMBackbone("wbmm_a_dense"), lambda: TimmBackbone("convnext_atto")],
    ids=["wbmm_a_dense", "convnext_atto"],
)
def test_padding_explodes_no_gradient_from_scratch(build):
    """Zeros in every channel have no variance: each LayerNorm multiplies their gradient by 1000."""
    torch.manual_seed(0)
    net = build()
    images = torch.randn(2, 3, 128, 128)
    images[..., 64:] = 0
    weights = [torch.randn_like(part) for part in net(images)]

    def norm() -> float:
        net.zero_grad()
        sum((part * weight).mean() for part, weight in zip(net(images), weights, strict=True)).backward()
        return torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None]).item()

    assert norm() > 1e6
    net.init_weights()
    assert norm() < 10


def test_frozen_stages_and_norm_eval():
    model = WBMMBackbone(**NARROW, frozen_stages=2).train()
    frozen = {name.split(".blocks")[0] for name, p in model.named_parameters() if not p.requires_grad}
    assert {name.split(".")[0] for name in frozen} == {"stem", "stages"}
    assert all(name.startswith(("stem", "stages.0", "stages.1")) for name in frozen)
    assert not model.stages[1].training
    assert model.stages[2].training
    before = model.stages[1].blocks[0].norm.running_mean.clone()
    moving = model.stages[2].blocks[0].norm.running_mean.clone()
    model(torch.randn(2, 3, 32, 32))
    torch.testing.assert_close(model.stages[1].blocks[0].norm.running_mean, before)
    assert not torch.equal(model.stages[2].blocks[0].norm.running_mean, moving)

    kept = WBMMBackbone(**NARROW, norm_eval=True).train()
    norms = [module for module in kept.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert not any(norm.training for norm in norms)
    assert kept.stages[0].training


def test_sync_bn_with_cuda_and_bn_without(monkeypatch):
    def kinds(model):
        return {type(m).__name__ for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}

    assert kinds(WBMMBackbone(**NARROW)) == {"BatchNorm2d"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    synced = WBMMBackbone(**NARROW)
    assert kinds(synced) == {"SyncBatchNorm"}
    assert kinds(WBMMBackbone(**NARROW, sync_bn=False)) == {"BatchNorm2d"}
    plain = backbone()
    synced.load_state_dict(plain.state_dict())
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = plain(x)
        torch.testing.assert_close(synced.eval()(x), expected)
        torch.testing.assert_close(wbmm.fuse(synced)(x), wbmm.fuse(plain)(x))


def test_an_architecture_outside_the_zoo():
    model = WBMMBackbone(dims=(8, 8, 16, 16), pattern=("D", "W", "WD", "W"), window_size=((7, 14), 7, "8+4", 7)).eval()
    assert model.depths == (1, 1, 2, 1)
    assert [m.shape[1] for m in model(torch.randn(1, 3, 32, 32))] == [8, 8, 16, 16]
    other = WBMMBackbone(arch="wbmm_a_dense", dims=(8, 16, 32, 64), window_size=5)
    assert {window.size for window in other.windows} == {(5, 5)}


@pytest.mark.parametrize(
    "kwargs", [{"arch": "unireplknet_t"}, {"arch": "wbmm_t_dense", "mixer": "dw3"}, {"arch": "wbmm_a", "mixer": "dw5"}]
)
def test_baselines(kwargs):
    model = backbone(**kwargs)
    x = torch.randn(1, 3, 40, 50)
    before = checkpoint(model)
    after, _ = MMCheckpoint(before).fuse()
    with torch.no_grad():
        for a, b in zip(MMCheckpoint(after).backbone(x), model(x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"arch": "wbmm_x"}, "'wbmm_x' is not in the zoo; expected one of wbmm_a,"),
        ({"dims": (8, 8, 8, 8)}, "needs arch .such as 'wbmm_t_hier'., or dims and pattern: no pattern"),
        ({**NARROW, "out_indices": (2, 1)}, "out_indices .2, 1.: expected increasing numbers from 0 to 3"),
        ({**NARROW, "out_indices": ()}, "out_indices"),
        ({**NARROW, "frozen_stages": 5}, "frozen_stages 5"),
        ({**NARROW, "form": "fused"}, "form 'fused': expected 'training', 'compact' or 'dense'"),
        ({**NARROW, "init_cfg": {"type": "Normal"}}, "init_cfg .*expected dict.type='Pretrained'"),
        ({**NARROW, "init_cfg": {"type": "Pretrained", "checkpoint": "a", "strict": 1}}, "unknown key 'strict'"),
    ],
)
def test_wrong_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        WBMMBackbone(**kwargs)


@pytest.mark.parametrize("scope", ["mmseg", "mmdet"])
def test_registered_once_and_seen_by_both(scope):
    pytest.importorskip("mmengine")
    import mmengine.registry

    import wbmm.mm.register  # noqa: F401

    registry = pytest.importorskip(f"{scope}.registry").MODELS
    assert "WBMMBackbone" not in registry.module_dict
    assert mmengine.registry.MODELS.module_dict["WBMMBackbone"] is WBMMBackbone
    assert isinstance(registry.build({"type": "WBMMBackbone", **NARROW}), WBMMBackbone)


def test_maps_that_mmcvs_operators_can_read():
    """They take any memory for NCHW, so a channels-last map would give wrong values without an error."""
    ops = pytest.importorskip("mmcv.ops")
    from torchvision.ops import roi_align

    boxes = torch.tensor([[0.0, 5, 5, 40, 50], [1, 20, 8, 60, 30]])
    images = torch.randn(2, 3, 64, 64).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        first = backbone()(images)[0]
    expected = roi_align(first, boxes, 7, 0.25, 0, aligned=True)
    torch.testing.assert_close(ops.RoIAlign(7, 0.25, 0)(first, boxes), expected)
    assert not torch.allclose(ops.RoIAlign(7, 0.25, 0)(first.to(memory_format=torch.channels_last), boxes), expected)

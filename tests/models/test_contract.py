"""What timm's own test suite asks of a model, on ours."""

import pytest
import timm
import torch

import wbmm
from wbmm.layers import GlobalResponseNorm
from wbmm.zoo import load_zoo

ALL = list(load_zoo())
SMALL = ["wbmm_a", "wbmm_a_dense", "wbmm_a_hier"]


def test_the_whole_family_is_registered():
    family = {f"wbmm_{size}{kind}" for size in "afpntsb" for kind in ("", "_dense", "_hier")}
    assert set(timm.list_models("wbmm_*")) == family
    assert set(ALL) == family | {f"unireplknet_{size}" for size in "afpntsb"}


@pytest.mark.parametrize("name", ALL)
def test_default_cfg(name):
    model = timm.create_model(name, device="meta")
    cfg = model.default_cfg
    assert cfg["classifier"] == "head.fc"
    assert cfg["first_conv"] == "stem.conv1"
    assert cfg["input_size"] == (3, 224, 224)
    params = dict(model.named_parameters())
    assert f"{cfg['classifier']}.weight" in params
    assert f"{cfg['first_conv']}.weight" in params
    assert model.forward_features(torch.zeros(1, 3, 64, 64, device="meta")).shape == (1, model.num_features, 2, 2)


def test_pretrained_tags_name_the_hub_files():
    assert timm.list_pretrained("wbmm_*") == sorted(
        f"{name}.{tag}" for name, model in load_zoo().items() for tag in model.weights
    )
    cfg = timm.get_pretrained_cfg("wbmm_t.in1k")
    assert (cfg.hf_hub_id, cfg.hf_hub_filename) == ("wansong-s/WBMM", "wbmm_t_in1k_224_w7.pth")
    assert timm.get_pretrained_cfg("wbmm_s_dense.in1k").hf_hub_filename == "wbmm_s_in1k_224_dense_w7.pth"


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("size", [(96, 96), (128, 128), (5, 5), (40, 200)])
def test_forward(name, size):
    model = timm.create_model(name, num_classes=7).eval()
    with torch.no_grad():
        out = model(torch.randn(2, 3, *size))
    assert out.shape == (2, 7)
    assert out.isfinite().all()


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_parameter_gets_a_gradient(name, checkpointing):
    model = timm.create_model(name, num_classes=5, drop_path_rate=0.1).train()
    model.set_grad_checkpointing(checkpointing)
    model(torch.randn(2, 3, 64, 64)).mean().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_checkpointing_changes_nothing():
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = timm.create_model("wbmm_a", num_classes=3, ls_init_value=0.5).train()
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(1)
        model(torch.randn(2, 3, 64, 64)).square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_classifier_and_pooling():
    model = timm.create_model("wbmm_a", num_classes=0).eval()
    x = torch.randn(1, 3, 64, 64)
    assert model(x).shape == (1, 320)
    assert isinstance(model.get_classifier(), torch.nn.Identity)
    model.reset_classifier(4)
    assert model(x).shape == (1, 4)
    assert model.get_classifier().out_features == 4
    assert model.forward_head(model.forward_features(x), pre_logits=True).shape == (1, 320)
    model.reset_classifier(0, "")
    assert model(x).shape == (1, 320, 2, 2)
    assert timm.create_model("wbmm_a", global_pool="max", num_classes=2)(x).shape == (1, 2)
    assert timm.create_model("wbmm_a", in_chans=1, num_classes=2)(x[:, :1]).shape == (1, 2)


def test_features_only():
    net = timm.create_model("wbmm_a_hier", features_only=True)
    assert net.feature_info.channels() == [40, 80, 160, 320]
    assert net.feature_info.reduction() == [4, 8, 16, 32]
    maps = net(torch.randn(1, 3, 96, 96))
    assert [tuple(m.shape) for m in maps] == [(1, 40, 24, 24), (1, 80, 12, 12), (1, 160, 6, 6), (1, 320, 3, 3)]
    some = timm.create_model("wbmm_a_hier", features_only=True, out_indices=(1, 3))
    assert some.feature_info.channels() == [80, 320]
    getter = timm.create_model("wbmm_a", features_only=True, feature_cls="getter", out_indices=(0, 2))
    assert [m.shape[1] for m in getter(torch.randn(1, 3, 64, 64))] == [40, 160]
    assert "head.fc.weight" not in net.state_dict()


def test_forward_intermediates():
    model = timm.create_model("wbmm_a").eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        final, maps = model.forward_intermediates(x)
        assert len(maps) == 4
        torch.testing.assert_close(final, model.forward_features(x))
        torch.testing.assert_close(maps[-1], final)
        assert [m.shape[1] for m in model.forward_intermediates(x, indices=2, intermediates_only=True)] == [160, 320]
        early = model.forward_intermediates(x, indices=[0], stop_early=True, intermediates_only=True)
    torch.testing.assert_close(early[0], maps[0])
    with pytest.raises(ValueError, match="NHWC"):
        model.forward_intermediates(x, output_fmt="NHWC")
    assert model.prune_intermediate_layers([1]) == [1]
    assert len(model.stages) == 2


def test_an_empty_batch():
    model = timm.create_model("wbmm_a_hier", num_classes=3).eval()
    for net in (model, wbmm.fuse(model)):
        with torch.no_grad():
            assert net(torch.zeros(0, 3, 64, 64)).shape == (0, 3)


def test_drop_path_grows_with_depth():
    model = timm.create_model("wbmm_a", drop_path_rate=0.3)
    rates = [getattr(b.ffn.drop_path, "drop_prob", 0.0) for stage in model.stages for b in stage.blocks]
    assert rates[0] == 0
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(0.3)


def test_initialisation():
    model = timm.create_model("wbmm_a")
    block = model.stages[1].blocks[0]
    assert (block.gamma == 1e-6).all()
    assert (block.ffn.grn.gamma == 0).all()
    for weight in (block.mixer.table, block.ffn.fc1.weight, model.stem.conv2.weight, model.head.fc.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.15)
    assert (model.head.fc.bias == 0).all()
    assert {m.eps for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)} == {1e-5}
    assert {m.eps for m in model.modules() if isinstance(m, torch.nn.LayerNorm)} == {1e-6}
    assert {m.eps for m in model.modules() if isinstance(m, GlobalResponseNorm)} == {1e-6}


def test_weight_decay_reaches_tables_and_grn_but_no_vectors():
    from timm.optim import param_groups_weight_decay

    model = timm.create_model("wbmm_a")
    groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    decayed = {id(p) for group in groups if group["weight_decay"] > 0 for p in group["params"]}
    for name, parameter in model.named_parameters():
        expected = parameter.ndim > 1 and not name.endswith(".bias")
        assert (id(parameter) in decayed) == expected, name
    assert id(model.stages[1].blocks[0].mixer.table) in decayed
    assert id(model.stages[1].blocks[0].ffn.grn.beta) in decayed


def test_layer_decay_groups():
    from timm.models import group_parameters

    model = timm.create_model("wbmm_a")
    groups = group_parameters(model, model.group_matcher(coarse=False))
    assert sum(map(len, groups.values())) == len(list(model.parameters()))
    coarse = group_parameters(model, model.group_matcher(coarse=True))
    assert len(coarse) < len(groups)


def test_factory_arguments():
    model = timm.create_model("wbmm_a_hier", num_classes=2, device="cpu", dtype=torch.float64).eval()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert model(torch.randn(1, 3, 32, 32, dtype=torch.float64)).dtype == torch.float64
    assert all(p.is_meta for p in timm.create_model("wbmm_a", device="meta").parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_training_step(dtype):
    model = timm.create_model("wbmm_a", num_classes=4, ls_init_value=0.5)
    with torch.autocast("cpu", dtype=dtype):
        loss = model(torch.randn(2, 3, 64, 64)).float().logsumexp(1).sum()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_maps_stay_channels_last():
    model = timm.create_model("wbmm_a_hier").eval()
    with torch.no_grad():
        for net in (model, wbmm.fuse(model)):
            for feature in net.forward_intermediates(torch.randn(2, 3, 224, 224), intermediates_only=True):
                assert feature.is_contiguous(memory_format=torch.channels_last)


def test_overlay_file(tmp_path):
    source = timm.create_model("wbmm_a", num_classes=1000)
    torch.save({"model": source.state_dict()}, tmp_path / "weights.pth")
    overlay = {"file": str(tmp_path / "weights.pth"), "num_classes": 1000}
    model = timm.create_model("wbmm_a", pretrained=True, pretrained_cfg_overlay=overlay)
    torch.testing.assert_close(model.stages[1].blocks[0].mixer.table, source.stages[1].blocks[0].mixer.table)
    other = timm.create_model("wbmm_a", pretrained=True, pretrained_cfg_overlay=overlay, num_classes=5)
    torch.testing.assert_close(other.stem.conv1.weight, source.stem.conv1.weight)
    assert other.head.fc.out_features == 5

"""Whole models, fused, against their training form in float64 with random statistics."""

import copy

import pytest
import timm
import torch
import torch.nn as nn

import wbmm
from tests.helpers import randomize
from wbmm.layers import Block, DenseWBMM2d, FusedBlock
from wbmm.layers.mixers import CompactMixer

# One of each form: multi-kernel, single and hierarchical. Narrow, so that float64 at 250x333 takes a second.
NARROW = {"dims": (8, 16, 32, 64), "num_classes": 10}
NAMES = ["wbmm_a", "wbmm_a_dense", "wbmm_a_hier"]
SIZES = [(224, 224), (96, 96), (250, 333), (40, 500), (5, 5)]


@pytest.fixture(params=NAMES)
def model(request):
    return randomize(timm.create_model(request.param, **NARROW).double()).eval()


def test_fused_equals_training_form_at_every_size(model):
    compact, dense = wbmm.fuse(model), wbmm.fuse(model, "dense")
    for size in SIZES:
        x = torch.randn(2, 3, *size, dtype=torch.float64)
        with torch.no_grad():
            expected = model(x)
            for fused in (compact, dense):
                torch.testing.assert_close(fused(x), expected, rtol=0, atol=1e-10)
                for a, b in zip(fused.forward_intermediates(x)[1], model.forward_intermediates(x)[1], strict=True):
                    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_every_block_is_replaced_and_the_original_untouched(model):
    before = copy.deepcopy(model.state_dict())
    compact, dense = wbmm.fuse(model), wbmm.fuse(model, "dense")
    for fused in (compact, dense):
        kinds = {type(m) for m in fused.modules()}
        assert Block not in kinds
        assert FusedBlock in kinds
        assert nn.BatchNorm2d not in kinds
    assert any(isinstance(m, CompactMixer) for m in compact.modules())
    assert any(isinstance(m, DenseWBMM2d) for m in dense.modules())
    assert not any(isinstance(m, CompactMixer) for m in dense.modules())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_timm_gives_the_same_model(model):
    ours, timms = wbmm.fuse(model), timm.utils.reparameterize_model(model)
    assert ours.state_dict().keys() == timms.state_dict().keys()
    for key, value in ours.state_dict().items():
        torch.testing.assert_close(timms.state_dict()[key], value, rtol=0, atol=0)


def test_fusing_twice_is_fusing_once(model):
    once = wbmm.fuse(model)
    twice = wbmm.fuse(once)
    assert all(torch.equal(v, twice.state_dict()[k]) for k, v in once.state_dict().items())
    dense = wbmm.fuse(once, "dense")
    torch.testing.assert_close(dense.state_dict(), wbmm.fuse(model, "dense").state_dict())
    wbmm.fuse(dense, "dense")
    with pytest.raises(ValueError, match="dense form already"):
        wbmm.fuse(dense, "compact")


def test_compact_is_smaller_than_the_training_form(model):
    size = lambda net: sum(t.numel() * t.element_size() for t in net.state_dict().values())  # noqa: E731
    assert size(wbmm.fuse(model)) < size(model) < size(wbmm.fuse(model, "dense"))


def test_a_model_in_train_mode_is_refused(model):
    with pytest.raises(ValueError, match=r"train mode.*model.eval\(\)"):
        wbmm.fuse(model.train())


def test_a_part_in_train_mode_is_refused_too(model):
    model.stages[0].train()
    with pytest.raises(ValueError, match="train mode"):
        wbmm.fuse(model)


def test_a_layer_used_twice_stays_one():
    layer = wbmm.WBMM2d(4, 3)
    fused = wbmm.fuse(nn.ModuleDict({"a": layer, "b": layer}).eval())
    assert isinstance(fused["a"], CompactMixer)
    assert fused["a"] is fused["b"]


def test_unknown_form():
    with pytest.raises(ValueError, match="'sparse': expected 'compact' or 'dense'"):
        wbmm.fuse(nn.Identity().eval(), "sparse")


def test_any_module_that_contains_our_blocks():
    class Segmentor(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = timm.create_model("wbmm_a_hier", features_only=True, dims=(8, 16, 32, 64))
            self.extra = wbmm.WBMM2d(64, 3)
            self.decode_head = nn.Sequential(nn.Conv2d(64, 4, 1), nn.BatchNorm2d(4))

        def forward(self, x):
            return self.decode_head(self.extra(self.backbone(x)[-1]))

    segmentor = randomize(Segmentor().double()).eval()
    x = torch.randn(1, 3, 100, 60, dtype=torch.float64)
    fused = wbmm.fuse(segmentor)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), segmentor(x), rtol=0, atol=1e-10)
    assert isinstance(fused.decode_head[1], nn.BatchNorm2d)
    assert not any(isinstance(m, (Block, wbmm.WBMM2d)) for m in fused.modules())
    standalone = wbmm.fuse(wbmm.WBMM2d(4).eval())
    assert isinstance(standalone, CompactMixer)


@pytest.mark.parametrize("padding_mode", ["reflect", "replicate"])
def test_padding_modes_survive_fusion(padding_mode):
    model = randomize(timm.create_model("wbmm_a_dense", padding_mode=padding_mode, window_size=3, **NARROW).double())
    x = torch.randn(1, 3, 160, 192, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(wbmm.fuse(model.eval())(x), model(x), rtol=0, atol=1e-10)

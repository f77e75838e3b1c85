"""The baselines: UniRepLKNet against its released names and logits, and depthwise convolutions in the place of WBMM."""

import json

import pytest
import timm
import torch
import torch.nn as nn

import wbmm
from tests.helpers import randomize
from tests.reference import FOLDER, image, released_logits, released_state_dict
from wbmm.io.card import card_of, recognise
from wbmm.io.files import load_weights
from wbmm.layers import DepthwiseConv2d, DilatedReparamConv2d, FusedDepthwiseConv2d
from wbmm.models.costs import build_on_meta, count_macs, count_params, receptive_fields
from wbmm.models.named_mixers import parse_pattern
from wbmm.models.state import CheckpointError, identify
from wbmm.zoo import load_zoo

FAMILY = [name for name, model in load_zoo().items() if model.task == "baseline"]
NARROW = {"dims": (8, 16, 32, 64), "num_classes": 10}
SIZES = [(224, 224), (96, 96), (250, 333), (5, 5)]


def narrow(name="unireplknet_a", **kwargs):
    return randomize(timm.create_model(name, **{**NARROW, **kwargs}).double()).eval()


def test_the_family_is_registered():
    assert [f"unireplknet_{size}" for size in "afpntsb"] == FAMILY
    assert set(timm.list_models("unireplknet_*")) == set(FAMILY)


def test_logits_of_the_released_code():
    model = timm.create_model("unireplknet_p").eval()
    model.load_state_dict(released_state_dict("unireplknet_p"))
    size, expected = released_logits("unireplknet_p")
    fused = wbmm.fuse(model)
    assert {m.kernel_size for m in fused.modules() if isinstance(m, FusedDepthwiseConv2d)} == {(3, 3), (13, 13)}
    with torch.no_grad():
        for net in (model, fused, timm.utils.reparameterize_model(model)):
            assert (net(image(*size)) - expected).abs().max() < 1e-5
        model.stages[1].blocks[0].mixer.branches["k3d5"].dilation = (4, 4)
        model.stages[1].blocks[0].mixer.branches["k3d5"].padding = (4, 4)
        assert (model(image(*size)) - expected).abs().max() > 1e-4, "the check would not see a wrong dilation"


@pytest.mark.parametrize("size", ["p", "n", "t", "s"])
def test_every_released_key_is_used(size):
    """Strictly: nothing missing, nothing left over, every shape right."""
    keys = json.loads((FOLDER / f"unireplknet_{size}.keys.json").read_text())
    model = timm.create_model(f"unireplknet_{size}", device="meta")
    result = model.load_state_dict({key: torch.empty(shape, device="meta") for key, shape in keys.items()}, assign=True)
    assert not result.missing_keys
    assert not result.unexpected_keys


def test_kernel_sizes():
    """3x3 in stage 1, 13x13 in stages 2 and 4; stage 3 by size."""
    third = {"a": "W" * 6, "f": "W" * 6, "p": "W" * 6, "n": "W" * 8, "t": "WD" * 9, "s": "WDD" * 9, "b": "WDD" * 9}
    for name in FAMILY:
        first, second, stage, fourth = parse_pattern(load_zoo()[name].pattern)
        assert (set(first), set(second), set(fourth)) == ({"D"}, {"W"}, {"W"})
        assert stage == third[name[-1]]
    blocks = timm.create_model("unireplknet_t", **NARROW, device="meta").stages[2].blocks
    assert [block.mixer.conv.kernel_size[0] for block in blocks[::2]] == [13] * 9
    assert [block.mixer.kernel_size[0] for block in blocks[1::2]] == [3] * 9


def test_figures_are_those_of_the_fused_form():
    """The paper's, within rounding; tests/commands compares the whole zoo."""
    fused, paper = wbmm.fuse(build_on_meta("unireplknet_p")), load_zoo()["unireplknet_p"].paper
    assert count_params(fused) / 1e6 == pytest.approx(paper["params"], abs=0.05)
    assert count_macs(fused, (224, 224))[""] / 1e9 == pytest.approx(paper["flops"], abs=0.05)


@pytest.mark.parametrize(("mixer", "params"), [("dw13", 31.1), ("dw13_reparam", 31.7)])
def test_rows_of_the_cross_operator_table(mixer, params):
    """13x13 DW without and with reparam, in training form; the paper prints 31.0 (which is fused) and 31.6 M."""
    model = timm.create_model("wbmm_t_dense", mixer=mixer, device="meta")
    assert count_params(model) / 1e6 == pytest.approx(params, abs=0.05)


@pytest.mark.parametrize("mixer", ["dw13_reparam", "dw5"])
def test_fused_equals_training_form_at_every_size(mixer):
    model = narrow(mixer=mixer)
    fused, timms = wbmm.fuse(model), timm.utils.reparameterize_model(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fused.modules())
    torch.testing.assert_close(timms.state_dict(), fused.state_dict(), rtol=0, atol=0)
    for size in SIZES:
        x = torch.randn(1, 3, *size, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-10)
    torch.testing.assert_close(wbmm.fuse(model, "dense").state_dict(), fused.state_dict())


@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("branches", [None, ((3, 2), (5, 3))])
def test_the_layer_alone(branches, with_norm):
    layer = randomize(DilatedReparamConv2d(4, branches=branches).double()).eval()
    norm = randomize(nn.BatchNorm2d(4).double()).eval() if with_norm else nn.Identity()
    fused = layer.fuse(norm if with_norm else None)
    for size in [(20, 17), (3, 1)]:
        x = torch.randn(2, 4, *size, dtype=torch.float64)
        torch.testing.assert_close(fused(x), norm(layer(x)), rtol=0, atol=1e-12)
    net = wbmm.fuse(nn.Sequential(layer).eval())
    assert isinstance(net[0], FusedDepthwiseConv2d)


@pytest.mark.parametrize("kernel", [3, 5, 7, 13, 27])
def test_depthwise_convolutions_in_the_place_of_wbmm(kernel):
    model = narrow("wbmm_a_dense", mixer=f"dw{kernel}")
    mixers = [block.mixer for stage in model.stages for block in stage.blocks]
    assert all(type(mixer) is DepthwiseConv2d for mixer in mixers)
    letters = "".join(model.patterns)
    assert [mixer.kernel_size[0] for mixer in mixers] == [kernel if letter == "W" else 3 for letter in letters]
    x = torch.randn(1, 3, 40, 40, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(wbmm.fuse(model)(x), model(x), rtol=0, atol=1e-10)


def test_m_blocks_are_replaced_too():
    model = timm.create_model("wbmm_p", mixer="dw5", device="meta")
    assert model.patterns == ("DD", "WD", "WDWDWD", "WW")
    assert isinstance(model.stages[3].blocks[0].mixer, DepthwiseConv2d)


def test_gradients_initialisation_and_maps():
    model = timm.create_model("unireplknet_a", **NARROW).train()
    mixer = model.stages[1].blocks[0].mixer
    for conv in (mixer.conv, *mixer.branches.values()):
        assert conv.weight.std().item() == pytest.approx(0.02, rel=0.25)
    model(torch.randn(2, 3, 64, 64)).mean().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    for net in (model.eval(), wbmm.fuse(model)):
        with torch.no_grad():
            maps = net.forward_intermediates(torch.randn(1, 3, 64, 64), intermediates_only=True)
        assert all(part.is_contiguous(memory_format=torch.channels_last) for part in maps)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["unireplknet_a"])
def test_identify_knows_the_family(name, fused):
    model = build_on_meta(name)
    seen = identify((wbmm.fuse(model) if fused else model).state_dict())
    assert seen.names() == [name]
    assert (seen.form, seen.mixer) == (("compact", "dw13") if fused else ("training", "dw13_reparam"))
    assert f"{name} (" in str(seen)


def test_weights_alone_are_enough_to_rebuild():
    for kwargs in ({"mixer": "dw5"}, {}):
        model = narrow(**kwargs).float()
        for net in (model, wbmm.fuse(model)):
            card = recognise(net.state_dict(), None, None)
            rebuilt = timm.create_model(card.model, num_classes=10, **card.args).eval()
            rebuilt = rebuilt if card.form == "training" else wbmm.fuse(rebuilt, card.form)
            rebuilt.load_state_dict(net.state_dict())
            assert timm.create_model(card_of(net).model, **card_of(net).args).mixer == model.mixer


def test_what_does_not_fit_is_explained():
    target = timm.create_model("wbmm_a_dense", **NARROW)
    with pytest.raises(CheckpointError, match="pass mixer='dw5'"):
        load_weights(target, narrow("wbmm_a_dense", mixer="dw5").state_dict())
    target, state_dict = timm.create_model("wbmm_a"), timm.create_model("unireplknet_a").state_dict()
    with pytest.raises(CheckpointError, match=r"(?s)looks like unireplknet_a .*Create that model instead"):
        load_weights(target, state_dict)


def test_receptive_field():
    patterns, windows = ("W", "D", "D", "D"), build_on_meta("wbmm_a").windows
    fields = receptive_fields((224, 224), patterns, windows, "dw13")
    assert fields[:2] == [(7, 7), (7 + 12 * 4,) * 2]


@pytest.mark.parametrize("mixer", ["dw4", "dw", "conv", "dw7_reparam", "dw13_rep", "dw0", "13"])
def test_unknown_mixers(mixer):
    with pytest.raises(ValueError, match=r"expected one of wbmm, wbmm_hier, .*, or a depthwise convolution of odd"):
        timm.create_model("wbmm_a", device="meta", mixer=mixer)


def test_wrong_branches():
    with pytest.raises(ValueError, match="kernel 5 and dilation 4: expected an odd kernel that spans at most 13"):
        DilatedReparamConv2d(4, branches=((5, 4),))
    with pytest.raises(ValueError, match="kernel_size 7: branches are defined for 13"):
        DilatedReparamConv2d(4, 7)

"""Layers that keep packed weights in inference: the same results, and never those of old weights."""

import copy
import io

import pytest
import torch
import torch.nn as nn

from tests.helpers import randomize
from wbmm.layers import FusedFeedForward, PackedConv2d
from wbmm.ops import kept, use_backend
from wbmm.ops.backends.onednn.linear import takes_onednn

CHANGES = {
    "in place": lambda weight: weight.mul_(2),
    "through .data": lambda weight: weight.data.mul_(2),
    "another storage": lambda weight: weight.set_(weight.detach() * 2),
}


def conv():
    layer = PackedConv2d(24, 40, 3, stride=2, padding=1)
    return layer.to(memory_format=torch.channels_last), torch.randn(2, 24, 13, 9)


def ffn():
    layer = randomize(FusedFeedForward(16, 64, 1e-6))
    return layer, torch.randn(2, 16, 7, 5)


def run(layer, x):
    x = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        return layer(x) if isinstance(layer, nn.Conv2d) else layer(x, torch.ones(x.shape[:2]), torch.zeros_like(x))


def expected(layer, x):
    """The reference packs nothing."""
    with use_backend("reference"):
        return run(layer, x)


def weight_of(layer):
    return layer.weight if isinstance(layer, nn.Conv2d) else layer.fc1.weight


@pytest.mark.parametrize("make", [conv, ffn])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_new_weights_are_seen(make, change):
    layer, x = make()
    before = run(layer.eval(), x)
    torch.testing.assert_close(before, expected(layer, x), rtol=1e-4, atol=1e-4)
    assert layer.kept.is_empty() != takes_onednn(x)
    with torch.no_grad():
        change(weight_of(layer))
    after = run(layer, x)
    torch.testing.assert_close(after, expected(layer, x), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, after)


@pytest.mark.parametrize("make", [conv, ffn])
def test_single_entries_are_seen_after_eval(make):
    layer, x = make()
    run(layer.eval(), x)
    weight_of(layer).data.view(-1)[1::7].zero_() if make is ffn else weight_of(layer).data[:, 1].zero_()
    torch.testing.assert_close(run(layer.eval(), x), expected(layer, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [conv, ffn])
def test_copies_pickles_and_other_types(make):
    layer, x = make()
    out = run(layer.eval(), x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert other.kept.is_empty()
        torch.testing.assert_close(run(other, x), out)
        assert set(other.state_dict()) == set(layer.state_dict())
    double = layer.double()
    assert double.kept.is_empty()
    torch.testing.assert_close(run(double, x.double()).float(), out, rtol=1e-4, atol=1e-4)


def test_a_convolution_in_training_is_pytorchs():
    layer, x = conv()
    x.requires_grad_()
    ours = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    theirs = torch.autograd.grad(nn.Conv2d.forward(layer, x).square().sum(), [x, *layer.parameters()])
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(40, 12),
        torch.randn(40, 24)[:, ::2],
        torch.randn(12, 40).t(),
        torch.randn(8, 6, 3, 3).contiguous(memory_format=torch.channels_last),
    ],
    ids=["contiguous", "strided", "transposed", "channels-last"],
)
def test_a_guard_sees_memory_of_any_strides(weight):
    unchanged = kept._samples(weight)
    assert unchanged()
    weight.data.add_(1)
    assert not unchanged()
    weight.data.sub_(1)


def test_a_view_of_the_same_memory_is_another_weight():
    layer, x = conv()
    before = run(layer.eval(), x)
    layer.weight.data = layer.weight.data.transpose(2, 3)
    after = run(layer, x)
    torch.testing.assert_close(after, expected(layer, x), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, after)


def test_a_weight_keeps_what_its_storage_can_do():
    """Sharded training frees the storage of weights and allocates it again."""
    layer, x = ffn()
    run(layer.eval(), x)
    storage = layer.fc1.weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    assert layer.fc1.weight.untyped_storage().nbytes() == size


def test_forward_mode_sees_operators_that_it_knows():
    layer, x = conv()
    tangent = torch.randn_like(x)
    with torch.no_grad():
        _, got = torch.func.jvp(layer.eval(), (x,), (tangent,))
        torch.testing.assert_close(got, nn.functional.conv2d(tangent, layer.weight, None, 2, 1), rtol=1e-4, atol=1e-4)

"""The backward pass that is written out, against autograd on the plain formula, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_hook

from tests.helpers import randomize
from wbmm.layers import FeedForward
from wbmm.ops import use_backend
from wbmm.ops.backends.onednn import ffn
from wbmm.ops.backends.onednn.ffn import ffn_training


def leaves(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def plain_ffn(x, gate, w1, b1, gamma, beta, w2, eps):
    u = F.gelu(F.linear(x * gate[:, None, None], w1, b1))
    norm = torch.linalg.vector_norm(u, dim=(1, 2), keepdim=True)
    ratio = norm / (norm.mean(-1, keepdim=True) + eps)
    return F.linear(u * (1 + gamma * ratio) + beta, w2)


def compare(call, plain, inputs, rtol=1e-10):
    """Outputs and all gradients, for a loss that is not symmetric in anything."""
    results = []
    for function in (call, plain):
        out = function(*inputs)
        weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape).sin()
        results.append([out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=rtol, atol=rtol)


def shapes(size, dim):
    wide = 4 * dim
    return (*size, dim), (size[0], dim), (wide, dim), (wide,), (1, 1, 1, wide), (1, 1, 1, wide), (dim, wide)


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("size", [(3, 9, 7), (2, 2, 3), (1, 1, 1), (2, 1, 13)])
def test_feed_forward(size, one_by_one, monkeypatch):
    """More positions than channels and fewer, the whole batch and sample by sample."""
    monkeypatch.setattr(ffn, "rows_at_once", lambda *args, **kwargs: 1 if one_by_one else 10**9)
    inputs = leaves(*shapes(size, 8))
    compare(lambda *args: ffn_training(*args, 1e-6), lambda *args: plain_ffn(*args, 1e-6), inputs)


@pytest.mark.parametrize("size", [(3, 9, 7), (2, 2, 3)])
def test_feed_forward_by_onednn(size):
    """The same in float32, where oneDNN multiplies."""
    inputs = [tensor.detach().float().requires_grad_() for tensor in leaves(*shapes(size, 8))]
    compare(lambda *args: ffn_training(*args, 1e-6), lambda *args: plain_ffn(*args, 1e-6), inputs, rtol=2e-4)


def test_a_channel_that_is_zero_everywhere():
    """Its norm has no gradient, nothing becomes infinite, and the others have theirs."""
    dim = 4
    inputs = leaves((2, 5, 5, dim), (2, dim), (16, dim), (16,), (16,), (16,), (dim, 16))
    with torch.no_grad():
        inputs[2][3], inputs[3][3] = 0, 0
    ours = torch.autograd.grad(ffn_training(*inputs, 1e-6).square().sum(), inputs)
    expected = torch.autograd.grad(plain_ffn(*inputs, 1e-6).square().sum(), inputs)
    live = torch.arange(16) != 3
    assert all(torch.isfinite(grad).all() for grad in ours)
    torch.testing.assert_close(ours[2][live], expected[2][live])
    torch.testing.assert_close(ours[4][live], expected[4][live])


@pytest.mark.parametrize(
    "frozen", [("x",), ("gate",), ("x", "gate"), ("w1", "b1"), ("w2",), ("x", "gate", "w1", "b1", "gamma", "beta")]
)
def test_frozen_parameters(frozen):
    names = ("x", "gate", "w1", "b1", "gamma", "beta", "w2")
    inputs = leaves((2, 3, 3, 4), (2, 4), (16, 4), (16,), (16,), (16,), (4, 16))
    inputs = [tensor.detach() if name in frozen else tensor for name, tensor in zip(names, inputs, strict=True)]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    results = [torch.autograd.grad(f(*inputs, 1e-6).square().sum(), wanted) for f in (ffn_training, plain_ffn)]
    torch.testing.assert_close(*results)


def test_second_derivatives():
    inputs = leaves((2, 3, 2, 2), (2, 2), (8, 2), (8,), (8,), (8,), (2, 8))
    assert torch.autograd.gradgradcheck(lambda *args: ffn_training(*args, 1e-6), inputs)


class TestFeedForward:
    """The layer takes the written-out pass where it may, and calls its parts where it must."""

    @pytest.fixture
    def layer(self):
        return randomize(FeedForward(8)).double()

    @staticmethod
    def gradients(layer, x, *factors):
        return torch.autograd.grad(layer(x, *factors).sin().sum(), [x, *factors, *layer.parameters()])

    @pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
    @pytest.mark.parametrize("size", [(2, 5, 5), (3, 2, 2), (2, 1, 1)])
    def test_gradients(self, layer, size, layout):
        (x,) = leaves((size[0], 8, *size[1:]))
        x = x.detach().contiguous(memory_format=layout).requires_grad_()
        gate, scale = leaves((size[0], 8), (8,), seed=1)
        assert "_BlockedFeedForward" in str(nodes(layer(x)))
        ours = self.gradients(layer, x), self.gradients(layer, x, gate, scale)
        statistics = layer.norm.running_mean.clone()
        with use_backend("reference"):
            assert "_BlockedFeedForward" not in str(nodes(layer(x)))
            expected = self.gradients(layer, x), self.gradients(layer, x, gate, scale)
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
        assert not torch.equal(layer.norm.running_mean, statistics), "batch statistics are taken in either way"

    @pytest.mark.parametrize(
        "register",
        [
            lambda module, note: module.register_forward_hook(lambda *args: note()),
            lambda module, note: module.register_forward_pre_hook(lambda *args: note()),
            lambda module, note: module.register_full_backward_hook(lambda *args: note()),
            lambda module, note: module.register_full_backward_pre_hook(lambda *args: note()),
            lambda module, note: register_module_forward_hook(lambda *args: note()),
        ],
    )
    def test_hooks_are_called(self, layer, register):
        (x,) = leaves((2, 8, 5, 5))
        calls = []
        handle = register(layer.fc1, lambda: calls.append(1))
        try:
            self.gradients(layer, x)
        finally:
            handle.remove()
        assert calls

    def test_another_module_in_its_place_is_called(self, layer):
        layer.fc1 = torch.nn.Sequential(layer.fc1)
        layer.fc1.weight, layer.fc1.bias = layer.fc1[0].weight, layer.fc1[0].bias
        assert "_BlockedFeedForward" not in str(nodes(layer(leaves((2, 8, 5, 5))[0])))

    def test_functional_transforms(self, layer):
        (x,) = leaves((2, 8, 5, 5))
        expected = torch.autograd.grad(layer.eval()(x).sum(), x)[0]
        torch.testing.assert_close(torch.func.grad(lambda x: layer(x).sum())(x.detach()), expected)
        _, tangent = torch.func.jvp(layer, (x.detach(),), (torch.ones_like(x),))
        torch.testing.assert_close(tangent.sum(), expected.sum())


def nodes(out):
    """The names of what a result was computed by."""
    found, todo = set(), [out.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return [type(node).__name__ for node in found]

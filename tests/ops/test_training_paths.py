"""The backward passes that are written out, against autograd on the plain formulas, in float64."""

import pytest
import torch
import torch.nn.functional as F

from wbmm.ops import ffn, windowed_product
from wbmm.ops.ffn_training import ffn_training
from wbmm.ops.windows import merge_windows, pad_to_windows, partition_windows


def leaves(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def plain_ffn(x, w1, b1, gamma, beta, w2, eps):
    u = F.gelu(F.linear(x, w1, b1))
    norm = torch.linalg.vector_norm(u, dim=(1, 2), keepdim=True)
    ratio = norm / (norm.mean(-1, keepdim=True) + eps)
    return F.linear(u * (1 + gamma * ratio) + beta, w2)


def compare(call, plain, inputs):
    """Outputs and all gradients, for a loss that is not symmetric in anything."""
    results = []
    for function in (call, plain):
        out = function(*inputs)
        weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape).sin()
        results.append([out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("size", [(3, 9, 7), (2, 2, 3), (1, 1, 1), (2, 1, 13)])
def test_feed_forward(size, one_by_one, monkeypatch):
    """More positions than channels and fewer, the whole batch and sample by sample."""
    monkeypatch.setattr(ffn, "HIDDEN_BYTES", 0 if one_by_one else 10**9)
    dim = 8
    inputs = leaves((*size, dim), (4 * dim, dim), (4 * dim,), (1, 1, 1, 4 * dim), (1, 1, 1, 4 * dim), (dim, 4 * dim))
    compare(lambda *args: ffn_training(*args, 1e-6), lambda *args: plain_ffn(*args, 1e-6), inputs)


def test_a_channel_that_is_zero_everywhere():
    """Its norm has no gradient; nothing becomes infinite."""
    dim = 4
    x, w1, b1, gamma, beta, w2 = leaves((2, 5, 5, dim), (16, dim), (16,), (16,), (16,), (dim, 16))
    with torch.no_grad():
        w1[3], b1[3] = 0, 0
    out = ffn_training(x, w1, b1, gamma, beta, w2, 1e-6)
    for grad in torch.autograd.grad(out.square().sum(), (x, w1, b1, gamma, beta, w2)):
        assert torch.isfinite(grad).all()


def plain_product(x, matrix, window, shortcuts):
    windows = partition_windows(pad_to_windows(x, window), window)
    out = torch.bmm(windows, matrix) + shortcuts * windows
    return merge_windows(out, (x.shape[0], *x.shape[-2:]), window, channels_last=False)


@pytest.mark.parametrize("shortcuts", [0, 1, 2])
@pytest.mark.parametrize("size", [(2, 7, 7), (3, 15, 9), (1, 3, 20)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_windowed_product(size, shortcuts, layout):
    window = (7, 7)
    x, matrix = leaves((size[0], 6, *size[1:]), (6, 49, 49))

    def ours(x, matrix):
        out = windowed_product(x.contiguous(memory_format=layout), matrix, window, shortcuts=shortcuts)
        assert "WindowedProduct" in type(out.grad_fn).__name__
        return out

    compare(ours, lambda x, matrix: plain_product(x, matrix, window, shortcuts), [x, matrix])


def test_only_one_of_them_needs_a_gradient():
    x, matrix = leaves((1, 3, 8, 8), (3, 49, 49))
    for wanted, constant in (((x, matrix.detach()), 1), ((x.detach(), matrix), 0)):
        out = windowed_product(*wanted, (7, 7), shortcuts=1)
        (leaf,) = (tensor for i, tensor in enumerate(wanted) if i != constant)
        assert torch.autograd.grad(out.sum(), leaf)[0].shape == leaf.shape


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_other_paddings_are_left_to_autograd(mode):
    x, matrix = leaves((1, 2, 9, 9), (2, 49, 49))
    out = windowed_product(x, matrix, (7, 7), padding_mode=mode)
    assert "WindowedProduct" not in type(out.grad_fn).__name__
    assert torch.autograd.gradcheck(
        lambda x: windowed_product(x, matrix, (7, 7), padding_mode=mode), x[:, :, :, :].detach().requires_grad_()
    )


def test_a_module_with_a_hook_is_called():
    from wbmm.layers import FeedForward

    layer, x = FeedForward(8).double(), torch.randn(2, 8, 5, 5, dtype=torch.float64)
    expected = layer(x)
    seen = []
    layer.fc1.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    torch.testing.assert_close(layer(x), expected)
    assert seen == [(2, 5, 5, 32)]

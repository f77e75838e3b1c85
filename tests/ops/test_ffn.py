"""The feed-forward fast path against the plain formula."""

import pytest
import torch
import torch.nn.functional as F

from wbmm.ops import ffn as ops_ffn


def plain(x, gate, shortcut, w1, b1, gamma, w2, b2, eps):
    h = F.gelu(F.linear((x * gate[:, :, None, None]).permute(0, 2, 3, 1), w1, b1))
    norm = torch.linalg.vector_norm(h, dim=(1, 2), keepdim=True)
    h = h * (1 + gamma * norm / (norm.mean(-1, keepdim=True) + eps))
    return shortcut + F.linear(h, w2, b2).permute(0, 3, 1, 2)


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (9, 11)])
@pytest.mark.parametrize("limit", [0, 10**9], ids=["by_sample", "whole_batch"])
def test_fast_path_equals_the_formula(size, limit, monkeypatch):
    monkeypatch.setattr(ops_ffn, "HIDDEN_BYTES", limit)
    dim, hidden, batch = 8, 32, 3
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    x, shortcut = make(batch, dim, *size), make(batch, dim, *size)
    x = x.contiguous(memory_format=torch.channels_last)
    args = (make(batch, dim), shortcut, make(hidden, dim), make(hidden), make(hidden), make(dim, hidden), make(dim))
    with torch.no_grad():
        got = ops_ffn.ffn_inference(x, *args, 1e-6)
    torch.testing.assert_close(got, plain(x, *args, 1e-6), rtol=1e-12, atol=1e-12)


def test_a_dead_channel_has_a_finite_gradient():
    x = torch.zeros(1, 2, 2, 3, dtype=torch.float64)
    x[..., 0] = 1
    x.requires_grad_()
    ops_ffn.response_norm(x, 1e-6).sum().backward()
    assert x.grad.isfinite().all()


def test_half_precision_sums_do_not_overflow():
    x = torch.full((1, 56, 56, 4), 100.0, dtype=torch.float16)
    torch.testing.assert_close(ops_ffn.response_norm(x, 1e-6), torch.ones(1, 1, 1, 4, dtype=torch.float16))

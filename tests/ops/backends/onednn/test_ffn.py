"""The feed-forward fast path against the plain formula."""

import pytest
import torch
import torch.nn.functional as F

from wbmm.ops import reference
from wbmm.ops.backends.onednn import ffn as ops_ffn
from wbmm.ops.backends.onednn.linear import pack_weight
from wbmm.ops.profile import thresholds


def plain(x, gate, shortcut, w1, b1, gamma, w2, b2, eps):
    h = F.gelu(F.linear((x * gate[:, :, None, None]).permute(0, 2, 3, 1), w1, b1))
    norm = torch.linalg.vector_norm(h, dim=(1, 2), keepdim=True)
    h = h * (1 + gamma * norm / (norm.mean(-1, keepdim=True) + eps))
    return shortcut + F.linear(h, w2, b2).permute(0, 3, 1, 2)


def inputs(size, batch=3, dim=8, hidden=32):
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    x, shortcut = make(batch, dim, *size), make(batch, dim, *size)
    x = x.contiguous(memory_format=torch.channels_last)
    return (x, make(batch, dim), shortcut, make(hidden, dim), make(hidden), make(hidden), make(dim, hidden), make(dim))


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (9, 11)])
@pytest.mark.parametrize("rows", [1, 10, 200, 10**9], ids=["by_row", "by_rows", "by_samples", "whole_batch"])
def test_fast_path_equals_the_formula(size, rows, monkeypatch):
    monkeypatch.setattr(ops_ffn, "rows_at_once", lambda *args, **kwargs: rows)
    args = inputs(size)
    with torch.no_grad():
        got = ops_ffn.ffn_inference(*args, 1e-6)
    torch.testing.assert_close(got, plain(*args, 1e-6), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [10, 10**9])
def test_fast_path_by_onednn(packed, rows, monkeypatch):
    """In float32, with weights as they are and in oneDNN's order, against float64."""
    monkeypatch.setattr(ops_ffn, "rows_at_once", lambda *args, **kwargs: rows)
    args = inputs((9, 11))
    expected = plain(*args, 1e-6)
    x, gate, shortcut, w1, b1, gamma, w2, b2 = (part.float() for part in args)
    if packed:
        w1, w2 = pack_weight(w1, 99), pack_weight(w2, 99)
    with torch.no_grad():
        got = ops_ffn.ffn_inference(x, gate, shortcut, w1, b1, gamma, w2, b2, 1e-6)
        scaled = ops_ffn.ffn_inference(x, gate, shortcut, w1, b1, gamma, w2, b2, 1e-6, unpacked=args[6].float())
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(scaled.double(), expected, rtol=1e-5, atol=1e-4)  # with GRN's scale in the weight


def test_blocks_bound_the_hidden_layer():
    like = torch.empty(16, 3136, 80)
    rows = ops_ffn.rows_at_once(320, like)
    least = thresholds(torch.float32).block_rows
    assert least < rows < 2 * 3136
    assert ops_ffn.rows_at_once(10**6, like) == least
    assert ops_ffn.rows_at_once(10**6, like, training=True) == thresholds(torch.float32).backward_rows


def test_a_dead_channel_has_a_finite_gradient():
    x = torch.zeros(1, 2, 2, 3, dtype=torch.float64)
    x[..., 0] = 1
    x.requires_grad_()
    reference.response_norm(x, 1e-6).sum().backward()
    assert x.grad.isfinite().all()


def test_half_precision_sums_do_not_overflow():
    x = torch.full((1, 56, 56, 4), 100.0, dtype=torch.float16)
    torch.testing.assert_close(reference.response_norm(x, 1e-6), torch.ones(1, 1, 1, 4, dtype=torch.float16))

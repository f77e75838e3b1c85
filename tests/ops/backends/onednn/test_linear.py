"""Linears by oneDNN against the plain formula, and who takes them."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from wbmm.ops.backends.onednn.linear import linear, linear_add, linear_gelu, pack_weight, takes_onednn


@pytest.fixture(params=["float64", "float32", "packed"])
def case(request):
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float64 if request.param == "float64" else torch.float32
    x, weight, bias, other = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((2, 5, 8), (12, 8), (12,), (2, 5, 12))
    )
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    return x, weight, pack_weight(weight, 5) if request.param == "packed" else weight, bias, other, tolerance


@torch.no_grad()
def test_formulas(case):
    x, plain, weight, bias, other, tolerance = case
    expected = F.linear(x, plain, bias)
    close = {"rtol": tolerance, "atol": tolerance}
    before = x.clone(), other.clone()
    torch.testing.assert_close(linear(x, weight, bias), expected, **close)
    torch.testing.assert_close(linear(x, weight), F.linear(x, plain), **close)
    torch.testing.assert_close(linear_gelu(x, weight, bias), F.gelu(expected), **close)
    torch.testing.assert_close(linear_add(x, weight, bias, other), expected + other, **close)
    assert torch.equal(x, before[0])
    assert torch.equal(other, before[1])


@torch.no_grad()
def test_transposed_views():
    x, weight = torch.randn(40, 9), torch.randn(9, 24)
    torch.testing.assert_close(linear(x, weight.t()), x @ weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear(x.t(), torch.randn(7, 40)).shape, torch.Size((9, 7)))


def test_who_takes_it():
    x = torch.randn(2, 3)
    expected = torch.backends.mkldnn.is_available()
    assert takes_onednn(x) == expected
    assert not takes_onednn(x.double())
    assert not takes_onednn(x.half())
    assert not takes_onednn(x, x.to("meta"))
    with FlopCounterMode(display=False):
        assert not takes_onednn(x)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not takes_onednn(x)

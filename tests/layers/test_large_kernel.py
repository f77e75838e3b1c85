"""The large-kernel CUDA package, which a stand-in on the CPU takes the place of here."""

import sys
import types

import pytest
import timm
import torch
import torch.nn as nn

import wbmm
from tests.helpers import randomize
from wbmm.layers import depthwise as large_kernel

PACKAGE = "depthwise_conv2d_implicit_gemm"
NARROW = {"dims": (8, 16, 32, 64), "num_classes": 10}


@pytest.fixture
def calls(monkeypatch):
    """The kernel sizes that the stand-in was called with."""
    seen = []

    class DepthWiseConv2dImplicitGEMM(nn.Conv2d):
        def __init__(self, channels, kernel, bias=False):
            super().__init__(channels, channels, kernel, padding=kernel // 2, groups=channels, bias=bias)

        def forward(self, x):
            assert x.is_contiguous()
            seen.append(self.kernel_size[0])
            return super().forward(x)

    module = types.ModuleType(PACKAGE)
    module.DepthWiseConv2dImplicitGEMM = DepthWiseConv2dImplicitGEMM
    monkeypatch.setitem(sys.modules, PACKAGE, module)
    large_kernel._implicit_gemm.cache_clear()
    yield seen
    large_kernel._implicit_gemm.cache_clear()


@pytest.mark.parametrize("mixer", ["dw13", "dw13_reparam"])
def test_same_values_and_gradients(calls, mixer):
    plain = randomize(timm.create_model("unireplknet_a", mixer=mixer, **NARROW)).eval()
    fast = timm.create_model("unireplknet_a", mixer=mixer, large_kernel="implicit_gemm", **NARROW).eval()
    fast.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 40, 40)
    for net in (plain, fast):
        net(x).square().sum().backward()
    assert calls == [13] * 10, "one call for each W block"
    for a, b in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
    calls.clear()
    with torch.no_grad():
        torch.testing.assert_close(wbmm.fuse(fast)(x), wbmm.fuse(plain)(x), rtol=1e-4, atol=1e-4)
    assert calls == [13] * 10


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    assert large_kernel.find_implicit_gemm() is None
    with pytest.raises(ImportError, match=f"needs the CUDA package {PACKAGE}"):
        timm.create_model("unireplknet_a", large_kernel="implicit_gemm", **NARROW)


def test_wrong_names():
    with pytest.raises(ValueError, match="large_kernel 'cutlass': expected None or one of implicit_gemm"):
        timm.create_model("unireplknet_a", large_kernel="cutlass", **NARROW)
    with pytest.raises(ValueError, match="is for depthwise mixers such as 'dw13'; the mixer is 'wbmm'"):
        timm.create_model("wbmm_a", large_kernel="implicit_gemm", **NARROW)


def test_a_run_with_the_package_loads_without_it():
    """A checkpoint of `wbmm train` says how its net was run; what it is does not depend on it."""
    from wbmm.io.card import _card_of_run

    keys = ("mean", "std", "interpolation", "crop_pct", "in_chans", "size")
    data = dict(zip(keys, ((0.5,), (0.5,), "bicubic", 0.9, 1, 56), strict=True))
    model = {"name": "unireplknet_a", "args": {"large_kernel": "implicit_gemm", "mixer": "dw13"}}
    card = _card_of_run({"config": {"model": model, "data": data}, "num_classes": 10})
    assert card.args == {"mixer": "dw13"}

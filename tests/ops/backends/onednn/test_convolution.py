"""Windows as convolutions against the product with the matrix."""

import pytest
import torch

from wbmm.layers import FullConnection2d, FusedHierarchicalWBMM2d, FusedWBMM2d
from wbmm.ops import num_offsets, reference, use_backend
from wbmm.ops.backends import onednn
from wbmm.ops.backends.onednn.windowed import prefers_convolution, table_to_kernel, windowed_convolution

SIZES = [(14, 21), (7, 7), (9, 13), (15, 7), (3, 2), (1, 30)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", [(7, 7), (3, 4), (14, 14)])
def test_equals_the_product(size, window):
    table, bias = torch.randn(5, num_offsets(window), dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    x = torch.randn(2, 5, *size, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    expected = reference.windowed(x, [table], window, bias)
    got = windowed_convolution(x, table_to_kernel(table, window), window, bias)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert got.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("mode", ["zeros", "replicate", "reflect"])
@pytest.mark.parametrize("size", [(28, 14), (30, 13)])
@pytest.mark.parametrize("hierarchical", [False, True])
def test_a_fused_layer_takes_it(size, mode, layout, hierarchical, monkeypatch):
    calls = []
    monkeypatch.setattr(onednn, "windowed_convolution", lambda *args: calls.append(1) or windowed_convolution(*args))
    layer = FusedWBMM2d(torch.randn(6, 169), torch.randn(6), (7, 7), mode)
    if hierarchical:
        layer = FusedHierarchicalWBMM2d(torch.randn(6, 27 * 27), torch.randn(6, 169), torch.randn(6), (14, 14), mode)
    layer.eval()
    x = torch.randn(2, 6, *size).contiguous(memory_format=layout)
    with torch.no_grad():
        got = layer(x)
        assert calls
        with use_backend("reference"):
            expected = layer(x)
    assert len(calls) == 1 + hierarchical
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert got.stride() == expected.stride()


def test_who_prefers_it():
    x = torch.empty(16, 4, 56, 56)
    assert prefers_convolution(x, (7, 7))
    assert prefers_convolution(x, (14, 14))
    assert not prefers_convolution(x, (4, 14)), "small windows have small matrices"
    assert not prefers_convolution(x.double(), (14, 14)), "float64 has no such convolution"


def test_a_full_connection_is_a_product():
    layer = FullConnection2d(4, 7).fuse().eval()
    x = torch.randn(2, 4, 14, 9)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), layer.double()(x.double()).float(), rtol=1e-4, atol=1e-4)


def test_a_table_that_is_a_view_of_the_same_memory():
    layer = FusedWBMM2d(torch.randn(169, 169), torch.randn(169), (7, 7)).eval()
    x = torch.randn(1, 169, 7, 7)
    with torch.no_grad():
        layer(x)
        layer.table.data = layer.table.data.t()
        expected = reference.windowed(x, layer.tables(), layer.window, layer.bias)
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


def test_forward_mode_and_other_types_take_the_product():
    layer = FusedWBMM2d(torch.randn(4, 169), torch.randn(4), (7, 7)).eval()
    x, tangent = torch.randn(2, 4, 9, 7), torch.randn(2, 4, 9, 7)
    with torch.no_grad():
        _, got = torch.func.jvp(layer, (x,), (tangent,))
        torch.testing.assert_close(got, reference.windowed(tangent, layer.tables(), (7, 7)), rtol=1e-4, atol=1e-4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16

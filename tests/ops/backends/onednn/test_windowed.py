"""The windowed product with its backward pass written out, against autograd on the canonical path."""

import pytest
import torch

from wbmm.layers import HierarchicalWBMM2d, MultiKernelWBMM2d, WBMM2d
from wbmm.ops import expand_hierarchical, expand_table, num_offsets, reference
from wbmm.ops.backends import onednn
from wbmm.ops.backends.onednn import windowed
from wbmm.ops.backends.onednn.windowed import windowed_training
from wbmm.ops.profile import Profile, Thresholds, use_profile
from wbmm.ops.tables import collapse_hierarchical, collapse_matrix

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
CASES = [((7, 7), 1), ((3, 4), 1), ((4, 6), 2), ((1, 1), 1), ((2, 2), 2)]


def leaves(size, window, tables, dtype=torch.float64, layout=torch.channels_last, channels=5):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, channels, *size, generator=generator, dtype=torch.float64).to(dtype)
    windows = [window, (window[0] // 2, window[1] // 2)][:tables]
    made = [torch.randn(channels, num_offsets(w), generator=generator, dtype=torch.float64).to(dtype) for w in windows]
    return [x.contiguous(memory_format=layout).requires_grad_(), *(table.requires_grad_() for table in made)]


def canonical(x, *tables, window, **options):
    return reference.windowed(x, list(tables), window, **options)


def compare(inputs, window, tolerance=1e-11, **options):
    results = []
    for call in (lambda x, *tables: windowed_training(x, list(tables), window, **options), None):
        out = call(*inputs) if call else canonical(*inputs, window=window, **options)
        weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape).sin()
        results.append([out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    assert results[0][0].stride() == results[1][0].stride()


@pytest.mark.parametrize(("window", "tables"), CASES)
@pytest.mark.parametrize("size", [(7, 7), (9, 13), (2, 3)])
@pytest.mark.parametrize("layout", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shortcuts", [0, 1, 2])
def test_outputs_and_all_gradients(window, tables, size, layout, shortcuts):
    compare(leaves(size, window, tables, layout=layout), window, shortcuts=shortcuts)


@pytest.mark.parametrize("padding_mode", ["reflect", "replicate"])
def test_other_padding(padding_mode):
    compare(leaves((9, 13), (4, 4), 2), (4, 4), padding_mode=padding_mode, shortcuts=2)


@pytest.mark.parametrize("tables", [1, 2])
def test_table_gradients_for_one_channel_at_a_time(tables):
    with use_profile(Profile(float32=Thresholds(matrix_bytes=2**12))):  # a matrix of 24 x 24 float64 is larger
        compare(leaves((9, 13), (4, 6), tables), (4, 6))


@pytest.mark.parametrize("layout", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(("window", "size"), [((10, 10), (20, 30)), ((10, 12), (13, 9))])
def test_large_windows_are_convolved(window, size, layout, monkeypatch):
    """In float32, where oneDNN convolves, against float64."""
    calls, convolve = [], windowed.windowed_convolution
    monkeypatch.setattr(windowed, "windowed_convolution", lambda *args: calls.append(1) or convolve(*args))
    inputs = leaves(size, window, 1, torch.float32, layout)
    results = [windowed_training(inputs[0], inputs[1:], window, shortcuts=1)]
    double = [tensor.detach().double().requires_grad_() for tensor in inputs]
    results.append(canonical(*double, window=window, shortcuts=1))
    gradients = [
        torch.autograd.grad((out * out.detach().sin()).sum(), leaf)
        for out, leaf in zip(results, (inputs, double), strict=True)
    ]
    assert len(calls) == 2, "once in either direction"
    assert results[0].is_contiguous(memory_format=layout)
    for ours, expected in zip([results[0], *gradients[0]], [results[1], *gradients[1]], strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 2)])
def test_frozen_inputs(frozen):
    inputs = leaves((9, 13), (4, 6), 2)
    inputs = [tensor.detach() if i in frozen else tensor for i, tensor in enumerate(inputs)]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    ours = torch.autograd.grad(windowed_training(inputs[0], inputs[1:], (4, 6)).square().sum(), wanted)
    expected = torch.autograd.grad(canonical(*inputs, window=(4, 6)).square().sum(), wanted)
    torch.testing.assert_close(ours, expected)


def test_second_derivatives():
    inputs = leaves((3, 3), (2, 2), 2, channels=2)
    assert torch.autograd.gradgradcheck(
        lambda x, *tables: windowed_training(x, list(tables), (2, 2), shortcuts=1), inputs
    )


@pytest.mark.parametrize("window", [(7, 7), (4, 6), (2, 2)])
def test_collapse_is_the_adjoint_of_expand(window):
    generator = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    area, local = window[0] * window[1], (window[0] // 2, window[1] // 2)
    matrix, table, small = make(3, area, area), make(3, num_offsets(window)), make(3, num_offsets(local))
    inner = (expand_table(table, window) * matrix).sum()
    torch.testing.assert_close((collapse_matrix(matrix, window) * table).sum(), inner)
    if window[0] % 2 == 0:
        inner = (expand_hierarchical(table, small, window) * matrix).sum()
        parts = collapse_hierarchical(matrix, window)
        torch.testing.assert_close((parts[0] * table).sum() + (parts[1] * small).sum(), inner)


@pytest.mark.parametrize("layer", [WBMM2d, HierarchicalWBMM2d, MultiKernelWBMM2d])
def test_layers_take_it_in_training_only(layer, monkeypatch):
    calls = []
    monkeypatch.setattr(onednn, "windowed_training", lambda *args: calls.append(1) or windowed_training(*args))
    mixer = layer(8, 2).double()
    x = torch.randn(2, 8, 6, 5, dtype=torch.float64)
    with torch.no_grad():
        expected = mixer(x)
    assert not calls
    torch.testing.assert_close(mixer(x), expected) if layer is not MultiKernelWBMM2d else mixer(x)
    assert calls

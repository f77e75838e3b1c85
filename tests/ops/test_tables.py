"""Tables and matrices: the paper's two theorems, and the algebra of fusion."""

import pytest
import torch
import torch.nn.functional as F

from wbmm.ops import (
    expand_hierarchical,
    expand_table,
    identity_table,
    kernel_to_table,
    num_offsets,
    relative_index,
    resize_table,
    windowed,
    zero_offset,
)

WINDOWS = [(7, 7), (3, 5), (1, 4), (2, 2)]


def depthwise(x, kernel):
    return F.conv2d(x, kernel, padding=(kernel.shape[-2] // 2, kernel.shape[-1] // 2), groups=x.shape[1])


@pytest.mark.parametrize("window", WINDOWS)
def test_index_follows_its_formula(window):
    wh, ww = window
    index = relative_index(window)
    for i in range(wh * ww):
        for j in range(wh * ww):
            dh, dw = i // ww - j // ww, i % ww - j % ww
            assert index[i, j] == (dh + wh - 1) * (2 * ww - 1) + dw + ww - 1


@pytest.mark.parametrize("kernel", [(3, 3), (5, 7), (13, 13), (1, 9)])
def test_depthwise_convolution_equals_the_matrix_form(kernel):
    """Theorem 2: on a whole map, a depthwise convolution is a product with a matrix over offsets."""
    size = (7, 5)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    weight = torch.randn(3, 1, *kernel, dtype=torch.float64)
    matrix = expand_table(kernel_to_table(weight, size), size)
    product = torch.einsum("bci,cij->bcj", x.flatten(2), matrix).view_as(x)
    torch.testing.assert_close(product, depthwise(x, weight), rtol=0, atol=1e-12)


def test_taps_beyond_the_largest_offset_are_inert():
    """Theorem 1: on an HxW map only (2H-1)x(2W-1) taps of a kernel can matter, in output and gradient."""
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    weight = torch.randn(2, 1, 11, 11, dtype=torch.float64, requires_grad=True)
    out = depthwise(x, weight)
    out.square().sum().backward()
    used = torch.zeros(11, 11, dtype=torch.bool)
    used[5 - 2 : 5 + 3, 5 - 3 : 5 + 4] = True
    assert weight.grad[:, 0, ~used].abs().max() == 0
    assert (weight.grad[:, 0, used] != 0).all()
    inner = weight[:, :, 3:8, 2:9]
    torch.testing.assert_close(depthwise(x, inner), out, rtol=0, atol=1e-12)
    assert kernel_to_table(weight, (3, 4)).shape == (2, 5 * 7)


@pytest.mark.parametrize("window", WINDOWS)
def test_wbmm_is_a_depthwise_convolution_inside_each_window(window):
    wh, ww = window
    table = torch.randn(3, num_offsets(window), dtype=torch.float64)
    kernel = table.view(3, 1, 2 * wh - 1, 2 * ww - 1)
    x = torch.randn(2, 3, 2 * wh, 3 * ww, dtype=torch.float64)
    expected = torch.zeros_like(x)
    for i in range(2):
        for j in range(3):
            part = (slice(None), slice(None), slice(i * wh, (i + 1) * wh), slice(j * ww, (j + 1) * ww))
            expected[part] = depthwise(x[part], kernel)
    got = windowed(x, [expand_table(table, window)], window)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_a_transposed_index_would_show():
    window = (3, 3)
    matrix = expand_table(torch.randn(2, num_offsets(window)), window)
    assert (matrix - matrix.transpose(1, 2)).abs().max() > 0.1


def test_identity_table_expands_to_the_identity():
    window = (3, 4)
    table = identity_table(2, window)
    assert table[0, zero_offset(window)] == 1
    torch.testing.assert_close(expand_table(table, window), torch.eye(12).expand(2, 12, 12))


def test_hierarchical_matrix_adds_the_local_one_on_diagonal_blocks():
    window, local = (4, 6), (2, 3)
    table, local_table = torch.randn(2, num_offsets(window)), torch.randn(2, num_offsets(local))
    matrix = expand_hierarchical(table, local_table, window)
    plain, small = expand_table(table, window), expand_table(local_table, local)
    for i in range(24):
        for j in range(24):
            (hi, wi), (hj, wj) = divmod(i, 6), divmod(j, 6)
            expected = plain[:, i, j]
            if (hi // 2, wi // 3) == (hj // 2, wj // 3):
                expected = expected + small[:, hi % 2 * 3 + wi % 3, hj % 2 * 3 + wj % 3]
            torch.testing.assert_close(matrix[:, i, j], expected)


def test_even_kernels_have_no_centre():
    with pytest.raises(ValueError, match="4x4 kernel has no centre"):
        kernel_to_table(torch.zeros(1, 1, 4, 4), (7, 7))


def test_resizing_a_table_keeps_its_centre_and_its_sum():
    table = torch.zeros(1, 169)
    table[0, 84] = 1.0
    bigger = resize_table(table, (7, 7), (14, 14))
    assert bigger.shape == (1, num_offsets((14, 14)))
    assert bigger.argmax() == zero_offset((14, 14))
    smooth = torch.ones(1, 169)
    torch.testing.assert_close(resize_table(smooth, (7, 7), (14, 14)).sum(), smooth.sum())
    torch.testing.assert_close(resize_table(table, (7, 7), (7, 7)), table)


def test_an_index_first_asked_for_in_inference_mode_serves_training_too():
    window = (3, 11)  # of no other test: it is shared
    with torch.inference_mode():
        relative_index(window)
    table = torch.randn(2, num_offsets(window), requires_grad=True)
    expand_table(table, window).sum().backward()
    assert table.grad is not None

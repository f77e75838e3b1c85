"""What the reference costs, beside what it gives: dtypes under autocast, copies, layouts of gradients."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wbmm.ops import reference


class Calls(TorchDispatchMode):
    """Counts operators, and conversions to another dtype by the shape of what is converted."""

    def __init__(self):
        super().__init__()
        self.operators, self.conversions = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.operators[name] += 1
        if name == "_to_copy":
            self.conversions[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


def a_map(*shape, **options):
    return torch.randn(*shape, **options).contiguous(memory_format=torch.channels_last).requires_grad_()


@pytest.mark.parametrize("beta", [True, False])
def test_response_norm_under_autocast_stays_in_its_type(beta):
    """gamma and beta are float32; promoted to that, the widest tensor of the net would take twice the memory."""
    x = torch.randn(2, 5, 5, 8).bfloat16().requires_grad_()
    gamma, shift = torch.randn(2, 1, 1, 1, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = reference.grn(x, gamma, shift if beta else None, 1e-6)
    assert out.dtype == torch.bfloat16
    exact = reference.grn(x.double(), gamma.double(), shift.double() if beta else None, 1e-6)
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shortcuts", [0, 1])
def test_the_map_is_converted_once_under_autocast(shortcuts):
    x, table = a_map(2, 4, 9, 9), torch.randn(4, 25)
    with torch.autocast("cpu", dtype=torch.bfloat16), Calls() as calls:
        out = reference.windowed(x, [table], (3, 3), None, shortcuts)
    assert out.dtype == torch.bfloat16
    assert calls.conversions == {(2, 4, 9, 9): 1, (4, 9, 9): 1}, "the map before it is cut, and the matrix"


def test_autocast_leaves_float64_and_meta_tensors_alone():
    table = torch.randn(4, 25, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert reference.windowed(a_map(2, 4, 9, 9, dtype=torch.float64), [table], (3, 3)).dtype == torch.float64
        on_meta = torch.empty(2, 4, 9, 9, device="meta")
        assert reference.windowed(on_meta, [table.float().to("meta")], (3, 3)).shape == on_meta.shape


def test_what_is_added_zero_times_gets_no_gradient():
    x, table = a_map(2, 4, 9, 9), torch.randn(4, 25, requires_grad=True)
    out = reference.windowed(x, [table], (3, 3)).sum()
    with Calls() as calls:
        out.backward()
    assert calls.operators["bmm"] == 2
    assert calls.operators["slice_backward"] == 0


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("size", [(9, 9), (8, 10)])
@pytest.mark.parametrize("shortcuts", [0, 1])
def test_the_gradient_has_the_layout_of_the_map(size, shortcuts, channels_last):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(2, 4, *size).contiguous(memory_format=layout).requires_grad_()
    out = reference.windowed(x, [torch.randn(4, 25)], (3, 3), None, shortcuts)
    (grad,) = torch.autograd.grad(out, x, torch.randn_like(out))
    assert out.is_contiguous(memory_format=layout)
    assert grad.is_contiguous(memory_format=layout)

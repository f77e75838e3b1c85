"""bfloat16 by oneDNN: as near to float64 as the reference's own rounding, with sums in float32."""

import pytest
import timm
import torch

import wbmm
from tests.helpers import randomize
from wbmm.ops import dispatch, use_backend
from wbmm.ops.backends.onednn import linear
from wbmm.ops.backends.onednn.ffn import _sum_of_squares

pytestmark = pytest.mark.skipif(not linear.computes(torch.bfloat16), reason="this processor has no bfloat16")
NARROW = {"dims": (16, 32, 48, 64), "num_classes": 10}


@pytest.mark.parametrize("name", ["wbmm_a", "wbmm_a_hier"])
@pytest.mark.parametrize("size", [(64, 64), (60, 75)])
def test_as_near_to_float64_as_the_reference(name, size):
    exact = wbmm.fuse(randomize(timm.create_model(name, **NARROW)).double().eval())
    model, x = exact.bfloat16(), torch.randn(4, 3, *size).bfloat16()
    taken = set()
    with torch.inference_mode():
        with dispatch.watch(lambda operator, backend, reasons: taken.add((operator, backend))):
            ours = model(x)
        with use_backend("reference"):
            reference = model(x)
            expected = model.double()(x.double())  # the same weights, rounded to bfloat16
    assert {("windowed", "onednn"), ("gated_ffn", "onednn")} <= taken
    error, allowed = ((out.double() - expected).norm() for out in (ours, reference))
    assert error <= 1.3 * allowed


def test_squares_are_summed_in_float32():
    rows = torch.full((1, 4096, 3), 1.5, dtype=torch.bfloat16)  # in bfloat16 the sum would stop at 512
    assert _sum_of_squares(rows).flatten().tolist() == [4096 * 2.25] * 3


def test_a_processor_without_it_takes_products(monkeypatch):
    monkeypatch.setattr(linear, "has_bfloat16", lambda: False)
    assert not linear.computes(torch.bfloat16)
    assert linear.computes(torch.float32)

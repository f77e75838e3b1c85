"""Autocast that is on for the backward pass alone: gradients of a float32 forward pass stay what they are."""

import pytest
import torch

from wbmm.layers import FeedForward, HierarchicalWBMM2d, WBMM2d

LAYERS = {
    "feed-forward, large map": (lambda: FeedForward(6), (2, 6, 8, 8)),
    "feed-forward, small map": (lambda: FeedForward(16), (2, 16, 3, 3)),
    "7x7 windows": (lambda: WBMM2d(6, 7), (2, 6, 14, 9)),
    "3x3 windows": (lambda: WBMM2d(6, 3), (2, 6, 7, 9)),
    "hierarchical": (lambda: HierarchicalWBMM2d(6, 4), (2, 6, 7, 9)),
}


@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
def test_gradients_are_those_without_it(make, shape):
    layer, x = make(), torch.randn(shape, requires_grad=True)
    inputs = [x, *layer.parameters()]

    def gradients(enabled):
        loss = layer(x).square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            return torch.autograd.grad(loss, inputs)

    torch.testing.assert_close(gradients(True), gradients(False), rtol=1e-6, atol=1e-6)

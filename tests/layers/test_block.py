"""The block and its fused form."""

import pytest
import torch
import torch.nn as nn
from timm.layers import DropPath

from tests.helpers import randomize
from wbmm.layers import Block, DepthwiseConv2d, HierarchicalWBMM2d, MultiKernelWBMM2d, WBMM2d


@pytest.mark.parametrize("mixer", [DepthwiseConv2d, WBMM2d, HierarchicalWBMM2d, MultiKernelWBMM2d])
@pytest.mark.parametrize("size", [(14, 14), (5, 5), (9, 40)])
@pytest.mark.parametrize("layer_scale", [1e-6, None])
def test_fused_block_equals_training_form(mixer, size, layer_scale):
    block = randomize(Block(mixer(8), 8, ls_init_value=layer_scale).double()).eval()
    before = {k: v.clone() for k, v in block.state_dict().items()}
    fused = block.fuse()
    x = torch.randn(3, 8, *size, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = block(x)
        assert (expected - x).abs().max() > 0.1
        torch.testing.assert_close(fused(x), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(fused(x), expected, rtol=0, atol=1e-10)  # the canonical path, with gradients on
    fused.se.fc1.weight.data.zero_()
    for key, value in block.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


def test_half_precision_fused_block_is_finite_and_close():
    block = randomize(Block(WBMM2d(16), 16)).eval()
    fused = block.fuse()
    x = torch.randn(2, 16, 28, 28).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = fused(x)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype):
                got = fused(x)
            assert got.isfinite().all()
            torch.testing.assert_close(got.float(), expected, rtol=0.05, atol=0.15)


def test_drop_path_is_where_timm_has_it():
    """Code for timm's models reads `block.drop_path` and assigns to it; the feed-forward part computes it."""
    block = randomize(Block(WBMM2d(8), 8, drop_path=0.25))
    assert block.drop_path.drop_prob == 0.25
    assert [name for name, module in block.named_modules() if isinstance(module, DropPath)] == ["ffn.drop_path"]
    x = torch.randn(64, 8, 7, 7)
    skipped = (block(x) == x).flatten(1).all(1)
    assert 0 < skipped.sum() < 64
    block.drop_path = nn.Identity()
    assert not (block(x) == x).flatten(1).all(1).any()
    block.drop_path = DropPath(1 - 1e-9)
    assert (block(x) == x).flatten(1).all(1).all()
    torch.jit.script(block)

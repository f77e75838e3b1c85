"""The parts of an exported graph that are ours, in ONNX Runtime: windowed product, feed-forward, pooling and more."""

import pytest
import torch
import torch.nn as nn

from tests.fixtures.tiny import tiny
from wbmm.deploy.export import to_onnx
from wbmm.deploy.export.graph import (
    ExactAdaptivePool,
    Normalize,
    OpaqueFeedForward,
    OpaqueMixer,
    make_opaque,
    replace_pooling,
)
from wbmm.models.fuse import fuse
from wbmm.ops import reference
from wbmm.ops.reference import opaque_product

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

PRODUCTS = [
    # window, padding mode, bias, shortcuts
    ((7, 7), "zeros", True, 0),
    ((3, 5), "reflect", True, 0),
    ((5, 3), "replicate", False, 1),
    ((4, 4), "zeros", False, 2),
    ((2, 3), "reflect", False, 0),
]
DIMS = {0: torch.export.Dim("batch"), 2: torch.export.Dim("height", min=6), 3: torch.export.Dim("width", min=6)}
SHAPES = [(2, 4, 13, 11), (1, 4, 14, 15), (3, 4, 13, 8), (2, 4, 6, 29), (1, 4, 12, 12)]


class Products(nn.Module):
    """Every kind of product of one map."""

    def __init__(self) -> None:
        super().__init__()
        sides = [wh * ww for (wh, ww), *_ in PRODUCTS]
        self.matrices = nn.ParameterList(torch.randn(4, side, side) / side for side in sides)
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x, product=opaque_product):
        return tuple(
            product(x, matrix, list(window), self.bias if bias else None, shortcuts, mode)
            for matrix, (window, mode, bias, shortcuts) in zip(self.matrices, PRODUCTS, strict=True)
        )


def converted(module, example, dims=None):
    with torch.no_grad():
        program = torch.export.export(module.eval(), (example,), dynamic_shapes=(dims,) if dims else None)
    return to_onnx.onnx_program(program, [], dims)


def session(module, example, dims=None):
    runtime = onnxruntime.InferenceSession(converted(module, example, dims).model_proto.SerializeToString())
    return lambda x: [torch.from_numpy(y) for y in runtime.run(None, {"images": x.numpy()})]


@pytest.mark.parametrize("dims", [DIMS, None], ids=["any size", "one size"])
def test_windowed_products(dims):
    module = Products()
    run = session(module, torch.randn(SHAPES[0]), dims)
    for shape in SHAPES if dims else SHAPES[:1]:
        x = torch.randn(shape)
        with torch.no_grad():
            expected = module(x, lambda x, matrix, window, *rest: reference.windowed(x, [matrix], tuple(window), *rest))
        torch.testing.assert_close(run(x), list(expected), rtol=1e-5, atol=1e-5)
    if dims:
        with pytest.raises(Exception, match="reflect"):  # too small to be mirrored: an error, not a wrong result
            run(torch.randn(1, 4, 1, 11))


def test_a_block_of_one_size_is_plain_operators():
    """Maps of whole windows need no padding, and nothing looks at sizes."""
    block = make_opaque(fuse(tiny().stages[0].blocks))[0]
    assert isinstance(block.mixer, OpaqueMixer)
    assert isinstance(block.ffn, OpaqueFeedForward)
    kinds = {node.op_type for node in converted(block, torch.randn(1, 8, 14, 7)).model.graph}
    assert {"MatMul", "Gemm", "Gelu"} <= kinds
    assert not kinds & {"Pad", "Slice", "Shape", "Gather"}


def test_blocks_of_any_size():
    blocks = tiny().stages[0].blocks
    run = session(make_opaque(fuse(blocks)), torch.randn(2, 8, 13, 11), DIMS)
    for batch, _, height, width in SHAPES:
        x = torch.randn(batch, 8, height, width)
        with torch.no_grad():
            torch.testing.assert_close(run(x)[0], blocks(x), rtol=1e-5, atol=1e-5)


def test_more_than_a_file_can_hold(monkeypatch):
    monkeypatch.setattr(to_onnx, "LIMIT", 100)
    with pytest.raises(ValueError, match="an ONNX file holds at most 2 GB; take the compact form or openvino"):
        converted(nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8))


@pytest.mark.parametrize("size", [(12, 18), (7, 11), (6, 5), (32, 49)])
@pytest.mark.parametrize("bins", [(2, 2), (3, 3), (6, 6), (5, 3)])
def test_pooling_is_exact(size, bins):
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    expected = nn.functional.adaptive_avg_pool2d(x, bins)
    torch.testing.assert_close(ExactAdaptivePool(bins)(x), expected, rtol=1e-12, atol=1e-12)


def test_pooling_of_maps_of_any_size():
    net = replace_pooling(nn.Sequential(nn.AdaptiveAvgPool2d(6), nn.Identity(), nn.Sequential(nn.AdaptiveAvgPool2d(1))))
    assert isinstance(net[0], ExactAdaptivePool)
    assert isinstance(net[2][0], nn.AdaptiveAvgPool2d)  # a mean, which exporters know
    run = session(net[0], torch.randn(2, 4, 13, 11), DIMS)
    for shape in [(1, 4, 12, 6), (3, 4, 31, 17)]:
        x = torch.randn(shape)
        torch.testing.assert_close(run(x)[0], nn.functional.adaptive_avg_pool2d(x, 6), rtol=1e-5, atol=1e-6)


def test_normalisation():
    from torchvision.transforms.functional import normalize

    x = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    torch.testing.assert_close(Normalize(mean, std)(x), normalize(x / 255, mean, std), rtol=0, atol=1e-6)

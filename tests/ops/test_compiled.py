"""What torch.compile sees in inference on a CPU: our two operators, with the outputs of the reference."""

import copy
import re
from contextlib import nullcontext

import pytest
import timm
import torch
import torch._inductor.config
from torch._dynamo.testing import CompileCounter
from torch._inductor.utils import run_and_get_code

import wbmm
from tests.helpers import randomize
from wbmm.ops import compiled, use_backend
from wbmm.ops.kept import find_kept

NARROW = {"dims": (8, 16, 24, 32), "num_classes": 5}
pytestmark = pytest.mark.skipif(not compiled._types, reason="oneDNN is not there")


@torch.compile(backend="eager", fullgraph=True)
def _exports(x):
    return x + 1 if torch.compiler.is_exporting() else x


# PyTorch 2.9 takes what it compiles for what it exports, so its compiler sees the reference.
tells_apart = pytest.mark.skipif(_exports(torch.zeros(())).item() == 1, reason="this PyTorch calls compiling exporting")


def fused(name="wbmm_a_dense", **options):
    torch._dynamo.reset()
    return wbmm.fuse(randomize(timm.create_model(name, **NARROW, **options)).eval())


def operators_of(model, x):
    """Names of our operators in the graph that a compiler gets."""
    names = []

    def backend(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes if "wbmm" in str(node.target))
        return graph.forward

    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(x)
    return names


@tells_apart
def test_the_compiled_model_gives_the_logits_of_the_reference():
    model, x = fused(), torch.randn(2, 3, 60, 75)
    with torch.no_grad():
        with use_backend("reference"):
            expected = model(x)
        (out, again), (code,) = run_and_get_code(lambda: [torch.compile(model, fullgraph=True)(x) for _ in range(2)])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-5)
    assert "torch.ops.wbmm.windowed" in code
    assert "torch.ops.wbmm.gated_ffn" in code


@pytest.mark.parametrize("name", ["wbmm_a", "wbmm_a_hier"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_other_forms_and_layouts(name, layout):
    model, x = fused(name), torch.randn(2, 3, 64, 40).contiguous(memory_format=layout)
    with torch.no_grad():
        with use_backend("reference"):
            expected = model(x)
        out = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@tells_apart
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("wbmm_a", torch.float32),
        *(pytest.param("wbmm_a_hier", dtype, marks=pytest.mark.heavy) for dtype in compiled._types),
    ],
)
def test_with_frozen_weights(name, dtype):
    """Convolutions with packed weights; no linear but those of the gates and of the head."""
    model, x = (
        fused(name, depths=(1, 1, 2, 1), pattern=("D", "W", "WD", "W")).to(dtype),
        torch.randn(2, 3, 60, 75, dtype=dtype),
    )
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.05}
    with torch.no_grad(), torch._inductor.config.patch(freezing=True), compiled.as_convolutions():
        out, (code,) = run_and_get_code(torch.compile(model, fullgraph=True), x)
        torch.testing.assert_close(out, model(x), **near)
    assert "torch.ops.wbmm" not in code
    kinds = (torch.nn.Conv2d, wbmm.layers.FusedBlock)
    convolutions, blocks = (sum(isinstance(module, kind) for module in model.modules()) for kind in kinds)
    windows = sum(len(module.tables()) for module in model.modules() if hasattr(module, "tables"))
    calls = len(re.findall(r"_convolution_pointwise(?:\.default|_?\.binary)\(", code))
    assert calls == convolutions + 2 * blocks + windows


@tells_apart
def test_small_windows_stay_products_when_frozen():
    model, x = fused(window_size=3), torch.randn(1, 3, 32, 32)
    with compiled.as_convolutions():
        names = operators_of(model, x)
    assert names
    assert all("windowed" in name for name in names)


@pytest.mark.parametrize("frozen", [False, True])
def test_another_batch_size_is_compiled_at_most_once_more(frozen):
    """The first size, then any. PyTorch compiles anew from 16 convolved images or windows on."""
    model, counter = fused(), CompileCounter()
    net = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad(), compiled.as_convolutions() if frozen else nullcontext():
        for batch in (2, 3, 5, 8):
            x = torch.randn(batch, 3, 32, 32)
            torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2 + frozen


def test_weights_that_change_are_seen():
    model, x = fused(), torch.randn(1, 3, 32, 32)
    net = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        before = net(x).clone()
        model.stages[0].blocks[0].ffn.fc2.weight.mul_(2)
        model.stages[0].blocks[0].mixer.table.mul_(2)
        after = net(x)
        torch.testing.assert_close(after, model(x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before, after)


@tells_apart
def test_who_gets_the_reference():
    model, x = fused(), torch.randn(1, 3, 32, 32)
    assert len(operators_of(model, x)) > 0
    torch._dynamo.reset()
    with use_backend("reference"):
        assert operators_of(model, x) == []
    torch._dynamo.reset()
    training_form = timm.create_model("wbmm_a_dense", **NARROW).eval()
    assert not any("gated_ffn" in name for name in operators_of(training_form, x))
    torch._dynamo.reset()
    assert operators_of(model.double(), x.double()) == []  # oneDNN computes no float64


def test_gradients_and_files_get_the_reference():
    model, x = fused(), torch.randn(1, 3, 32, 32)
    loss = torch.compile(model, backend="aot_eager", fullgraph=True)(x).square().sum()
    loss.backward()
    grad = model.stages[0].blocks[0].mixer.table.grad.clone()
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(grad, model.stages[0].blocks[0].mixer.table.grad, rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        graph = torch.export.export(model, (x,)).graph
    assert not any("wbmm" in str(node.target) for node in graph.nodes)


@tells_apart
def test_a_hooked_or_wrapped_linear_is_called():
    model, x = fused(), torch.randn(1, 3, 32, 32)
    ffn = model.stages[0].blocks[0].ffn
    before = sum("gated_ffn" in name for name in operators_of(model, x))
    torch._dynamo.reset()
    ffn.fc1 = torch.nn.Sequential(ffn.fc1)
    assert sum("gated_ffn" in name for name in operators_of(model, x)) == before - 1


def test_a_copy_keeps_for_itself():
    model = fused()
    kept = model.stages[0].blocks[0].mixer.kept
    other = copy.deepcopy(model).stages[0].blocks[0].mixer.kept
    assert kept.number != other.number
    assert find_kept(kept.number) is kept
    assert find_kept(other.number) is other
    number = other.number
    del other
    assert find_kept(number) is None

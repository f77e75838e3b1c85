"""The kernels on a GPU against the reference: eager, autocast, compiled, in CUDA graphs."""

import copy

import pytest
import timm
import torch

import wbmm
from tests.helpers import randomize
from wbmm.ops import dispatch, reference, use_backend
from wbmm.ops.backends import Call
from wbmm.ops.backends.triton import Triton
from wbmm.ops.tables import num_offsets, scales_of

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU"),
]
# Of the largest value. TF32 and bfloat16 have 10 and 7 bits after the point.
TOLERANCES = {"ieee": 1e-5, "tf32": 3e-3, "bf16": 2e-2, "fp16": 3e-3}
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(params=TOLERANCES)
def precision(request):
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, request.param == "tf32"
    yield request.param
    matmul.allow_tf32 = before


def a_map(batch, channels, size, last=True, device="cuda"):
    x = torch.randn(batch, channels, *size, device=device)
    return x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def compare(got, expected, tolerance, least=0.0):
    for ours, theirs in zip(got, expected, strict=True):
        error = (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp_min(least)
        assert error < tolerance, f"{tuple(ours.shape)}: {error:.2g}"


def gradients(function, inputs, grad):
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


@pytest.mark.parametrize("last", [True, False], ids=["channels-last", "contiguous"])
@pytest.mark.parametrize(
    ("window", "count", "channels", "size"),
    [
        ((7, 7), 1, 80, (56, 56)),
        ((7, 7), 1, 33, (30, 23)),
        ((14, 14), 2, 80, (56, 56)),
        ((14, 14), 1, 320, (14, 14)),
        ((7, 14), 1, 17, (9, 40)),
        ((28, 28), 1, 16, (56, 30)),
        ((56, 56), 1, 8, (56, 56)),
    ],
)
def test_windowed(window, count, channels, size, last, precision):
    x = a_map(8, channels, size, last)
    tables = [torch.randn(channels, num_offsets(scale), device="cuda") / 4 for scale in scales_of(count, window)]
    inputs, grad = [x, *tables, torch.randn(channels, device="cuda")], torch.randn_like(x)
    half = HALF.get(precision)
    with use_backend("triton"), torch.autocast("cuda", dtype=half or torch.bfloat16, enabled=half is not None):
        got = gradients(lambda x, *t: dispatch.windowed(x, list(t[:-1]), window, t[-1], 1), inputs, grad)
    assert got[0].dtype == (half or torch.float32)
    assert got[0].stride() == x.stride()
    double = [tensor.double() for tensor in inputs]
    expected = gradients(lambda x, *t: reference.windowed(x, list(t[:-1]), window, t[-1], 1), double, grad)
    compare(got, expected, TOLERANCES[precision])


def test_table_gradients_repeat_bit_for_bit():
    from wbmm.ops.backends.triton.windowed import table_gradient

    x, grad = a_map(64, 80, (56, 56)), a_map(64, 80, (56, 56))
    first = table_gradient(x, grad, [7, 7])
    for _ in range(10):
        assert torch.equal(first, table_gradient(x, grad, [7, 7]))


@pytest.fixture(scope="module")
def model():
    return randomize(timm.create_model("wbmm_a_hier", num_classes=10)).cuda()


def step(model, x):
    """Logits, and the gradient of every parameter."""
    model = copy.deepcopy(model)
    out = model(x)
    weights = torch.linspace(-1, 2, out.numel(), device="cuda").sin().view(out.shape)
    (out.float() * weights).sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("training", [True, False])
def test_model(model, training, precision):
    x, half = torch.randn(4, 3, 100, 140, device="cuda"), HALF.get(precision)
    model.train(training)
    with torch.autocast("cuda", dtype=half or torch.bfloat16, enabled=half is not None):
        seen = []
        with dispatch.watch(lambda operator, backend, reasons: seen.append((operator, backend))):
            got = step(model, x)
        with use_backend("reference"):
            expected = step(model, x)
    assert ("windowed", "triton") in seen
    assert ("gated_ffn", "triton") in seen
    assert [tensor.dtype for tensor in got] == [tensor.dtype for tensor in expected]
    compare(got, expected, 20 * TOLERANCES[precision], least=1.0)


def test_fused_model(model):
    fused, x = wbmm.fuse(copy.deepcopy(model).eval()), torch.randn(4, 3, 100, 140, device="cuda")
    with torch.inference_mode():
        got = fused(x)
        with use_backend("reference"):
            compare([got], [fused(x)], 1e-3)


def test_compiled_model(model):
    """torch.compile sees the reference, and gives what the kernels give."""
    model.eval()
    x = torch.randn(2, 3, 64, 64, device="cuda")
    with torch.no_grad():
        compare([torch.compile(model)(x)], [model(x)], 1e-3)


def test_cuda_graph(model):
    model.eval()
    x = torch.randn(2, 3, 64, 64, device="cuda")
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):  # the tuner measures here, which it cannot in a capture
                model(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(out, model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second GPU")
def test_another_device(model):
    x = torch.randn(2, 3, 64, 64, device="cuda:1")
    with torch.no_grad():
        out = copy.deepcopy(model).to("cuda:1").eval()(x)
    assert out.device == x.device
    compare([out], [model.eval()(x.to("cuda:0")).to(out.device)], 1e-3)


def test_reason_for_this_gpu():
    table = torch.zeros(8, num_offsets((7, 7)), device="cuda")
    why = Triton().can_run(Call("windowed", a_map(1, 8, (8, 8)), (table,), False, (7, 7), 1))
    assert why is None, f"on {torch.cuda.get_device_name()}: {why}"

"""bfloat16 by oneDNN: as near to float64 as the reference's own rounding, with sums in float32."""

import copy

import pytest
import timm
import torch

import wbmm
from tests.helpers import randomize
from wbmm.ops import dispatch, relative_index, use_backend
from wbmm.ops.backends.onednn import linear
from wbmm.ops.backends.onednn.ffn import _sum_of_squares, ffn_training
from wbmm.ops.backends.onednn.windowed import windowed_training

pytestmark = pytest.mark.skipif(not linear.computes(torch.bfloat16), reason="this processor has no bfloat16")
NARROW = {"dims": (16, 32, 48, 64), "num_classes": 10}


def errors(model, exact, x):
    """How far the backend and the reference are from float64, squared."""
    with torch.inference_mode():
        ours = model(x)
        with use_backend("reference"):
            reference, expected = model(x), exact(x.double())
    return [(out.double() - expected).square().sum().item() for out in (ours, reference)]


@pytest.mark.parametrize("name", ["wbmm_a", "wbmm_a_hier"])
@pytest.mark.parametrize("size", [(64, 64), (60, 75)])
def test_as_near_to_float64_as_the_reference(name, size):
    """Over several nets, because how the errors of one add up is chance."""
    taken, found = set(), []
    with dispatch.watch(lambda operator, backend, reasons: taken.add((operator, backend))):
        for seed in range(4):
            torch.manual_seed(seed)
            model = wbmm.fuse(randomize(timm.create_model(name, **NARROW)).double().eval()).bfloat16()
            exact = copy.deepcopy(model).double()  # the same weights, rounded to bfloat16
            found.append(errors(model, exact, torch.randn(4, 3, *size).bfloat16()))
    assert {("windowed", "onednn"), ("gated_ffn", "onednn"), ("squeeze_excite", "onednn")} <= taken
    ours, reference = map(sum, zip(*found, strict=True))
    assert ours <= 1.3**2 * reference


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
@pytest.mark.parametrize("name", ["wbmm_a", "wbmm_a_hier"])
def test_gradients_are_as_near_to_float64_as_the_references(name, autocast):
    found = []
    for seed in range(4):
        torch.manual_seed(seed)
        net = randomize(timm.create_model(name, **NARROW)).double().train().requires_grad_()
        x = torch.randn(4, 3, 60, 75).bfloat16()
        net = net.bfloat16().double()
        kinds = {"ours": None, "reference": "reference", "float64": "reference"}
        gradients = {}
        for kind, backend in kinds.items():
            model = copy.deepcopy(net)
            if kind != "float64":
                model = model.float() if autocast else model.bfloat16()
            with use_backend(backend), torch.autocast("cpu", torch.bfloat16, enabled=autocast and kind != "float64"):
                out = model(x.to(next(model.parameters()).dtype))
            loss = (out.double() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()
            gradients[kind] = torch.autograd.grad(loss, [p for p in model.parameters() if p.ndim > 1])
        exact = gradients.pop("float64")
        found.append(
            [
                sum(((g.double() - e) / e.norm()).square().sum().item() for g, e in zip(given, exact, strict=True))
                for given in gradients.values()
            ]
        )
    ours, reference = map(sum, zip(*found, strict=True))
    assert ours <= 1.3**2 * reference


def test_autocast_runs_here_in_inference_and_in_training():
    """No operator falls back to the reference; weights stay float32, and so do their gradients."""
    model, x = timm.create_model("wbmm_a", **NARROW), torch.randn(2, 3, 64, 64)
    for net, context in ((wbmm.fuse(model.eval()), torch.inference_mode), (model.train(), torch.enable_grad)):
        taken = set()
        watcher = dispatch.watch(lambda operator, backend, _, taken=taken: taken.add((operator, backend)))
        with context(), watcher, torch.autocast("cpu", torch.bfloat16):
            out = net(x)
        assert {("windowed", "onednn"), ("gated_ffn", "onednn")} <= taken
    out.float().sum().backward()
    assert all(parameter.grad.dtype is torch.float32 for parameter in model.parameters())


def test_weights_gradients_are_summed_in_float32():
    """Of 2**14 rows with the same gradient; in bfloat16 a sum of ones stops at 256."""
    rows, width = 2**14, 8
    x = torch.ones(rows, 1, 1, width, dtype=torch.bfloat16)
    w1, w2 = (torch.eye(width, dtype=torch.bfloat16) for _ in range(2))
    zeros, gate = torch.zeros(width, dtype=torch.bfloat16), torch.ones(rows, width, dtype=torch.bfloat16)
    inputs = [tensor.requires_grad_() for tensor in (w1, zeros.clone(), zeros.clone(), zeros.clone(), w2)]
    out = ffn_training(x, gate, *inputs, 1e-6)
    gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out = ffn_training(x.double(), gate.double(), *exact, 1e-6)
    for ours, expected in zip(gradients, torch.autograd.grad(out, exact, torch.ones_like(out)), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=2e-2, atol=2e-2)


def test_table_gradients_are_summed_in_float32():
    x = torch.ones(64, 1, 14, 14, dtype=torch.bfloat16)
    table = torch.zeros(1, 169, dtype=torch.bfloat16, requires_grad=True)
    out = windowed_training(x, [table], (7, 7))
    (gradient,) = torch.autograd.grad(out, [table], torch.ones_like(out))
    counts = torch.bincount(relative_index((7, 7)).flatten()).double() * 256  # pairs of an offset, times windows
    torch.testing.assert_close(gradient[0].double(), counts, rtol=2**-8, atol=0)


def test_squares_are_summed_in_float32():
    rows = torch.full((1, 4096, 3), 1.5, dtype=torch.bfloat16)  # in bfloat16 the sum would stop at 512
    assert _sum_of_squares(rows).flatten().tolist() == [4096 * 2.25] * 3


def test_a_processor_without_it_takes_products(monkeypatch):
    monkeypatch.setattr(linear, "has_bfloat16", lambda: False)
    assert not linear.computes(torch.bfloat16)
    assert linear.computes(torch.float32)

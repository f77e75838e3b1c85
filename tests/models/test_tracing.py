"""Compile, export, fx and trace: one canonical path, equal to eager execution."""

import copy

import pytest
import timm
import torch
import torch._dynamo.testing

import wbmm
from tests.helpers import randomize
from wbmm.ops import use_backend

TINY = {"num_classes": 5, "dims": (8, 16, 16, 24), "depths": (1, 2, 1, 1)}
NETS = {
    "plain": ("wbmm_a", {"pattern": ("W", "WD", "W", "M"), **TINY}),
    "hier": ("wbmm_a_hier", {"pattern": ("W", "WD", "W", "W"), **TINY}),
}


@pytest.fixture(params=NETS)
def net(request):
    name, arguments = NETS[request.param]
    return randomize(timm.create_model(name, **arguments)).eval()


@pytest.fixture(params=["training", "compact"])
def form(request, net):
    return net if request.param == "training" else wbmm.fuse(net)


def check(traced, eager, shape, atol=1e-4):
    x = torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(traced(x), eager(x), rtol=1e-4, atol=atol)


def test_export_with_dynamic_batch(form):
    batch = torch.export.Dim("batch", min=1, max=64)
    with torch.no_grad():
        program = torch.export.export(form, (torch.randn(2, 3, 64, 64),), dynamic_shapes=({0: batch},))
    assert "wbmm.windowed_product" not in str(program.graph)
    for n in (1, 3):
        check(program.module(), form, (n, 3, 64, 64))


def test_export_with_dynamic_size(form, tmp_path):
    side = {"min": 33, "max": 2048}
    dims = {0: torch.export.Dim("b", max=64), 2: torch.export.Dim("h", **side), 3: torch.export.Dim("w", **side)}
    with torch.no_grad():
        program = torch.export.export(form, (torch.randn(2, 3, 96, 128),), dynamic_shapes=(dims,))
    torch.export.save(program, tmp_path / "net.pt2")
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    for shape in [(1, 3, 224, 224), (3, 3, 97, 131), (2, 3, 33, 250)]:
        check(loaded, form, shape)


def test_fx(form):
    graph = torch.fx.symbolic_trace(form)
    for shape in [(2, 3, 64, 64), (1, 3, 50, 71)]:
        check(graph, form, shape)


def test_fx_backward(net):
    graph = torch.fx.symbolic_trace(net.train())
    graph(torch.randn(2, 3, 64, 64)).square().sum().backward()
    assert all(p.grad is not None for p in graph.parameters())


def test_feature_extraction_by_fx():
    from torchvision.models.feature_extraction import create_feature_extractor

    model = timm.create_model("wbmm_a").eval()
    extractor = create_feature_extractor(model, {"stages.1": "mid", "head.fc": "out"})
    out = extractor(torch.randn(1, 3, 64, 64))
    assert out["mid"].shape == (1, 80, 8, 8)
    assert out["out"].shape == (1, 1000)


def test_jit_trace(form):
    with torch.no_grad():
        traced = torch.jit.trace(form, torch.randn(2, 3, 64, 64))
    for shape in [(2, 3, 64, 64), (1, 3, 75, 100)]:
        check(traced, form, shape)


def test_compile_without_breaks_or_recompiles(form):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(form, backend=counter, fullgraph=True)
    for n in (2, 3, 4, 7):
        check(compiled, form, (n, 3, 64, 64))
    assert counter.frame_count <= 2  # one for the first size, one with a dynamic batch for all others


@pytest.mark.heavy  # compiles C++ for a minute
def test_inductor():
    name, arguments = NETS["plain"]
    net = randomize(timm.create_model(name, **arguments)).eval()
    torch._dynamo.reset()
    check(torch.compile(wbmm.fuse(net), fullgraph=True), net, (2, 3, 64, 64), atol=1e-3)


def test_onnx_at_a_fixed_size(tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    name, arguments = NETS["plain"]
    fused = wbmm.fuse(randomize(timm.create_model(name, **arguments)).eval())
    x = torch.randn(2, 3, 64, 64)
    file = str(tmp_path / "net.onnx")
    torch.onnx.export(fused, (x,), file, dynamo=True, dynamic_shapes=({0: torch.export.Dim("b")},), verbose=False)
    session = runtime.InferenceSession(file)
    for n in (1, 3):
        x = torch.randn(n, 3, 64, 64)
        got = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(got), fused(x), rtol=1e-3, atol=1e-3)


SIX = {
    "wbmm_a": lambda: timm.create_model("wbmm_a", num_classes=5),  # with several kernels in its last stage
    "hier": lambda: timm.create_model("wbmm_a_hier", num_classes=5),
    "dense": lambda: timm.create_model("wbmm_a_dense", num_classes=5),
    "unireplknet": lambda: timm.create_model("unireplknet_a", num_classes=5),
    "fused": lambda: wbmm.fuse(timm.create_model("wbmm_a", num_classes=5).eval()),
    "fused hier": lambda: wbmm.fuse(timm.create_model("wbmm_a_hier", num_classes=5).eval(), "dense"),
}


@pytest.fixture(params=SIX)
def timms(request):
    return randomize(SIX[request.param]()).eval()


def test_model_forward_fx(timms):
    """As in timm's tests: by torchvision's tracer with timm's leaves, bit for bit the same, gradients on."""
    from timm.models import get_notrace_functions, get_notrace_modules
    from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

    leaves = {"leaf_modules": get_notrace_modules(), "autowrap_functions": get_notrace_functions()}
    leaves = {key: list(value) for key, value in leaves.items()}
    train_nodes, eval_nodes = get_graph_node_names(timms, tracer_kwargs=leaves)
    traced = create_feature_extractor(
        timms, train_return_nodes=train_nodes[-1:], eval_return_nodes=eval_nodes[-1:], tracer_kwargs=leaves
    )
    x = torch.randn(2, 3, 96, 96)
    (out,) = traced(x).values()
    assert torch.equal(out, timms(x))


@pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated
def test_model_forward_torchscript(timms):
    scripted = torch.jit.script(timms)
    x = torch.randn(2, 3, 70, 96)
    with torch.no_grad():
        torch.testing.assert_close(scripted(x), timms(x), rtol=1e-3, atol=1e-3)


def test_every_hooked_linear_fires(timms):
    linears = [module for module in timms.modules() if isinstance(module, torch.nn.Linear)]
    fired = set()
    for linear in linears:
        linear.register_forward_hook(lambda module, *args: fired.add(module))
    for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        fired.clear()
        with context:
            timms(torch.randn(1, 3, 64, 64))
        assert fired == set(linears)


def test_counted_in_inference_mode():
    from torch.utils.flop_counter import FlopCounterMode

    net, x = timm.create_model("wbmm_a", num_classes=5), torch.randn(1, 3, 64, 64)
    counts = []
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, FlopCounterMode(display=False) as counter:
            net(x)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("skeleton", ["cpu", "meta"])
def test_vmap_over_stacked_models(form, skeleton):
    """PyTorch's documentation takes a skeleton on the meta device, which holds no values."""
    nets, x = [form, copy.deepcopy(form)], torch.randn(2, 3, 64, 64)
    base = copy.deepcopy(form).to(skeleton)
    with torch.no_grad():
        nets[1].head.fc.weight.mul_(2)
        state = torch.func.stack_module_state(nets)
        out = torch.func.vmap(lambda *state: torch.func.functional_call(base, state, (x,)))(*state)
        for i, net in enumerate(nets):
            torch.testing.assert_close(out[i], net(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["wbmm_a", "wbmm_a_hier"])
def test_a_model_that_was_given_memory_after_it_was_built(name):
    """`to_empty` leaves anything in the buffers that no file holds."""
    net, x = timm.create_model(name, num_classes=3).eval(), torch.randn(1, 3, 64, 64)
    empty = timm.create_model(name, num_classes=3, device="meta").eval().to_empty(device="cpu")
    empty.load_state_dict(net.state_dict())
    with torch.no_grad(), use_backend("reference"):
        torch.testing.assert_close(empty(x), net(x), rtol=0, atol=0)

"""Every backend against the reference: outputs and all gradients, in every mode; and who is chosen, and why."""

import copy
import logging
import re
import types

import pytest
import torch
import torch.nn as nn

from tests.helpers import randomize
from wbmm.layers import (
    FeedForward,
    FusedFeedForward,
    FusedHierarchicalWBMM2d,
    HierarchicalWBMM2d,
    SqueezeExcite,
    WBMM2d,
)
from wbmm.ops import BACKENDS, dispatch, reference, use_backend, windowed
from wbmm.ops.backends.onednn import linear
from wbmm.ops.backends.tiled import LARGE_MATRIX
from wbmm.ops.profile import Profile, Thresholds, use_profile

# None: the automatic choice. Triton's kernels need a GPU or their interpreter: `backends/triton` runs them.
NAMES = [None, *(backend.name for backend in BACKENDS if backend.name != "triton")]
ON_A_CPU = (None, "onednn", "tiled")  # any other may refuse everything here, if it says why
TOLERANCES = {torch.float32: 2e-4, torch.float64: 1e-10, torch.bfloat16: 6e-2}
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


class Ffn(nn.Module):
    """A feed-forward part as a function of the map alone."""

    def __init__(self, ffn: nn.Module) -> None:
        super().__init__()
        self.ffn = ffn

    def forward(self, x):
        return self.ffn(x, x.mean((2, 3)).sigmoid())


class FusedFfn(Ffn):
    def forward(self, x):
        return self.ffn(x, x.mean((2, 3)).sigmoid(), x)


LAYERS = {
    "one table": lambda: WBMM2d(6, 7),
    "two tables": lambda: HierarchicalWBMM2d(6, 7),
    "fused": lambda: FusedHierarchicalWBMM2d(torch.randn(6, 729), torch.randn(6, 169), torch.randn(6), (14, 14)),
    "ffn": lambda: Ffn(FeedForward(6)),
    "fused ffn": lambda: FusedFfn(FusedFeedForward(6, 24, 1e-6)),
    "gate": lambda: SqueezeExcite(6),
}


def make(name, dtype=torch.float32):
    return randomize(LAYERS[name]()).to(dtype).eval()


def a_map(dtype=torch.float32, size=(16, 9)):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 6, *size, generator=generator, dtype=torch.float64).to(dtype)
    return x.contiguous(memory_format=torch.channels_last)


def outcome(call, x, context=torch.enable_grad, layer=None):
    """The output, and with gradients those of the map and of every parameter that wants one, by name."""
    with context():
        if context is not torch.enable_grad:
            return [call(x).clone()]
        x = x.clone().requires_grad_()
        parameters = dict((call if isinstance(call, nn.Module) else layer).named_parameters())
        named = {name.removeprefix("_orig_mod."): p for name, p in parameters.items() if p.requires_grad}
        out = call(x)
        weights = torch.linspace(-1, 2, out.numel()).sin().view(out.shape).to(out.dtype)
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), [x, *(named[key] for key in sorted(named))])]


def compare(got, expected, dtype):
    tolerance = TOLERANCES[dtype]
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        scale = theirs.abs().max().clamp_min(1).item()
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * scale)


def check_refusal(text, backend, reason=""):
    assert backend is not None, "the automatic choice always runs"
    assert re.search(f"backend {backend!r} cannot compute .*{reason}", text)


def check(layer, x, backend, context=torch.enable_grad):
    """A backend equals the reference, or says in a sentence why it cannot run."""
    with use_backend("reference"):
        expected = outcome(layer, x, context)
    try:
        with use_backend(backend):
            got = outcome(layer, x, context)
    except ValueError as error:
        check_refusal(str(error), backend)
        assert "\n" not in str(error)  # noqa: PT017
        return False
    compare(got, expected, x.dtype)
    return True


def _linears(layer):
    return [name for name, module in layer.named_modules() if type(module) is nn.Linear]


def _hooked(layer, x):
    for module in layer.children():
        for part in module.children():
            part.register_forward_hook(lambda *args: None)
    return layer


def _wrapped(layer, x):
    for name in _linears(layer):
        parent, _, child = name.rpartition(".")
        setattr(layer.get_submodule(parent), child, Wrapped(layer.get_submodule(name), []).to(x.dtype))
    return layer


def _partly_frozen(layer, x):
    next(layer.parameters()).requires_grad_(False)
    return layer


def _under_autocast(layer, x):
    def call(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x)

    return call


def _compiled(layer, x):
    torch._dynamo.reset()
    return torch.compile(layer, fullgraph=True, backend="aot_eager")


def _mapped(layer, x):
    def call(x):
        stacked = {name: torch.stack([p, p]) for name, p in layer.named_parameters()}
        return torch.func.vmap(lambda p: torch.func.functional_call(layer, p, (x,)))(stacked).mean(0)

    return call


# What happens to a layer, and what a backend that would run the layer as it is says if it cannot run this.
SITUATIONS = {
    "as it is": (lambda layer, x: layer, None),
    "hooks": (_hooked, "fc1 has a hook"),
    "wrapped linear": (_wrapped, "fc1 is a Wrapped"),
    "partly frozen": (_partly_frozen, None),
    "frozen": (lambda layer, x: layer.requires_grad_(False), None),
    "autocast": (_under_autocast, "autocast (leaves|asks for) "),
    "compile": (_compiled, "see the reference"),
    "export": (lambda layer, x: torch.export.export(layer, (x,)).module(), "see the reference"),
    "fx": (lambda layer, x: torch.fx.symbolic_trace(layer), None),
    "script": (lambda layer, x: torch.jit.script(layer), None),
    "jit trace": (lambda layer, x: torch.jit.trace(layer, x), "sees the reference"),
    "vmap": (_mapped, r"torch\.func"),
}
TRACED = ("compile", "export", "fx", "script", "jit trace", "vmap")


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_against_the_reference(name, situation, backend, dtype, mode):
    """Outputs and all gradients; or a refusal, which is due to the situation if the layer as it is can run."""
    if situation == "wrapped linear" and not name.endswith("ffn"):
        pytest.skip("it has no linears")
    layer, x, context = make(name, dtype), a_map(dtype), MODES[mode]
    change, reason = SITUATIONS[situation]
    try:
        with use_backend(backend):
            with context():
                changed = change(layer, x)
            got = outcome(changed, x, context, layer)
    except (ValueError, torch._dynamo.exc.TorchDynamoException) as error:
        runs = check(make(name, dtype), x, backend, context)
        assert runs or dtype is torch.bfloat16 or backend not in ON_A_CPU
        check_refusal(str(error), backend, (reason or "never") if runs else "")
        return
    with use_backend("reference"):
        expected = outcome(layer if situation in TRACED else changed, x, context, layer)
    compare(got, expected, torch.bfloat16 if situation == "autocast" else dtype)


@pytest.mark.parametrize("backend", ON_A_CPU)
@pytest.mark.parametrize("size", [(14, 14), (5, 5), (1, 30), (28, 15)])
def test_sizes(backend, size):
    assert check(make("two tables"), a_map(size=size), backend)
    assert check(make("one table"), a_map(size=size), backend, torch.no_grad)


def _hook(layer, calls):
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *args: calls.append(1))


class Wrapped(nn.Module):
    """A LoRA-like wrapper: the linear and something beside it."""

    def __init__(self, linear: nn.Linear, calls: list) -> None:
        super().__init__()
        self.linear, self.calls = linear, calls
        self.weight, self.bias = linear.weight, linear.bias  # as wrappers do that want to pass for a linear
        self.down = nn.Linear(linear.in_features, 2)
        self.up = nn.Linear(2, linear.out_features)

    def forward(self, x):
        self.calls.append(1)
        return self.linear(x) + self.up(self.down(x))


def _wrap(layer, calls):
    layer.ffn.fc1, layer.ffn.fc2 = Wrapped(layer.ffn.fc1, calls), Wrapped(layer.ffn.fc2, calls)


def _replace_forward(layer, calls):
    for linear_ in (layer.ffn.fc1, layer.ffn.fc2):
        linear_.forward = lambda x, call=linear_.forward: calls.append(1) or 2 * call(x)


def _parametrise(layer, calls):
    class Double(nn.Module):
        def forward(self, weight):
            calls.append(1)
            return 2 * weight

    for linear_ in (layer.ffn.fc1, layer.ffn.fc2):
        nn.utils.parametrize.register_parametrization(linear_, "weight", Double())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", [_hook, _wrap, _replace_forward, _parametrise])
@pytest.mark.parametrize("name", ["ffn", "fused ffn"])
def test_a_child_that_is_not_what_was_built_is_called(name, change, mode):
    layer, calls = make(name), []
    change(layer, calls)
    assert check(layer, a_map(), None, MODES[mode])
    assert len(calls) >= 4, "both linears, with either backend"
    with use_backend("onednn"), pytest.raises(ValueError, match="backend 'onednn' cannot compute gated_ffn: fc1 "):
        layer(a_map())


@pytest.mark.parametrize("change", ["hook", "forward"])
def test_a_norm_that_is_not_what_was_built_sees_what_it_should(change):
    """In training the layer scale goes into the norm's weight, but not if somebody looks at what the norm gives."""
    norm, seen = nn.BatchNorm2d(6), []
    layer, x, scale = randomize(FeedForward(6)), a_map(), torch.full((6,), 1e-3)
    layer.norm = norm
    if change == "hook":
        norm.register_forward_hook(lambda module, given, out: seen.append(out.detach()) or out + 1)
    else:
        norm.forward = lambda given, call=norm.forward: seen.append(call(given).detach()) or seen[-1] + 1
    outputs = []
    for name in ("reference", None):
        with use_backend(name):
            outputs.append(layer(x, x.mean((2, 3)), scale, x))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_hooks_on_all_modules_fire(mode):
    layer, names = make("fused ffn"), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *args: names.append(type(module).__name__))
    try:
        with MODES[mode]():
            layer(a_map())
    finally:
        handle.remove()
    assert names.count("Linear") == 2


def test_dynamic_quantisation():
    layer, x = make("fused ffn"), a_map()
    quantised = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear})
    with torch.no_grad():
        assert type(quantised.ffn.fc1) is not nn.Linear
        torch.testing.assert_close(quantised(x), layer(x), rtol=0.1, atol=0.3)


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
@pytest.mark.parametrize("backend", ON_A_CPU)
@pytest.mark.parametrize("name", LAYERS)
def test_fx_is_bit_for_bit_eager(name, backend, mode):
    layer = make(name)
    layer = layer.ffn if name.endswith("ffn") else layer
    x = a_map()
    arguments = {"ffn": (x, x.mean((2, 3))), "fused ffn": (x, x.mean((2, 3)), x)}.get(name, (x,))
    with use_backend(backend), MODES[mode]():
        graph = torch.fx.symbolic_trace(layer)
        assert torch.equal(graph(*arguments), layer(*arguments))


@pytest.mark.heavy  # compiles C++
@pytest.mark.parametrize("name", LAYERS)
def test_compiled(name):
    layer, x = make(name), a_map()
    torch._dynamo.reset()
    with use_backend("reference"):
        expected = outcome(layer, x)
    got = outcome(torch.compile(layer, fullgraph=True), x)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", LAYERS)
def test_vmap_over_stacked_layers(name):
    layers, x = [make(name), make(name)], a_map()
    with torch.no_grad():
        for parameter in layers[1].parameters():
            parameter.mul_(1.5)
        parameters, buffers = torch.func.stack_module_state(layers)
        base = copy.deepcopy(layers[0])
        out = torch.func.vmap(lambda p, b: torch.func.functional_call(base, (p, b), (x,)))(parameters, buffers)
        for i, layer in enumerate(layers):
            torch.testing.assert_close(out[i], layer(x), rtol=1e-4, atol=1e-4)
        with use_backend("tiled"), pytest.raises(ValueError, match=r"torch\.func"):
            torch.func.vmap(lambda y: windowed(y, [torch.zeros(6, 169)], (7, 7)))(x[None])


class TestTiled:
    """The matrix in tiles, at tile sizes that cut rows and channels."""

    @pytest.mark.parametrize("tile", [1, 3000, 10**9])
    @pytest.mark.parametrize("name", ["one table", "two tables"])
    def test_tiles(self, name, tile, monkeypatch):
        monkeypatch.setattr("wbmm.ops.backends.tiled.TILE_BYTES", tile)
        assert check(make(name, torch.float64), a_map(torch.float64), "tiled")

    def test_padding_bias_and_shortcuts(self):
        x, table, bias = a_map(torch.float64), torch.randn(6, 63).double(), torch.randn(6).double()
        for mode in ("zeros", "reflect", "replicate"):
            with use_backend("tiled"):
                got = windowed(x, [table], (4, 5), bias, 2, mode)
            torch.testing.assert_close(got, reference.windowed(x, [table], (4, 5), bias, 2, mode))

    def test_second_derivatives(self):
        x = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
        tables = [torch.randn(2, n, dtype=torch.float64, requires_grad=True) for n in (9, 1)]
        with use_backend("tiled"):
            assert torch.autograd.gradgradcheck(lambda x, *t: windowed(x, list(t), (2, 2)), (x, *tables))

    def test_who_takes_it(self, monkeypatch):
        """Above a size of the matrix, where oneDNN cannot do without it."""
        assert LARGE_MATRIX == 2**28
        monkeypatch.setattr("wbmm.ops.backends.tiled.LARGE_MATRIX", 2**20)
        seen = []
        note = lambda operator, backend, reasons: seen.append((backend, reasons))  # noqa: E731
        with dispatch.watch(note), torch.no_grad():
            for channels in (32, 33):
                windowed(torch.zeros(1, channels, 1, 1).double(), [torch.zeros(channels, 225).double()], (8, 8))
        assert [backend for backend, _ in seen] == ["reference", "tiled"]
        assert "at most 1 MB" in seen[0][1]["tiled"]
        assert "float64" in seen[1][1]["onednn"]

    @pytest.mark.parametrize("side", [28, pytest.param(56, marks=pytest.mark.heavy)])
    def test_memory_is_a_fraction_of_the_matrix(self, side):
        """The largest tensors that exist at once, forward and backward, as PyTorch's profiler of memory sees them."""
        channels = 64 if side == 28 else 256
        x = torch.randn(1, channels, side, side, requires_grad=True)
        table = torch.randn(channels, (2 * side - 1) ** 2, requires_grad=True)
        matrix = channels * side**4 * 4
        with use_backend("tiled"), torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
            windowed(x, [table], (side, side), shortcuts=1).sum().backward()
        peak, now = 0, 0
        for event in profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                now += event.nbytes()
                peak = max(peak, now)
        print(f"\nwindow {side}, {channels} channels: {peak / 2**20:.0f} of {matrix / 2**20:.0f} MiB")
        assert 0 < peak < matrix / (20 if side == 56 else 1.5)


def test_an_automatic_refusal_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_said", set())
    x, table = torch.randn(1, 2, 3, 3), torch.randn(2, 25)
    with caplog.at_level(logging.DEBUG, logger=dispatch.__name__), torch.no_grad():
        windowed(x, [table], (3, 3))
        windowed(x, [table], (3, 3))
    said = [record.message for record in caplog.records]
    assert said.count("onednn does not compute windowed: windows below 7x7 are faster as products") == 1
    assert len(said) == len([backend for backend in BACKENDS if "windowed" in backend.operators]), "one of each"


def test_unknown_names(monkeypatch):
    known = ", ".join([*(backend.name for backend in BACKENDS), "reference"])
    with pytest.raises(ValueError, match=f"backend 'cudnn': expected one of {known}"), use_backend("cudnn"):
        pass
    monkeypatch.setattr(dispatch, "_asked", "nonsense")  # as WBMM_BACKEND=nonsense sets it
    with pytest.raises(ValueError, match="backend 'nonsense': expected one of"):
        make("one table")(a_map())


def test_the_environment_variable():
    import subprocess
    import sys

    code = "from wbmm.ops import dispatch; print(dispatch._asked)"
    run = subprocess.run(
        [sys.executable, "-c", code], env={"WBMM_BACKEND": "tiled"}, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "tiled"


@pytest.mark.parametrize("hidden", linear.CALLS)
def test_each_private_operator_is_looked_for(hidden, monkeypatch):
    """One that is missing is enough for a refusal, a missing overload too."""
    calls = {name.partition(".")[0]: types.SimpleNamespace(default=1, binary=1) for name in linear.CALLS}
    name, _, overload = hidden.partition(".")
    if overload:
        delattr(calls[name], overload)
    else:
        del calls[name]
    monkeypatch.setattr(torch.ops, "mkldnn", types.SimpleNamespace(**calls))
    linear.missing_call.cache_clear()
    try:
        assert linear.missing_call() == hidden
        assert not linear.has_onednn()
        assert not linear.computes(torch.float32)
    finally:
        linear.missing_call.cache_clear()


@pytest.mark.parametrize("place", ["torch.ops.mkldnn._is_mkldnn_bf16_supported", "torch.cpu._is_avx512_bf16_supported"])
def test_a_torch_that_does_not_tell_of_bfloat16(place, monkeypatch):
    if place.startswith("torch.ops"):
        kept = {name.partition(".")[0]: None for name in linear.CALLS}
        monkeypatch.setattr(torch.ops, "mkldnn", types.SimpleNamespace(**kept))
    else:
        monkeypatch.delattr(place)
    linear.has_bfloat16.cache_clear()
    try:
        assert not linear.has_bfloat16()
    finally:
        linear.has_bfloat16.cache_clear()


def test_a_torch_without_the_private_operators(monkeypatch):
    """The reference runs, and the refusal names what is missing."""
    layers = {name: make(name) for name in LAYERS}
    with torch.no_grad(), use_backend("reference"):
        expected = {name: layer(a_map()) for name, layer in layers.items()}
    monkeypatch.setattr(torch.ops, "mkldnn", types.SimpleNamespace())
    linear.missing_call.cache_clear()
    try:
        with torch.no_grad():
            for name, layer in layers.items():
                torch.testing.assert_close(layer(a_map()), expected[name], rtol=1e-5, atol=1e-5)
        with use_backend("onednn"), pytest.raises(ValueError, match=r"has no torch\.ops\.mkldnn\._linear_pointwise"):
            layers["ffn"](a_map())
    finally:
        linear.missing_call.cache_clear()


def test_a_torch_that_does_not_tell_about_transforms(monkeypatch):
    monkeypatch.setattr("wbmm.ops.obstacles._transforms", None)
    layer = make("one table")
    with use_backend("reference"):
        expected = layer(a_map())
    torch.testing.assert_close(layer(a_map()), expected)
    with use_backend("onednn"), pytest.raises(ValueError, match="does not tell whether it is transforming"):
        layer(a_map())


@pytest.mark.parametrize("backend", ON_A_CPU)
def test_a_batch_norm_without_weights(backend):
    layer = make("ffn")
    layer.ffn.norm = nn.BatchNorm2d(6, affine=False)
    scale = torch.rand(6)
    x = a_map()
    with use_backend(backend):
        got = layer.ffn(x, None, scale)
    torch.testing.assert_close(got, layer.ffn(x, None, None) * scale[:, None, None], rtol=1e-4, atol=1e-4)
    fused = layer.eval().ffn.fuse(scale)
    torch.testing.assert_close(
        fused(x, torch.ones(2, 6), torch.zeros_like(x)), layer.ffn(x, None, scale), rtol=1e-4, atol=1e-4
    )


def test_the_reference_holds_any_combination():
    """Bias and shortcuts together, and the matrix itself as the only table."""
    x, table, bias = a_map(torch.float64), torch.randn(6, 169).double(), torch.randn(6).double()
    both = windowed(x, [table], (7, 7), bias, 1)
    torch.testing.assert_close(both, windowed(x, [table], (7, 7), bias) + x)
    matrix = dispatch.expand([table], (7, 7))
    torch.testing.assert_close(windowed(x, [matrix], (7, 7), bias, 1), both)
    with use_backend("tiled"), pytest.raises(ValueError, match="holds the matrix itself"):
        windowed(x, [matrix], (7, 7))
    assert "reference" not in NAMES, "it comes last, and is none of them"


def test_written_out_passes_from_the_profiles_rows_on():
    many = Thresholds(ffn_training_rows=10**6, windowed_training_rows=10**6)
    for name, operator in (("one table", "windowed"), ("ffn", "gated_ffn")):
        for profile, expected in ((Profile(), "onednn"), (Profile(float32=many), "reference")):
            taken = {}
            with (
                use_profile(profile),
                dispatch.watch(lambda op, backend, _, taken=taken: taken.setdefault(op, backend)),
            ):
                make(name)(a_map())
            assert taken[operator] == expected

"""The kernels in Triton's interpreter against the reference, run by `test_interpreter.py`.

TRITON_INTERPRET=1 has to be set before Triton is imported, and other tests of the suite import it.
"""

import copy
import os

import pytest
import timm
import torch
import torch.nn as nn

from tests.helpers import randomize
from wbmm.layers import FeedForward, FusedFeedForward, HierarchicalWBMM2d, WBMM2d
from wbmm.ops import dispatch, reference, use_backend
from wbmm.ops.backends import Call
from wbmm.ops.backends.triton import Triton, trial
from wbmm.ops.backends.triton import windowed as kernels
from wbmm.ops.tables import num_offsets, scales_of

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_interpreter.py"


@pytest.fixture(autouse=True)
def _nan_filled_scratch():
    """Memory that nothing was written to is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def a_map(batch, channels, size, last, dtype=torch.float32):
    x = torch.randn(batch, channels, *size, dtype=torch.float64).to(dtype)
    return x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def tables_for(window, count, channels):
    return [torch.randn(channels, num_offsets(scale)) / 4 for scale in scales_of(count, window)]


def with_gradients(function, inputs, grad):
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


def compare(got, expected, tolerance, least=0.0):
    """Errors relative to the largest value of a tensor, or to `least` where that is more."""
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape
        error = (ours.double() - theirs).abs().max() / theirs.abs().max().clamp_min(least)
        assert error < tolerance, f"{ours.shape}: {error}"


def check_windowed(x, window, count=1, bias=True, shortcuts=0, tolerance=2e-6):
    """Output and all gradients of the operator against the reference in float64."""
    channels = x.shape[1]
    tables = tables_for(window, count, channels)
    inputs = [x, *tables, *([torch.randn(channels)] if bias else [])]
    grad = torch.randn_like(x)

    def split(tensors):
        return tensors[0], list(tensors[1 : 1 + count]), tensors[-1] if bias else None

    def ours(*tensors):
        x, tables, b = split(tensors)
        return kernels.table_product(x, tables[0], tables[1] if count > 1 else None, b, list(window), shortcuts)

    def theirs(*tensors):
        x, tables, b = split(tensors)
        return reference.windowed(x, tables, window, b, shortcuts)

    got = with_gradients(ours, inputs, grad)
    expected = with_gradients(theirs, [tensor.double() for tensor in inputs], grad.double())
    compare(got, expected, tolerance)
    assert got[0].dtype == got[1].dtype == x.dtype
    assert got[0].stride() == got[1].stride() == x.stride()
    assert all(tensor.dtype == torch.float32 for tensor in got[2:])


class TestWindowed:
    @pytest.mark.parametrize("last", [True, False], ids=["channels-last", "contiguous"])
    @pytest.mark.parametrize(
        ("window", "count", "size"),
        [
            ((7, 7), 1, (14, 7)),  # whole windows
            ((7, 7), 1, (9, 16)),  # odd
            ((7, 7), 1, (3, 5)),  # smaller than a window
            ((7, 14), 1, (8, 15)),
            ((14, 7), 1, (15, 8)),
            ((14, 14), 1, (15, 9)),
            ((14, 14), 2, (13, 20)),  # hierarchical
            ((4, 6), 2, (9, 9)),
            ((2, 2), 2, (3, 3)),
            ((1, 1), 1, (2, 3)),
            ((1, 9), 1, (2, 10)),
        ],
    )
    def test_output_and_gradients(self, window, count, size, last):
        check_windowed(a_map(2, 5, size, last), window, count, shortcuts=1)

    @pytest.mark.heavy
    def test_56(self, monkeypatch):
        """In large tiles, of which the interpreter needs few."""
        config = kernels.triton.Config({"BC": 1, "BN": 1, "BJ": 512})
        monkeypatch.setattr(kernels, "PRODUCT_CONFIGS", [config])
        monkeypatch.setattr(kernels, "STEP", 256)
        monkeypatch.setattr(kernels, "gradient_meta", lambda dtype: {"BC": 1, "BN": 1, "BI": 64, "BJ": 64})
        monkeypatch.setattr(kernels, "OFFSET_BLOCK", 1024)
        check_windowed(a_map(1, 1, (56, 50), False), (56, 56))

    @pytest.mark.heavy
    def test_28(self):
        check_windowed(a_map(1, 2, (28, 17), True), (28, 28))

    @pytest.mark.heavy
    @pytest.mark.parametrize("count", [1, 2])
    def test_28_more(self, count):
        check_windowed(a_map(2, 3, (30, 29), False), (28, 28), count, shortcuts=1)

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("shortcuts", [0, 2])
    def test_bias_and_shortcuts(self, bias, shortcuts):
        check_windowed(a_map(1, 3, (8, 8), True), (7, 7), bias=bias, shortcuts=shortcuts)

    @pytest.mark.parametrize(
        "config", [0, *(pytest.param(i, marks=pytest.mark.heavy) for i in range(1, len(kernels.PRODUCT_CONFIGS)))]
    )
    def test_every_configuration_of_the_tuner(self, config, monkeypatch):
        monkeypatch.setattr(kernels, "PRODUCT_CONFIGS", kernels.PRODUCT_CONFIGS[config:])
        check_windowed(a_map(3, 18, (15, 8), True), (7, 7), shortcuts=1)
        check_windowed(a_map(1, 3, (9, 9), False), (8, 8), 2)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize(("window", "count"), [((7, 7), 1), ((14, 14), 2)])
    def test_half_precision(self, dtype, window, count):
        """bfloat16 is multiplied in float32 here: the interpreter cannot. Compiled, it is a product of bfloat16."""
        tolerance = 2e-3 if dtype is torch.float16 else 2e-2
        check_windowed(a_map(2, 5, (9, 16), True, dtype), window, count, shortcuts=1, tolerance=tolerance)

    def test_many_windows_are_split(self, monkeypatch):
        """The first stage of a table's gradient in several programs, the last of them without a window."""
        monkeypatch.setattr(kernels, "PROGRAMS", 13)
        check_windowed(a_map(9, 3, (14, 14), True), (7, 7))

    def test_the_table_gradient_repeats_bit_for_bit(self):
        x, grad = a_map(4, 9, (15, 15), True), a_map(4, 9, (15, 15), True)
        first = kernels.table_gradient(x, grad, [7, 7])
        assert torch.equal(first, kernels.table_gradient(x, grad, [7, 7]))

    def test_gradients_in_another_memory_format(self):
        x, (table,) = a_map(2, 4, (8, 9), True).requires_grad_(), tables_for((7, 7), 1, 4)
        grad = a_map(2, 4, (8, 9), False)
        (dx,) = torch.autograd.grad(kernels.table_product(x, table, None, None, [7, 7]), x, grad)
        (expected,) = torch.autograd.grad(reference.windowed(x, [table], (7, 7)), x, grad)
        torch.testing.assert_close(dx, expected, rtol=1e-5, atol=1e-5)
        assert dx.stride() == x.stride()

    def test_a_view(self):
        x, (table,) = a_map(2, 4, (8, 20), True)[..., ::2], tables_for((7, 7), 1, 4)
        torch.testing.assert_close(
            kernels.table_product(x, table.t().contiguous().t(), None, None, [7, 7]),
            reference.windowed(x, [table], (7, 7)),
            rtol=1e-5,
            atol=1e-5,
        )

    def test_an_empty_batch(self):
        x, (table,) = torch.zeros(0, 4, 8, 8).requires_grad_(), tables_for((7, 7), 1, 4)
        table.requires_grad_()
        out = kernels.table_product(x, table, None, None, [7, 7])
        assert out.shape == x.shape
        dx, dtable = torch.autograd.grad(out.sum(), [x, table])
        assert dx.shape == x.shape
        assert torch.equal(dtable, torch.zeros_like(table))

    def test_second_derivatives(self):
        """Of a penalty on gradients, against the reference: `gradgradcheck` would need float64."""
        x, tables = a_map(2, 3, (5, 6), True), tables_for((4, 4), 2, 3)

        def penalty(function):
            inputs = [tensor.clone().requires_grad_() for tensor in (x, *tables)]
            out = function(*inputs)
            first = torch.autograd.grad(out.sin().sum(), inputs, create_graph=True)
            return torch.autograd.grad(sum(grad.square().sum() for grad in first), inputs)

        got = penalty(lambda x, t, local: kernels.table_product(x, t, local, None, [4, 4], 1))
        expected = penalty(lambda x, t, local: reference.windowed(x, [t, local], (4, 4), shortcuts=1))
        compare(got, expected, 1e-5)

    def test_autocast(self):
        """The map in autocast's type, the tables in their own; gradients in those of the inputs."""
        x, tables = a_map(1, 3, (8, 8), True).requires_grad_(), tables_for((7, 7), 1, 3)
        table, bias = tables[0].requires_grad_(), torch.randn(3)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype):
                out = kernels.table_product(x, table, None, bias, [7, 7])
                dx, dtable = torch.autograd.grad(out.float().square().sum(), [x, table])
            assert (out.dtype, dx.dtype, dtable.dtype) == (dtype, torch.float32, torch.float32)
            expected = reference.windowed(x, [table], (7, 7), bias)
            torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=5e-2)


def outcome(layer, x, gate, scale, shortcut, backend):
    """Output, every gradient, and the buffers after it; the same samples are dropped each time."""
    layer = copy.deepcopy(layer).to(x.dtype)
    inputs = [tensor.detach().clone().requires_grad_() for tensor in (x, gate, scale, shortcut)]
    torch.manual_seed(3)
    with use_backend(backend):
        out = layer(*inputs)
    weights = torch.linspace(-1, 2, out.numel()).sin().view(out.shape).to(out.dtype)
    found = torch.autograd.grad((out * weights).sum(), [*inputs, *layer.parameters()])
    return [out.detach(), *found, *(buffer.double() for buffer in layer.buffers())]


class TestResidual:
    """Batch norm, layer scale, drop path and shortcut in one pass."""

    def arguments(self, size=(9, 9), channels=12, last=True):
        x, shortcut = a_map(4, channels, size, last), a_map(4, channels, size, last)
        return x, torch.rand(4, channels), torch.rand(channels) + 0.5, shortcut

    @pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
    @pytest.mark.parametrize(
        ("size", "channels", "last", "norm"),
        [
            ((9, 9), 12, True, {}),  # two blocks of positions
            ((5, 13), 70, True, {}),  # and two of channels, neither whole
            ((9, 9), 12, False, {}),
            ((2, 3), 12, True, {"affine": False}),  # less than a block
            ((8, 8), 12, True, {"momentum": 0.3, "eps": 1e-3}),  # exactly one
            ((2, 3), 12, False, {"momentum": None}),  # the average over all batches
            ((3, 3), 12, True, {"track_running_stats": False}),
        ],
        ids=str,
    )
    def test_output_gradients_and_statistics(self, training, size, channels, last, norm, monkeypatch):
        layer, arguments = randomize(FeedForward(channels, 3, drop_path=0.5)), self.arguments(size, channels, last)
        layer.norm = randomize(nn.BatchNorm2d(channels, **norm))
        layer.train(training)
        # The samples that are dropped depend on the type in which they are drawn.
        factor = torch.tensor([2.0, 0, 2, 0])[:, None, None, None] if training else 1
        monkeypatch.setattr(timm.layers.drop, "drop_path", lambda x, *_: x * factor)
        got = outcome(layer, *arguments, "triton")
        if training:
            same = [torch.equal(out, shortcut) for out, shortcut in zip(got[0], arguments[3], strict=True)]
            assert same == [False, True, False, True]
        double = [tensor.double() for tensor in arguments]
        # The gradient of GRN's beta is zero before a batch norm: of it the reference, too, has 1.3e-5 of rounding.
        compare(got, outcome(layer, *double, "reference"), 3e-5, least=10)

    def test_only_what_is_wanted_has_a_gradient(self):
        """With the layer scale alone to be learned, as in a frozen model, nothing else is computed."""
        layer, (x, gate, scale, shortcut) = randomize(FeedForward(12, 3)).requires_grad_(False), self.arguments()
        found = []
        for backend in ("triton", "reference"):
            leaf = scale.clone().requires_grad_()
            with use_backend(backend):
                out = copy.deepcopy(layer).eval()(x, gate, leaf, shortcut)
            found.append(torch.autograd.grad(out.sin().sum(), leaf)[0])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)

    def test_a_mean_far_from_zero(self):
        from wbmm.ops.backends.triton.residual import batch_statistics

        y = torch.randn(3, 70, 5) + 1e4
        mean, variance = batch_statistics(y)
        torch.testing.assert_close(mean, y.double().mean((0, 1)).float())
        expected = y.double().var((0, 1), correction=0).float()
        # Means of about 1e4 are known to 1e-3 in float32. The mean of squares less the square of the mean would be
        # wrong by more than the variance itself.
        torch.testing.assert_close(variance, expected, rtol=1e-3, atol=0)

    def test_it_repeats_bit_for_bit(self):
        layer, arguments = randomize(FeedForward(12, 3, drop_path=0.5)), self.arguments()
        first, second = (outcome(layer, *arguments, "triton") for _ in range(2))
        assert all(map(torch.equal, first, second))

    def test_one_map_is_kept(self):
        layer, arguments = FeedForward(12, 3, drop_path=0.5), self.arguments()
        narrow = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: narrow.append(tensor.shape) or tensor, lambda tensor: tensor
        ):
            from wbmm.ops.backends.triton.residual import batch_statistics, finish

            y, scale = arguments[0].permute(0, 2, 3, 1).flatten(1, 2).clone().requires_grad_(), arguments[2]
            finish(y, layer.norm.weight, layer.norm.bias, scale, y, None, batch_statistics(y), 1e-5, True, y.dtype)
        assert narrow.count(y.shape) == 1

    @pytest.mark.parametrize("name", ["norm", "drop_path"])
    def test_a_changed_module_is_called(self, name):
        layer, arguments = randomize(FeedForward(12, 3, drop_path=0.5)), self.arguments()
        calls = []
        getattr(layer, name).register_forward_hook(lambda *_: calls.append(1))
        got = outcome(layer, *arguments, "triton")
        assert calls == [1]
        compare(got, [tensor.double() for tensor in outcome(layer, *arguments, "reference")], 2e-5, least=10)

    def test_one_value_a_channel_is_an_error(self):
        with use_backend("triton"), pytest.raises(ValueError, match="more than 1 value per channel"):
            FeedForward(12)(torch.zeros(1, 12, 1, 1))

    def test_second_derivatives(self):
        layer, (x, gate, scale, shortcut) = randomize(FeedForward(12, 3)).train(), self.arguments((3, 3))

        def penalty(backend):
            inputs = [x.clone().requires_grad_(), scale.clone().requires_grad_(), layer.norm.weight]
            with use_backend(backend):
                out = copy.copy(layer)(inputs[0], gate, inputs[1], shortcut)
                first = torch.autograd.grad(out.sin().sum(), inputs, create_graph=True)
                return torch.autograd.grad(sum(grad.square().sum() for grad in first), inputs)

        compare(penalty("triton"), [grad.double() for grad in penalty("reference")], 1e-3)


FFN_LAYERS = {"training form": lambda: FeedForward(12, 3), "fused": lambda: FusedFeedForward(12, 70, 1e-6)}


class Gated(nn.Module):
    """A feed-forward part as blocks use it, as a function of the map, the gate and the shortcut or the layer scale."""

    def __init__(self, name):
        super().__init__()
        self.ffn = randomize(FFN_LAYERS[name]())
        self.scale = nn.Parameter(torch.rand(12) + 0.5)

    def forward(self, x, gate, shortcut):
        if isinstance(self.ffn, FusedFeedForward):
            return self.ffn(x, gate, shortcut)
        return shortcut + self.ffn(x, gate, self.scale)


def ffn_outcome(layer, arguments, backend):
    """Output and gradients of the arguments and of every parameter."""
    arguments = [tensor.detach().clone().requires_grad_() for tensor in arguments]
    with use_backend(backend):
        out = layer(*arguments)
        weights = torch.linspace(-1, 2, out.numel()).sin().view(out.shape).to(out.dtype)
        parameters = [p for p in layer.parameters() if p is not layer.scale or isinstance(layer.ffn, FeedForward)]
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), [*arguments, *parameters])]


def ffn_arguments(size, dtype=torch.float32, last=True):
    x, shortcut = (a_map(2, 12, size, last, dtype) for _ in range(2))
    return x, torch.rand(2, 12).to(dtype), shortcut


class TestFeedForward:
    @pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
    @pytest.mark.parametrize("size", [(9, 9), (2, 3), (13, 5)])  # two blocks of positions, and less than one
    @pytest.mark.parametrize("name", FFN_LAYERS)
    def test_output_and_gradients(self, name, size, training):
        layer, arguments = Gated(name).train(training), ffn_arguments(size)
        got = ffn_outcome(copy.deepcopy(layer), arguments, "triton")
        double = [tensor.double() for tensor in arguments]
        # The gradient of GRN's beta is zero where a batch norm subtracts it again; what is left is rounding.
        compare(got, ffn_outcome(copy.deepcopy(layer).double(), double, "reference"), 1e-5, least=10)

    @pytest.mark.parametrize("last", [True, False])
    @pytest.mark.parametrize("name", FFN_LAYERS)
    def test_inference(self, name, last):
        """Batch norm, layer scale and shortcut in one pass."""
        layer, arguments = Gated(name).eval(), ffn_arguments((9, 8), last=last)
        with torch.no_grad():
            with use_backend("reference"):
                expected = layer(*arguments)
            with use_backend("triton"):
                got = layer(*arguments)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("affine", [True, False])
    @pytest.mark.parametrize("statistics", [True, False])
    def test_batch_norms(self, affine, statistics):
        layer, (x, gate, _) = randomize(FeedForward(12)), ffn_arguments((5, 5))
        layer.norm = randomize(nn.BatchNorm2d(12, affine=affine, track_running_stats=statistics))
        layer.eval()
        with torch.no_grad():
            with use_backend("reference"):
                expected = layer(x, gate)
            with use_backend("triton"):
                torch.testing.assert_close(layer(x, gate), expected, rtol=1e-4, atol=1e-5)
                calls = []
                layer.norm.register_forward_hook(lambda *arguments: calls.append(1))
                torch.testing.assert_close(layer(x, gate), expected, rtol=1e-4, atol=1e-5)
        assert calls, "a norm with a hook is called"

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_half_precision(self, dtype):
        layer, arguments = Gated("fused").to(dtype), ffn_arguments((9, 9), dtype)
        got = ffn_outcome(layer, arguments, "triton")
        assert all(tensor.dtype == dtype for tensor in got)
        double = [tensor.double() for tensor in arguments]
        compare(got, ffn_outcome(copy.deepcopy(layer).double(), double, "reference"), 0.05)

    @pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
    @pytest.mark.parametrize("name", FFN_LAYERS)
    def test_autocast(self, name, mode):
        """The types that the reference gives."""
        layer, arguments = Gated(name).eval(), ffn_arguments((9, 9))
        with mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            with use_backend("reference"):
                expected = layer(*arguments)
            with use_backend("triton"):
                got = layer(*arguments)
        assert got.dtype == expected.dtype
        compare([got], [expected.double()], 0.03)

    def test_only_the_pre_activation_is_kept(self):
        layer, (x, gate, shortcut) = Gated("fused"), ffn_arguments((9, 9))
        wide = []

        def note(tensor):
            if tensor.shape[-1] == 70 and tensor.numel() == 2 * 81 * 70:
                wide.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), use_backend("triton"):
            layer(x, gate, shortcut)
        assert len(wide) == 1

    def test_second_derivatives(self):
        layer, (x, gate, shortcut) = Gated("fused"), ffn_arguments((3, 3))

        def penalty(backend):
            inputs = [x.clone().requires_grad_(), *layer.ffn.parameters()]
            with use_backend(backend):
                first = torch.autograd.grad(layer(inputs[0], gate, shortcut).sin().sum(), inputs, create_graph=True)
                return torch.autograd.grad(sum(grad.square().sum() for grad in first), inputs)

        compare(penalty("triton"), penalty("reference"), 1e-4)


class TestTrial:
    """What happens at the first call of each kind on a GPU; here the interpreter stands for it."""

    @pytest.fixture(autouse=True)
    def _as_on_a_gpu(self, monkeypatch):
        monkeypatch.setattr(trial, "DEVICES", ("cpu",))
        monkeypatch.setattr(trial, "_found", {})
        monkeypatch.setattr(Triton, "better_elsewhere", lambda *_: None)

    def windowed(self, grad=True):
        x, tables = a_map(1, 5, (4, 4), True), tables_for((4, 4), 2, 5)
        return dispatch.windowed(x.requires_grad_(grad), tables, (4, 4))

    def chosen(self, **arguments):
        seen = []
        with dispatch.watch(lambda *choice: seen.append(choice[1:])):
            self.windowed(**arguments)
        return seen[0]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("grad", [True, False])
    def test_right_kernels(self, dtype, grad, caplog):
        table, local = tables_for((4, 4), 2, 5)
        weights = {"windowed": (table, local), "gated_ffn": (torch.zeros(20, 5, dtype=dtype),)}
        for operator, given in weights.items():
            x = a_map(1, 5, (4, 4), True, dtype)
            window = ((4, 4), 2) if operator == "windowed" else ()
            before = torch.get_rng_state()
            assert Triton().can_run(Call(operator, x, given, grad, *window)) is None
            assert torch.equal(before, torch.get_rng_state())
        assert len(trial._found) == 2
        assert not caplog.records

    def test_wrong_kernels_are_left_out_with_one_warning(self, monkeypatch, caplog):
        monkeypatch.setattr(kernels, "product", lambda x, *_: x.clone())
        for _ in range(3):
            name, reasons = self.chosen()
            assert name != "triton"
            assert "its result on cpu is off by" in reasons["triton"]
        assert len(caplog.records) == 1
        assert "backend triton does not compute windowed in float32: its result on cpu" in caplog.text
        with use_backend("triton"), pytest.raises(ValueError, match="'triton' cannot compute windowed: its result on"):
            self.windowed()

    def test_a_wrong_gradient_leaves_inference_to_the_kernels(self, monkeypatch):
        right = kernels.table_gradient
        monkeypatch.setattr(kernels, "table_gradient", lambda *args: right(*args) * 1.5)
        assert self.chosen(grad=True)[0] != "triton"
        assert self.chosen(grad=False)[0] == "triton"

    def test_not_a_number(self, monkeypatch):
        monkeypatch.setattr(kernels, "product", lambda x, *_: x * float("nan"))
        assert "is off by nan" in self.chosen()[1]["triton"]

    def test_kernels_that_cannot_be_compiled(self, monkeypatch, caplog):
        def fail(*_):
            raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

        monkeypatch.setattr(kernels, "product", fail)
        name, reasons = self.chosen()
        assert name != "triton"
        assert reasons["triton"] == "its kernels failed on cpu: RuntimeError, Failed to find C compiler."
        assert len(caplog.records) == 1


class TestTheDoor:
    """The backend as layers reach it."""

    @pytest.mark.parametrize("make", [lambda: WBMM2d(6, 7), lambda: HierarchicalWBMM2d(6, 2)])
    @pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
    def test_layers(self, make, mode):
        layer, x = randomize(make()), a_map(2, 6, (9, 10), True)
        seen = []
        with mode():
            with use_backend("reference"):
                expected = layer(x)
            with use_backend("triton"), dispatch.watch(lambda *choice: seen.append(choice[:2])):
                got = layer(x)
        assert ("windowed", "triton") in seen
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("shortcuts", [0, 1])
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_autocast_types(self, dtype, bias, shortcuts):
        x, tables = a_map(1, 3, (8, 8), True), tables_for((7, 7), 1, 3)
        with torch.autocast("cpu", dtype=dtype):
            for backend in ("triton", "reference"):
                with use_backend(backend):
                    out = dispatch.windowed(x, tables, (7, 7), torch.randn(3) if bias else None, shortcuts)
                assert out.dtype == dtype, backend

    @pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate"])
    def test_paddings(self, padding_mode):
        x, tables = a_map(2, 3, (10, 12), True), tables_for((7, 7), 1, 3)
        inputs, grad = [x, *tables], torch.randn_like(x)
        with use_backend("triton"):
            got = with_gradients(lambda x, t: dispatch.windowed(x, [t], (7, 7), None, 1, padding_mode), inputs, grad)
        expected = with_gradients(lambda x, t: reference.windowed(x, [t], (7, 7), None, 1, padding_mode), inputs, grad)
        compare(got, expected, 1e-5)
        assert got[0].stride() == x.stride()

    def test_the_interpreter_is_not_chosen_by_itself(self):
        seen = []
        with dispatch.watch(lambda *choice: seen.append(choice[1:])):
            WBMM2d(6, 7)(a_map(1, 6, (8, 8), True))
        assert seen[0][0] != "triton"
        assert "interpreter is slow" in seen[0][1]["triton"]

"""The mixers: shapes, memory formats, precisions, the kept matrix, and fusion in float64."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.helpers import randomize
from wbmm.layers import DepthwiseConv2d, HierarchicalWBMM2d, MultiKernelWBMM2d, WBMM2d
from wbmm.ops import dispatch

MIXERS = [WBMM2d, HierarchicalWBMM2d, MultiKernelWBMM2d]
SIZES = [(14, 14), (7, 7), (1, 1), (5, 30), (15, 9)]


@pytest.mark.parametrize("cls", MIXERS)
@pytest.mark.parametrize("window", [7, (3, 5)])
@pytest.mark.parametrize("size", SIZES)
def test_any_size_and_the_memory_format_of_the_input(cls, window, size):
    mixer = cls(6, window).eval()
    x = torch.randn(2, 6, *size)
    out = mixer(x)
    assert out.shape == x.shape
    channels_last = mixer(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(channels_last, out)
    if min(size) > 1:
        assert out.is_contiguous()
        assert channels_last.is_contiguous(memory_format=torch.channels_last)


def test_wbmm_adds_its_shortcut():
    mixer, x = WBMM2d(4, 3), torch.randn(1, 4, 6, 6)
    plain = WBMM2d(4, 3, shortcut=False)
    plain.load_state_dict(mixer.state_dict())
    torch.testing.assert_close(mixer(x), plain(x) + x)


def test_hierarchical_is_two_scales_with_two_shortcuts():
    mixer, x = HierarchicalWBMM2d(4, 3).double(), torch.randn(2, 4, 13, 7, dtype=torch.float64)
    coarse, fine = WBMM2d(4, 6).double(), WBMM2d(4, 3).double()
    coarse.table.data.copy_(mixer.table)
    fine.table.data.copy_(mixer.local_table)
    torch.testing.assert_close(mixer(x), coarse(x) + fine(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_multi_kernel_is_window_local_in_every_branch(training):
    """Against real depthwise convolutions, run on each window by itself with zero padding at its edge."""
    mixer = randomize(MultiKernelWBMM2d(3, 7).double()).train(training)
    reference = copy.deepcopy(mixer)
    x = torch.randn(2, 3, 14, 21, dtype=torch.float64)
    windows = x.view(2, 3, 2, 7, 3, 7).permute(0, 2, 4, 1, 3, 5).reshape(-1, 3, 7, 7)

    def back(y):
        return y.view(2, 2, 3, 3, 7, 7).permute(0, 3, 1, 4, 2, 5).reshape(2, 3, 14, 21)

    kernel = reference.table.view(3, 1, 13, 13)
    expected = reference.norm(back(F.conv2d(windows, kernel, padding=6, groups=3)) + x)
    for size in (5, 3):
        branch = F.conv2d(windows, reference.kernels[str(size)], padding=size // 2, groups=3)
        expected = expected + reference.norms[str(size)](back(branch))
    torch.testing.assert_close(mixer(x), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("cls", MIXERS)
@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate"])
@pytest.mark.parametrize("with_norm", [True, False])
def test_fused_equals_training_form(cls, padding_mode, with_norm):
    mixer = randomize(cls(5, 3, padding_mode=padding_mode).double()).eval()
    norm = randomize(nn.BatchNorm2d(5).double()).eval() if with_norm else None
    fused = mixer.fuse(norm)
    for size in [(12, 12), (5, 7), (6, 13)]:
        x = torch.randn(2, 5, *size, dtype=torch.float64)
        expected = mixer(x) if norm is None else norm(mixer(x))
        torch.testing.assert_close(fused(x), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(fused.to_dense()(x), expected, rtol=0, atol=1e-12)


def test_depthwise_fuse():
    conv = DepthwiseConv2d(4).double()
    norm = randomize(nn.BatchNorm2d(4).double()).eval()
    x = torch.randn(1, 4, 9, 6, dtype=torch.float64)
    torch.testing.assert_close(conv.fuse(norm)(x), norm(conv(x)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cls", MIXERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(cls, dtype):
    mixer, x = cls(4, 7).eval(), torch.randn(2, 4, 10, 10)
    with torch.no_grad():
        expected = mixer(x)
        with torch.autocast("cpu", dtype=dtype):
            got = mixer(x)
    torch.testing.assert_close(got.float(), expected, rtol=0.05, atol=0.05)


def test_gradients_of_all_parameters():
    for cls in MIXERS:
        mixer = cls(2, (2, 3)).double()
        x = torch.randn(2, 2, 5, 4, dtype=torch.float64, requires_grad=True)
        names = [name for name, _ in mixer.named_parameters()]
        values = [p.detach().clone().requires_grad_() for p in mixer.parameters()]
        buffers = dict(mixer.named_buffers())

        def call(x, *values, mixer=mixer, names=names, buffers=buffers):
            state = {**{k: b.clone() for k, b in buffers.items()}, **dict(zip(names, values, strict=True))}
            return torch.func.functional_call(mixer, state, (x,))

        assert torch.autograd.gradcheck(call, (x, *values))


@pytest.fixture
def warm():
    """A mixer in eval whose matrix has been built, its input, and a function that tells whether a matrix is kept."""
    mixer = WBMM2d(4, 3).eval()
    x = torch.randn(1, 4, 6, 6)
    with torch.no_grad():
        mixer(x)
    assert not mixer.kept.is_empty()
    return mixer, x


def fresh_output(mixer, x):
    """What the layer must give: from a new layer that never kept anything."""
    new = WBMM2d(mixer.dim, mixer.window).to(mixer.table.dtype).eval()
    new.load_state_dict({k: v.to(mixer.table.dtype) for k, v in mixer.state_dict().items()})
    with torch.no_grad():
        return new(x)


def test_the_matrix_is_built_once(warm, monkeypatch):
    mixer, x = warm
    monkeypatch.setattr(dispatch, "expand", lambda *args: pytest.fail("built again"))
    with torch.no_grad():
        mixer(x)


def _load(mixer):
    mixer.load_state_dict({"table": torch.randn_like(mixer.table)})


def _optimiser_step(mixer):
    mixer.table.grad = torch.ones_like(mixer.table)
    torch.optim.SGD(mixer.parameters(), lr=1.0).step()


def _data_write(mixer):
    mixer.table.data.add_(1.0)  # as some EMA hooks do: the version counter does not see it


def _replace(mixer):
    mixer.table = nn.Parameter(torch.randn_like(mixer.table))


def _train_and_back(mixer):
    mixer.train()
    mixer.table.data.mul_(2)
    mixer.eval()


@pytest.mark.parametrize("change", [_load, _optimiser_step, _data_write, _replace, _train_and_back])
def test_the_matrix_is_never_stale(warm, change):
    mixer, x = warm
    before = fresh_output(mixer, x)
    change(mixer)
    with torch.no_grad():
        got = mixer(x)
    torch.testing.assert_close(got, fresh_output(mixer, x))
    assert (got - before).abs().max() > 0.01


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cls", MIXERS)
def test_every_table_is_watched(cls, fused):
    """A change of any one of a layer's tables shows, and every switch or move drops the matrix."""
    layer = randomize(cls(4, 3)).eval()
    layer = layer.fuse().eval() if fused else layer
    x = torch.randn(1, 4, 6, 6)
    with torch.no_grad():
        for table in [weight for weight in layer.parameters() if weight.ndim > 1]:
            before = layer(x)
            table.add_(1.0)
            assert (layer(x) - before).abs().max() > 0.01
    for move in (layer.train, layer.eval, layer.double):
        layer.eval()
        with torch.no_grad():
            layer(x)
        assert not layer.kept.is_empty()
        move()
        assert layer.kept.is_empty()


def test_the_matrix_follows_dtype_changes(warm):
    mixer, x = warm
    mixer.double()
    with torch.no_grad():
        assert mixer(x.double()).dtype == torch.float64
    mixer.to(torch.bfloat16)
    with torch.no_grad():
        assert mixer(x.bfloat16()).dtype == torch.bfloat16


def test_copies_and_pickles_keep_no_matrix(warm):
    mixer, x = warm
    clone, pickled = copy.deepcopy(mixer), pickle.loads(pickle.dumps(mixer))
    assert clone.kept.is_empty()
    assert pickled.kept.is_empty()
    clone.table.data.zero_()
    with torch.no_grad():
        torch.testing.assert_close(clone(x), x)
        torch.testing.assert_close(pickled(x), mixer(x))
    stream = io.BytesIO()
    torch.save(mixer.state_dict(), stream)
    assert list(mixer.state_dict()) == ["table"]


def test_inference_mode_then_training(warm):
    mixer, x = warm
    with torch.inference_mode():
        mixer(x)
    mixer(x).sum().backward()
    assert mixer.table.grad.abs().sum() > 0


def test_wrong_padding_mode():
    with pytest.raises(ValueError, match="'circular': expected one of zeros, reflect, replicate"):
        WBMM2d(4, padding_mode="circular")


@pytest.mark.parametrize("shape", [(1, 3, 7, 7), (4, 7, 7)])
def test_wrong_input_shape(shape):
    with pytest.raises(ValueError, match=r"expected \[batch, 4, height, width\]"):
        WBMM2d(4)(torch.zeros(shape))


def test_bfloat16_keeps_small_weights_beside_the_shortcut():
    """The 1 of the shortcut is not added to the table before rounding, or its low bits would be lost."""
    mixer = WBMM2d(1, 1)
    mixer.table.data.fill_(0.001)
    x = torch.ones(1, 1, 1, 1)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        matrix = mixer.matrix().bfloat16()
        assert matrix.item() == pytest.approx(0.001, rel=4e-3)
    assert (1 + torch.tensor(0.001)).bfloat16().item() - 1 != pytest.approx(0.001, rel=0.5)
    torch.testing.assert_close(mixer(x), torch.full_like(x, 1.001))

"""The operators that stand in for WBMM, each against its definition, and fused in float64."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import wbmm
from tests.helpers import randomize
from wbmm.layers import (
    Block,
    FullConnection2d,
    FusedFullConnection2d,
    FusedSLaKConv2d,
    HalfWBMM2d,
    ParallelWBMM2d,
    SerialWBMM2d,
    SLaKConv2d,
    WBMM2d,
    WindowAttention2d,
)

DIM = 8
LAYERS = {
    "slak": lambda: SLaKConv2d(DIM, 13),
    "slak_square": lambda: SLaKConv2d(DIM, 5),
    "win_attn": lambda: WindowAttention2d(DIM, (3, 5), head_dim=4),
    "full": lambda: FullConnection2d(DIM, (3, 5)),
    "no_shortcut": lambda: WBMM2d(DIM, (3, 5), shortcut=False),
    "parallel": lambda: ParallelWBMM2d(DIM, (3, 5)),
    "serial": lambda: SerialWBMM2d(DIM, (3, 5)),
    "half": lambda: HalfWBMM2d(DIM, (3, 5)),
}
SIZES = [(12, 15), (7, 7), (1, 2), (4, 11)]


@pytest.fixture(params=LAYERS)
def layer(request):
    return randomize(LAYERS[request.param]().double()).eval()


def maps(*size, dim=DIM, batch=2):
    return torch.randn(batch, dim, *size, dtype=torch.float64)


@pytest.mark.parametrize("with_norm", [True, False])
def test_fused_equals_training_form(layer, with_norm):
    norm = randomize(nn.BatchNorm2d(DIM).double()).eval() if with_norm else None
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    fused = layer.fuse(norm)
    dense = wbmm.fuse(nn.Sequential(fused).eval(), "dense")
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fused.modules())
    for size in SIZES:
        x = maps(*size)
        with torch.no_grad():
            expected = layer(x) if norm is None else norm(layer(x))
            torch.testing.assert_close(fused(x), expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(dense(x), expected, rtol=0, atol=1e-12)
    for key, value in layer.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


def test_both_memory_formats_and_gradients(layer):
    layer.train()
    for size in SIZES[:2]:
        x = maps(*size)
        out, channels_last = layer(x), layer(x.contiguous(memory_format=torch.channels_last))
        assert out.shape == x.shape
        torch.testing.assert_close(channels_last, out)
        assert channels_last.is_contiguous(memory_format=torch.channels_last)
    layer(maps(7, 7)).square().sum().backward()
    assert [name for name, parameter in layer.named_parameters() if parameter.grad is None] == []


def test_found_in_any_module(layer):
    net = nn.Sequential(nn.Conv2d(3, DIM, 1), layer).double().eval()
    fused, x = wbmm.fuse(net), torch.randn(1, 3, 9, 9, dtype=torch.float64)
    assert type(fused[1]) is not type(layer) or isinstance(layer, WBMM2d)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), net(x), rtol=0, atol=1e-12)
    again = wbmm.fuse(fused)
    torch.testing.assert_close(again.state_dict(), fused.state_dict(), rtol=0, atol=0)


def test_slak_is_three_convolutions():
    layer, x = randomize(SLaKConv2d(DIM, 9).double()).eval(), maps(11, 6)
    shapes = {"wide": (5, 9), "tall": (9, 5), "small": (5, 5)}
    expected = 0
    for name, (height, width) in shapes.items():
        kernel = layer.get_parameter(f"{name}.weight")
        assert kernel.shape == (DIM, 1, height, width)
        expected = expected + layer.norms[name](F.conv2d(x, kernel, padding=(height // 2, width // 2), groups=DIM))
    torch.testing.assert_close(layer(x), expected)
    fused = layer.fuse()
    assert isinstance(fused, FusedSLaKConv2d)
    assert [tuple(p.shape[-2:]) for p in fused.parameters() if p.ndim == 4] == [(5, 9), (9, 5)]


def test_attention_against_the_plain_formula():
    """One window after another, and no fused kernel."""
    layer, x = randomize(WindowAttention2d(DIM, 3, head_dim=4).double()).eval(), maps(5, 6)
    padded = F.pad(x, (0, 0, 0, 1))
    expected = torch.zeros_like(padded)
    for i in range(0, 6, 3):
        for j in range(0, 6, 3):
            rows = padded[:, :, i : i + 3, j : j + 3].flatten(2).transpose(1, 2)
            heads = []
            for head in range(2):
                q, k, v = (part[..., 4 * head : 4 * head + 4] for part in layer.qkv(rows).chunk(3, -1))
                logits = q @ k.transpose(1, 2) / 2
                for a in range(9):
                    for b in range(9):
                        offset = (a // 3 - b // 3 + 2) * 5 + a % 3 - b % 3 + 2
                        logits[:, a, b] += layer.bias_table[head, offset]
                heads.append(logits.softmax(-1) @ v)
            out = layer.proj(torch.cat(heads, -1))
            expected[:, :, i : i + 3, j : j + 3] = out.transpose(1, 2).unflatten(2, (3, 3))
    torch.testing.assert_close(layer(x), expected[:, :, :5], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_under_autocast(dtype):
    layer, x = WindowAttention2d(40).eval(), torch.randn(1, 40, 9, 9)
    with torch.autocast("cpu", dtype=dtype):
        got = layer(x)
    torch.testing.assert_close(got.float(), layer(x), rtol=0.05, atol=0.01)


def test_full_connection_has_wbmm_as_a_special_case():
    plain = randomize(WBMM2d(DIM, 3, shortcut=False).double()).eval()
    layer = FullConnection2d(DIM, 3).double()
    layer.full.data.copy_(plain.build_matrix())
    x = maps(7, 8)
    torch.testing.assert_close(layer(x), plain(x))
    fused = layer.fuse()
    assert isinstance(fused, FusedFullConnection2d)
    assert fused.to_dense() is fused


def test_the_convolutions_cross_windows():
    """An impulse beside a window's border is seen on its other side."""
    x = torch.zeros(1, DIM, 6, 6, dtype=torch.float64)
    x[..., 2, 2] = 1
    for cls, crosses in ((WBMM2d, False), (ParallelWBMM2d, True), (SerialWBMM2d, True), (HalfWBMM2d, True)):
        layer = randomize(cls(DIM, 3).double()).eval()
        with torch.no_grad():
            seen = (layer(x) - layer(torch.zeros_like(x)))[..., 3, 3].abs()
        assert bool(seen.max() > 1e-3) == crosses
    assert (seen[:, : DIM // 2] == 0).all(), "the first half of the channels stays inside windows"
    assert (seen[:, DIM // 2 :] > 0).all()


def test_interaction_layers_are_what_they_say():
    x = maps(6, 7)
    parallel, serial, half = (
        randomize(cls(DIM, 3).double()).eval() for cls in (ParallelWBMM2d, SerialWBMM2d, HalfWBMM2d)
    )
    conv = lambda module, y: F.conv2d(y, module.weight, padding=1, groups=y.shape[1])  # noqa: E731
    expected = parallel.norm(parallel.wbmm(x)) + parallel.beside_norm(conv(parallel.beside, x))
    torch.testing.assert_close(parallel(x), expected)
    torch.testing.assert_close(serial(x), conv(serial.after, serial.norm(serial.wbmm(x))))
    torch.testing.assert_close(half(x), torch.cat([half.wbmm(x[:, :4]), conv(half.rest, x[:, 4:])], 1))


def test_a_block_without_squeeze_and_excitation():
    block = randomize(Block(WBMM2d(DIM, 3), DIM, ffn_ratio=2.5, se=False).double()).eval()
    assert block.ffn.fc1.out_features == 20
    assert not any(".se." in f".{key}" for key in block.state_dict())
    fused, x = block.fuse(), maps(9, 4).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), block(x), rtol=0, atol=1e-10)
    torch.testing.assert_close(fused(x), block(x), rtol=0, atol=1e-10)  # the canonical path, with gradients on


def test_wrong_arguments():
    with pytest.raises(ValueError, match="64 channels: the heads of window attention have 40, so every stage needs a"):
        WindowAttention2d(64)
    with pytest.raises(ValueError, match="7 channels cannot be halved"):
        HalfWBMM2d(7)
    for kernel, width in ((12, 5), (13, 4), (3, 5)):
        with pytest.raises(ValueError, match=f"rectangles of {width}x{kernel}: expected odd sides"):
            SLaKConv2d(DIM, kernel, width)
    with pytest.raises(ValueError, match="padding_mode 'wrap'"):
        FullConnection2d(DIM, padding_mode="wrap")

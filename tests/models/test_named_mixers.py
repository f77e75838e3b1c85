"""Patterns, windows and mixers by name: each row of the paper's tables is one call; a wrong one says what is valid."""

import re
from pathlib import Path

import pytest
import timm
import torch
import torch.nn as nn

import wbmm
from tests.helpers import randomize
from wbmm.io.card import card_of
from wbmm.io.files import load_weights
from wbmm.layers import DepthwiseConv2d, HierarchicalWBMM2d, MultiKernelWBMM2d, WBMM2d
from wbmm.models.costs import Reach, build_on_meta, count_macs, count_params, receptive_fields
from wbmm.models.named_mixers import MIXERS, name_when_fused, parse_windows
from wbmm.models.state import CheckpointError, identify

TABLE_3 = [
    ("WWW", "WWW", "(WW)x9", "WWW"),
    ("WWW", "WWW", "(WD)x9", "WWW"),
    ("DDD", "WWW", "(WD)x9", "WWW"),
    ("DDD", "WDW", "(WD)x9", "WWW"),
    ("WDW", "WWW", "(WD)x9", "WWW"),
    ("WDW", "WDW", "(WD)x9", "WWW"),
    ("WDW", "WDW", "(WD)x9", "WDW"),
    ("DWD", "WDW", "(WD)x9", "WWW"),
]
TABLE_4 = [(7, 7, 7, 7), (14, 14, 14, 14), (14, 14, 14, 7), ("14+7", "14+7", 14, 7), ("14+7", "14+7", "14+7", 7)]


@pytest.mark.parametrize("pattern", TABLE_3)
def test_rows_of_table_3(pattern):
    model = timm.create_model("wbmm_t", pattern=pattern, device="meta")
    kinds = "".join("D" if isinstance(b.mixer, DepthwiseConv2d) else "W" for s in model.stages for b in s.blocks)
    assert kinds == "".join(model.patterns)
    assert model.patterns[2] == ("WW" if pattern[2] == "(WW)x9" else "WD") * 9
    assert model(torch.zeros(1, 3, 64, 64, device="meta")).shape == (1, 1000)


@pytest.mark.parametrize("windows", TABLE_4)
def test_rows_of_table_4(windows):
    model = timm.create_model("wbmm_t_dense", window_size=windows, device="meta")
    for stage, window in zip(model.stages, windows, strict=True):
        mixer = stage.blocks[0].mixer
        assert isinstance(mixer, HierarchicalWBMM2d if window == "14+7" else WBMM2d)
        assert mixer.window == ((14, 14) if window in (14, "14+7") else (7, 7))
    assert model(torch.zeros(1, 3, 96, 64, device="meta")).shape == (1, 1000)


def test_one_window_for_all_and_pairs():
    wide = timm.create_model("wbmm_a", window_size=(3, 5), num_classes=2)
    assert {m.window for m in wide.modules() if isinstance(m, (WBMM2d, MultiKernelWBMM2d))} == {(3, 5)}
    assert wide(torch.randn(1, 3, 40, 40)).shape == (1, 2)
    assert timm.create_model("wbmm_a_dense", window_size="6+3", device="meta").windows[0].hierarchical


def test_patterns_as_lists_of_letters():
    model = timm.create_model("wbmm_a", pattern=[["D", "D"], ["W", "D"], list("WDWDWD"), ["W", "W"]], device="meta")
    assert model.patterns == ("DD", "WD", "WDWDWD", "WW")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pattern": ("DD", "WD", "WD", "WW")}, "stage 3 has 2 blocks; depths says 6"),
        ({"pattern": ("DD", "WX", "WDWDWD", "WW")}, "'WX' of stage 2: 'X' is not a block; use W .WBMM., D"),
        ({"pattern": ("DD", "WD", "WW")}, "one entry for each of the 4 stages"),
        ({"depths": (2, 2)}, "depths .2, 2.: expected one number for each of the 4 stages"),
        ({"pattern": "DDWD"}, "one entry for each of the 4 stages"),
        ({"pattern": ("DD", "", "WDWDWD", "WW")}, "'' of stage 2: 'empty' is not a block"),
        ({"window_size": "14+6"}, "'14.6': a hierarchical window is written 'G.L' with G twice L"),
        ({"window_size": (7, 7, 7)}, "one window, or one for each of 4 stages"),
        ({"window_size": 0}, "window size 0: expected a positive int"),
        ({"window_size": "14+7"}, "an M block has no hierarchical form"),
        ({"dims": (40, 80)}, "expected 4 multiples of 8"),
        ({"padding_mode": "wrap"}, "'wrap': expected one of zeros, reflect, replicate"),
    ],
)
def test_what_is_wrong_is_said(arguments, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model("wbmm_a", device="meta", **arguments)


NAMES = [*(name for name in MIXERS if name != "slak_all"), "dw5"]
EXPORTED = ["slak", "win_attn", "full", "parallel", "serial", "half"]  # tests/deploy has the others
TINY = {"dims": (40, 40, 40, 80), "depths": (2, 1, 2, 1), "pattern": ("WD", "W", "WD", "W"), "num_classes": 10}
SIZES = [(56, 56), (75, 50), (5, 5)]
DOCS = (Path(__file__).parents[2] / "docs/baselines.md").read_text(encoding="utf-8")


def tiny(mixer, **kwargs):
    return randomize(timm.create_model("wbmm_a_dense", mixer=mixer, **{**TINY, **kwargs})).eval()


def bare(mixer):
    """What a state dict shows of a mixer in training form."""
    return {"wbmm_hier": "wbmm", "no_shortcut": "wbmm"}.get(mixer, mixer)


@pytest.mark.parametrize("mixer", NAMES)
def test_fused_equals_training_form_at_every_size(mixer):
    model = tiny(mixer).double()
    compact, dense, timms = wbmm.fuse(model), wbmm.fuse(model, "dense"), timm.utils.reparameterize_model(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in compact.modules())
    torch.testing.assert_close(timms.state_dict(), compact.state_dict(), rtol=0, atol=0)
    for size in SIZES:
        x = torch.randn(2, 3, *size, dtype=torch.float64)
        with torch.no_grad():
            expected = model(x)
            for fused in (compact, dense):
                torch.testing.assert_close(fused(x), expected, rtol=0, atol=1e-10)
    maps = compact.forward_intermediates(torch.randn(1, 3, 64, 64, dtype=torch.float64), intermediates_only=True)
    assert all(part.is_contiguous(memory_format=torch.channels_last) for part in maps)


@pytest.mark.parametrize("mixer", NAMES)
def test_gradients_with_and_without_checkpointing(mixer):
    grads = []
    for checkpointing in (False, True):
        model = tiny(mixer).train()
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(0)
        model(torch.randn(2, 3, 40, 40)).square().mean().backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
        grads.append([parameter.grad for parameter in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("mixer", NAMES)
def test_initialisation(mixer):
    """Every weight with a standard deviation of 0.02, whatever the operator."""
    layer = timm.create_model("wbmm_a_dense", mixer=mixer, **TINY).stages[1].blocks[0].mixer
    weights = [p for name, p in layer.named_parameters() if p.ndim > 1 and "norm" not in name]
    for weight in weights:
        assert weight.std().item() == pytest.approx(0.02, rel=0.25)


@pytest.mark.parametrize("mixer", NAMES)
def test_identified_by_its_weights(mixer):
    model = build_on_meta("wbmm_a_dense", mixer=mixer, **TINY)
    seen = identify(model.state_dict())
    assert (seen.form, seen.mixer, seen.patterns) == ("training", bare(mixer), TINY["pattern"])
    for form in ("compact", "dense"):
        seen = identify(wbmm.fuse(model, form).state_dict())
        assert seen.mixer == name_when_fused(bare(mixer))
        assert seen.patterns == TINY["pattern"]
        tables = any(key in str(list(model.state_dict())) for key in ("mixer.table", "wbmm.table"))
        assert seen.form == ("dense" if form == "dense" and tables else "compact")
    sizes = [None] * 4 if mixer in ("slak", "dw5", "dw13_reparam") else [window.size for window in model.windows]
    assert [window and window.size for window in seen.windows] == sizes


@pytest.mark.parametrize("mixer", NAMES)
def test_saved_models_come_back(mixer, tmp_path):
    model, x = tiny(mixer), torch.randn(2, 3, 50, 75)
    for form in ("training", "compact", "dense"):
        net = model if form == "training" else wbmm.fuse(model, form)
        loaded = wbmm.load_model(wbmm.save_model(net, tmp_path / f"{form}.safetensors"))
        torch.save(net.state_dict(), tmp_path / f"{form}.pth")
        # Without a shortcut the weights look like those of WBMM, until the fused table tells all.
        told = {"args": {"mixer": mixer}} if mixer == "no_shortcut" and form == "training" else {}
        weights_alone = wbmm.load_model(tmp_path / f"{form}.pth", **told)
        with torch.no_grad():
            for again in (loaded, weights_alone):
                torch.testing.assert_close(again(x), net(x), rtol=0, atol=1e-6)
        assert card_of(net).args["mixer"] == ("wbmm" if mixer == "wbmm_hier" else mixer)


def test_what_does_not_fit_is_explained():
    target = timm.create_model("wbmm_a_dense", **TINY)
    for mixer in NAMES:
        if bare(mixer) == "wbmm":
            continue
        with pytest.raises(CheckpointError, match=f"pass mixer='{mixer}'"):
            load_weights(target, tiny(mixer).state_dict())
    with pytest.raises(CheckpointError, match=r"looks like .*win_attn, windows 7 7 7 7"):
        load_weights(target, tiny("win_attn").state_dict())


@pytest.mark.parametrize("mixer", NAMES)
def test_counted_alike_with_and_without_memory(mixer):
    real, meta = tiny(mixer), build_on_meta("wbmm_a_dense", mixer=mixer, **TINY)
    for a, b in ((real, meta), (wbmm.fuse(real), wbmm.fuse(meta))):
        assert count_params(a) == count_params(b)
        assert count_macs(a, (64, 96))[""] == count_macs(b, (64, 96))[""]


def test_multiply_adds_of_known_mixers():
    """At 224x224, of the first block: 56x56 positions, 40 channels, 64 windows of 49 positions."""
    positions, dim = 56 * 56, 40
    expected = {
        "full": positions * dim * 49,
        "slak": positions * dim * (2 * 5 * 51 + 25),
        "win_attn": positions * (4 * dim * dim + 2 * dim * 49),
        "parallel": positions * dim * (49 + 9),
        "serial": positions * dim * (49 + 9),
        "half": positions * dim // 2 * (49 + 9),
    }
    for mixer, macs in expected.items():
        model = build_on_meta("wbmm_a_dense", mixer=mixer, **TINY)
        assert count_macs(model, (224, 224))["stages.0.blocks.0.mixer"] == macs, mixer


def extents(feature, x):
    """The largest extent of the input pixels with a gradient, over the middle row and the middle column."""
    height, width = feature.shape[2:]
    largest = [0, 0]
    for i, j in [*((i, width // 2) for i in range(height)), *((height // 2, j) for j in range(width))]:
        (grad,) = torch.autograd.grad(feature[0, :, i, j].sum(), x, retain_graph=True)
        seen = grad[0].abs().sum(0) > 0
        for axis in (0, 1):
            where = seen.any(1 - axis).nonzero()
            largest[axis] = max(largest[axis], int(where.max() - where.min()) + 1)
    return tuple(largest)


@pytest.mark.parametrize("mixer", [name for name in NAMES if name != "wbmm_hier"])
def test_receptive_field_is_what_the_gradient_sees(mixer, monkeypatch):
    """In a net whose SE and GRN are switched off, and with kernels that do not cover the whole map."""
    monkeypatch.setattr("wbmm.models.named_mixers.SLAK_KERNELS", (7, 5, 5, 5))
    arguments = {"dims": (40,) * 4, "depths": (1, 2, 1, 1), "pattern": ("W", "WD", "D", "D"), "window_size": (3, 2)}
    model = timm.create_model("wbmm_a_dense", mixer=mixer, ls_init_value=1.0, **arguments).double().eval()
    for module in model.modules():
        if type(module).__name__ == "SqueezeExcite":
            module.fc1.weight.data.zero_()
    size = (88, 72)
    fields = receptive_fields(size, model.patterns, model.windows, mixer)
    x = torch.randn(1, 3, *size, dtype=torch.float64, requires_grad=True)
    maps = model.forward_intermediates(x, indices=[0, 1], stop_early=True, intermediates_only=True)
    assert [extents(part, x) for part in maps] == fields[1:3]


def test_either_of_two_reaches():
    both = Reach.of_input(6).windows(3) | Reach.of_input(6).conv(3, 1)
    assert both.low == [0, 0, 0, 2, 3, 3]
    assert both.high == [2, 2, 3, 5, 5, 5]


ORDINARY = ("win_attn", "slak")  # attention, and rectangles; the others are made of what other nets export too


@pytest.mark.parametrize("mixer", [m if m in ORDINARY else pytest.param(m, marks=pytest.mark.heavy) for m in EXPORTED])
def test_onnx_at_a_fixed_size(mixer, tmp_path):
    """Through `wbmm export`, which runs the file and compares."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    from wbmm.deploy.export import export_model

    model = tiny(mixer, depths=(1, 1, 1, 1), pattern=("W", "D", "W", "W"), dims=(40,) * 4)
    report = export_model(model, tmp_path / "net.onnx", size=(50, 64))
    assert report.path.is_file()
    assert report.comparisons


@pytest.mark.heavy  # half a minute together
@pytest.mark.parametrize("mixer", EXPORTED)
def test_torch_export_with_a_free_batch(mixer):
    fused = wbmm.fuse(tiny(mixer))
    batch = torch.export.Dim("batch", min=1, max=64)
    with torch.no_grad():
        program = torch.export.export(fused, (torch.randn(2, 3, 50, 64),), dynamic_shapes=({0: batch},))
        for n in (1, 3):
            x = torch.randn(n, 3, 50, 64)
            torch.testing.assert_close(program.module()(x), fused(x), rtol=1e-4, atol=1e-4)


def test_kernels_of_slak_by_stage():
    model = build_on_meta("wbmm_a_dense", mixer="slak")
    kernels = [stage.blocks[0].mixer.wide.kernel_size for stage in model.stages]
    assert kernels == [(5, 51), (5, 49), (5, 47), (5, 13)]


def test_blocks_of_window_attention():
    """Narrower and without SE; D blocks are the family's."""
    first, second = build_on_meta("wbmm_a_dense", mixer="win_attn", **TINY).stages[0].blocks
    assert (first.ffn.fc1.out_features, first.se) == (100, None)
    assert (second.ffn.fc1.out_features, second.se is None) == (160, False)
    assert first.mixer.qkv.out_features // 3 // first.mixer.head_dim == 1


def test_wbmm_hier_is_a_shorthand():
    short = build_on_meta("wbmm_a_dense", mixer="wbmm_hier")
    assert short.windows == build_on_meta("wbmm_a_hier").windows
    assert short.mixer == "wbmm"
    assert identify(short.state_dict()).names() == ["wbmm_a_hier"]
    assert build_on_meta("wbmm_a_hier", mixer="wbmm_hier").windows == short.windows
    with pytest.raises(ValueError, match=r"means windows 14\+7 14\+7 14 7; those given are 14 14 14 14: leave window"):
        build_on_meta("wbmm_a_dense", mixer="wbmm_hier", window_size=14)


def test_bad_input():
    with pytest.raises(ValueError, match="48 channels: the heads of window attention have 40"):
        build_on_meta("wbmm_f_dense", mixer="win_attn")
    for mixer in ("win_attn", "full", "no_shortcut", "parallel", "serial", "half"):
        with pytest.raises(ValueError, match=rf"mixer '{mixer}' has no hierarchical form; .* stage 1 is 14\+7"):
            build_on_meta("wbmm_a_hier", mixer=mixer)
    with pytest.raises(ValueError, match=r"for depthwise mixers such as 'dw13'; the mixer is 'slak'"):
        build_on_meta("wbmm_a_dense", mixer="slak", large_kernel="implicit_gemm")
    with pytest.raises(ValueError) as error:
        build_on_meta("wbmm_a", mixer=["wbmm"])
    assert all(name in str(error.value) for name in MIXERS)


@pytest.mark.parametrize("mixer", ["win_attn", "full", "parallel", "half"])
def test_padding_modes_survive_fusion(mixer):
    model = tiny(mixer, padding_mode="replicate", window_size=3).double()
    x = torch.randn(1, 3, 40, 64, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(wbmm.fuse(model)(x), model(x), rtol=0, atol=1e-10)
        assert not torch.equal(tiny(mixer, window_size=3).double()(x), model(x))
    assert card_of(model).args["padding_mode"] == "replicate"


ALL_W = ("WWW", "WWW", "(W)x18", "WWW")
# Label in docs/baselines.md to (mixer, pattern); what the paper prints stands there.
ROWS = {
    "`wbmm`": ("wbmm", None),
    "`wbmm_hier`": ("wbmm_hier", None),
    "`dw13`": ("dw13", None),
    "`dw13_reparam`": ("dw13_reparam", None),
    "`slak`": ("slak", None),
    "`slak` in all blocks": ("slak", ALL_W),
    "`win_attn`": ("win_attn", None),
    **{f"`{name}`": (name, None) for name in ("dw3", "dw5", "dw7", "dw27")},
    "`full`": ("full", ALL_W),
    "`no_shortcut`": ("no_shortcut", ALL_W),
    "`wbmm`, all W": ("wbmm", ALL_W),
    **{f"`{name}`": (name, ALL_W) for name in ("parallel", "serial", "half")},
}
# Figures of the paper that are those of neither form within rounding; the page says why for each.
EXPLAINED = {
    ("`wbmm_hier`", "FLOPs"),
    ("`dw13_reparam`", "params"),
    ("`slak`", "params"),
    ("`slak` in all blocks", "params"),
    ("`win_attn`", "params"),
    ("`win_attn`", "FLOPs"),
}


@pytest.mark.parametrize("label", ROWS)
def test_rows_of_the_tables(label):
    """Parameters and multiply-adds of T, as docs/baselines.md prints them, beside the paper's."""
    mixer, pattern = ROWS[label]
    model = build_on_meta("wbmm_t_dense", mixer=mixer, **({"pattern": pattern} if pattern else {}))
    forms = (model, wbmm.fuse(model))
    params = [count_params(net) / 1e6 for net in forms]
    macs = [count_macs(net, (224, 224))[""] / 1e9 for net in forms]
    figures = "{:.2f} | {:.2f} | PAPER | {:.2f} | {:.2f} | PAPER".format(*params, *macs)
    row = re.search(
        rf"^\| {re.escape(label)} \|.*\| ([\d.]+ \| [\d.]+ \| \S+ \| [\d.]+ \| [\d.]+ \| \S+) \|$", DOCS, re.M
    )
    assert row, f"docs/baselines.md has no row {label}: {figures}"
    cells = row[1].split(" | ")
    assert [*cells[:2], *cells[3:5]] == [f"{value:.2f}" for value in (*params, *macs)]
    for what, counted, paper in (("params", params, cells[2]), ("FLOPs", macs, cells[5])):
        if paper != "-":
            fits = min(abs(float(paper) - value) for value in counted) <= 0.05
            assert fits != ((label, what) in EXPLAINED), what


def test_the_windows_argument_has_no_part_in_other_mixers():
    assert parse_windows(7) != build_on_meta("wbmm_a_hier").windows
    a, b = (build_on_meta(name, mixer="slak") for name in ("wbmm_a_hier", "wbmm_a_dense"))
    assert {k: v.shape for k, v in a.state_dict().items()} == {k: v.shape for k, v in b.state_dict().items()}


def test_slak_in_all_blocks_has_a_name():
    named = build_on_meta("wbmm_a_dense", mixer="slak_all")
    written = build_on_meta("wbmm_a_dense", mixer="slak", pattern=("WW", "WW", "(W)x6", "WW"))
    assert named.patterns == written.patterns
    assert named.mixer == "slak"
    assert {k: v.shape for k, v in named.state_dict().items()} == {k: v.shape for k, v in written.state_dict().items()}

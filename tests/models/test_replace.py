"""WBMM in the place of large depthwise convolutions: what is replaced, what stays, what is kept, what is refused."""

import copy

import pytest
import timm
import torch
import torch.nn as nn

import wbmm
from tests.helpers import randomize
from wbmm.layers import FusedWBMM2d, WBMM2d
from wbmm.models.replace import BiasedWBMM2d

SMALL = {"dims": (8, 16, 24, 32), "depths": (2, 1, 3, 1), "num_classes": 5}


def convnext(name="convnext_tiny", **kwargs):
    return timm.create_model(name, **{**SMALL, **kwargs})


def operators(model) -> dict[str, str]:
    """W or D by module name."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, WBMM2d):
            found[name] = "W"
        elif isinstance(module, nn.Conv2d) and module.groups > 1:
            found[name] = "D" if module.kernel_size == (3, 3) else "?"
    return found


@pytest.mark.parametrize(
    ("pattern", "letters"),
    [(None, "WWWWWWW"), ("WD", "WDWDWDW"), ("D", "DDDDDDD"), (("WD", "D", "WWD", "W"), "WDDWWDW")],
)
def test_patterns(pattern, letters):
    model = convnext()
    report = wbmm.replace_depthwise(model, pattern=pattern)
    assert "".join(operators(model).values()) == letters
    assert [entry.name for entry in report.replaced] == list(operators(model))
    assert {entry.was for entry in report.replaced} == {"7x7 depthwise"}
    assert ["D" if entry.now == "3x3 depthwise" else "W" for entry in report.replaced] == list(letters)
    assert model(torch.randn(2, 3, 50, 37)).shape == (2, 5)


def test_the_report_says_everything():
    text = str(wbmm.replace_depthwise(convnext(), window=(7, 14), pattern="WD"))
    assert "module                     channels  was            is now" in text
    assert "stages.0.blocks.0.conv_dw         8  7x7 depthwise  WBMM 7x14" in text
    assert "stages.0.blocks.1.conv_dw         8  7x7 depthwise  3x3 depthwise" in text
    assert text.endswith(
        "left alone, not depthwise: stem.0, stages.1.downsample.1, stages.2.downsample.1, stages.3.downsample.1"
    )


def test_why_convolutions_are_left_alone():
    class Folding(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 7, padding=3, groups=8)

        def fuse(self):
            return self.conv

    model = nn.ModuleDict(
        {
            "good": nn.Conv2d(8, 8, (9, 7), padding=(4, 3), groups=8),
            "same": nn.Conv2d(8, 8, 8, padding="same", groups=8),
            "dense": nn.Conv2d(8, 8, 7, padding=3),
            "grouped": nn.Conv2d(8, 8, 7, padding=3, groups=2),
            "wider": nn.Conv2d(8, 16, 7, padding=3, groups=8),
            "band": nn.Conv2d(8, 8, (1, 11), padding=(0, 5), groups=8),
            "strided": nn.Conv2d(8, 8, 7, padding=3, stride=2, groups=8),
            "dilated": nn.Conv2d(8, 8, 7, padding=6, dilation=2, groups=8),
            "valid": nn.Conv2d(8, 8, 7, groups=8),
            "folding": Folding(),
        }
    )
    report = wbmm.replace_depthwise(model)
    assert [(entry.name, entry.was) for entry in report.replaced] == [
        ("good", "9x7 depthwise"),
        ("same", "8x8 depthwise"),
    ]
    assert {entry.name: entry.why for entry in report.left_alone} == {
        "dense": "not depthwise",
        "grouped": "not depthwise",
        "wider": "not depthwise",
        "band": "a kernel below 7",
        "strided": "a stride",
        "dilated": "a dilation",
        "valid": "a padding that changes the map's size",
        "folding.conv": "inside a Folding, which folds it when fused",
    }
    assert "left alone, not depthwise: dense, grouped, wider" in str(report)


@pytest.mark.parametrize("pattern", [None, "D"])
@pytest.mark.parametrize("bias", [True, False])
def test_what_stays(pattern, bias):
    model = convnext(conv_bias=bias).to(torch.float64).to(memory_format=torch.channels_last).eval()
    conv = model.stages[0].blocks[0].conv_dw
    if bias:
        nn.init.normal_(conv.bias)
    wbmm.replace_depthwise(model, pattern=pattern)
    layer = model.stages[0].blocks[0].conv_dw
    assert layer.bias is conv.bias if bias else getattr(layer, "bias", None) is None
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert not any(module.training for module in model.modules())
    if pattern == "D":
        assert layer.weight.stride(1) == 1
    else:
        assert type(layer) is (BiasedWBMM2d if bias else WBMM2d)
    x = torch.randn(1, 8, 20, 20, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    assert layer(x).is_contiguous(memory_format=torch.channels_last)


def test_the_device_and_train_mode_stay():
    with torch.device("meta"):
        model = convnext()
    wbmm.replace_depthwise(model, pattern="WD")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert all(module.training for module in model.modules())


def test_a_layer_used_twice_stays_one():
    conv = nn.Conv2d(8, 8, 7, padding=3, groups=8)
    model = nn.Sequential(conv, nn.GELU(), conv)
    report = wbmm.replace_depthwise(model)
    assert len(report.replaced) == 1
    assert isinstance(model[0], BiasedWBMM2d)
    assert model[0] is model[2]


def test_every_parameter_gets_a_gradient():
    model = convnext()
    wbmm.replace_depthwise(model, pattern="WD")
    model(torch.randn(2, 3, 40, 40)).square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("form", ["compact", "dense"])
@pytest.mark.parametrize("size", [(56, 56), (75, 50), (37, 40)])
@pytest.mark.parametrize("bias", [True, False])
def test_fused_equals_trained(form, size, bias):
    model = convnext(conv_bias=bias)
    wbmm.replace_depthwise(model, pattern="WD")
    model = randomize(model).double().eval()
    fused = wbmm.fuse(model, form)
    assert not any(isinstance(module, WBMM2d) for module in fused.modules())
    assert isinstance(fused.stages[0].blocks[0].conv_dw, FusedWBMM2d) == (form == "compact")
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=1e-10, atol=1e-10)


def test_a_batch_norm_is_folded_with_the_bias():
    layer, norm = BiasedWBMM2d(8, 5).double(), nn.BatchNorm2d(8).double()
    randomize(nn.ModuleDict({"layer": layer, "norm": norm})).eval()
    x = torch.randn(2, 8, 13, 9, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(layer.fuse(norm)(x), norm(layer(x)))
        plain = WBMM2d(8, 5).double().eval()
        plain.load_state_dict({"table": layer.table})
        torch.testing.assert_close(layer(x), plain(x) + layer.bias[:, None, None])


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("convnextv2_atto", SMALL),
        ("caformer_s18", {"num_classes": 5}),
        ("test_convnext", {"num_classes": 5}),
        ("edgenext_xx_small", {"num_classes": 5}),
    ],
)
def test_other_models_of_timm(name, kwargs):
    model = timm.create_model(name, **kwargs)
    x = torch.randn(2, 3, 64, 64)
    shape = model.eval()(x).shape
    wbmm.replace_depthwise(model)
    model = randomize(model)
    with torch.no_grad():
        expected = model(x)
        assert expected.shape == shape
        torch.testing.assert_close(wbmm.fuse(model)(x), expected, rtol=1e-4, atol=1e-4)


def test_a_feature_extractor():
    model = convnext(features_only=True)
    wbmm.replace_depthwise(model, pattern=("WD", "W", "WDW", "W"))
    assert [part.shape[1] for part in model(torch.randn(1, 3, 64, 64))] == [8, 16, 24, 32]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"pattern": "WX"}, "pattern 'WX': 'WX' is not made of W .WBMM. and D"),
        ({"pattern": ""}, "pattern ''"),
        ({"pattern": 3}, "pattern 3"),
        ({"pattern": ("WD", "", "W", "W")}, "'' is not made of W"),
        ({"pattern": ("WD", "W", "W", "W")}, r"4 stages.*: 2 in stages.0, 1 in stages.1, 3 in stages.2, 1 in stages.3"),
        ({"pattern": ("WD", "W")}, "expected one string for each of 4 stages"),
        ({"window": 0}, "window size 0"),
        ({"min_kernel": 0}, "min_kernel 0: expected a positive int"),
        ({"min_kernel": 9}, "(?s)nothing to replace in this ConvNeXt.*at least 9.*a kernel below 9: stages.0"),
    ],
)
def test_wrong_arguments_change_nothing(kwargs, message):
    model = convnext()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        wbmm.replace_depthwise(model, **kwargs)
    torch.testing.assert_close(model.state_dict(), before)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), "no convolution at all"),
        (nn.Conv2d(8, 8, 7, padding=3, groups=8), "no module to put another one into: the model itself"),
        (timm.create_model("test_resnet"), "nothing to replace in this ResNet"),
        (timm.create_model("unireplknet_a", dims=(8, 16, 32, 64)), "inside a .*, which folds it when fused"),
    ],
    ids=("linear", "bare", "resnet", "unireplknet"),
)
def test_nothing_to_replace(model, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        wbmm.replace_depthwise(model)


def test_compiled_and_scripted_models():
    conv = nn.Sequential(nn.Conv2d(8, 8, 7, padding=3, groups=8))
    with pytest.raises(ValueError, match="compiled: replace first"):
        wbmm.replace_depthwise(torch.compile(conv))
    with pytest.raises(ValueError, match="scripted"):
        wbmm.replace_depthwise(torch.jit.trace(conv, torch.randn(1, 8, 9, 9)))
    conv.compile()
    with pytest.raises(ValueError, match="compiled: replace first"):
        wbmm.replace_depthwise(nn.Sequential(conv))


def test_convolutions_with_something_of_their_own_stay():
    """A padding that is not zeros, a hook, parametrised weights: each would be lost without a word."""
    convs = [torch.nn.Conv2d(8, 8, 7, padding=3, groups=8) for _ in range(3)]
    reflected = torch.nn.Conv2d(8, 8, 7, padding=3, groups=8, padding_mode="reflect")
    convs[0].register_forward_hook(lambda *args: None)
    torch.nn.utils.parametrizations.weight_norm(convs[1])
    model = torch.nn.Sequential(*convs, reflected)
    report = wbmm.replace_depthwise(model)
    assert [entry.name for entry in report.replaced] == ["2"]
    reasons = "\n".join(report.reasons())
    for part in ("a hook on it: 0", "parametrised weights: 1", "padded by reflect: 3"):
        assert part in reasons


def test_a_replaced_model_can_be_scripted():
    net, x = timm.create_model("convnext_atto_wbmm", num_classes=3).eval(), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.script(net)(x), net(x), rtol=1e-4, atol=1e-4)

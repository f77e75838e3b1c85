"""The reference implementation against the family: outputs, all gradients and batch statistics, in float64."""

import pytest
import timm
import torch

import wbmm
from tests.helpers import randomize
from tests.reference import image, released_logits, released_state_dict
from wbmm.layers import SqueezeExcite
from wbmm.models.plain import to_plain

NETS = {
    "P": {"pattern": ("DD", "WD", "WD", "MM")},
    "T": {"pattern": ("D", "WDW", "WD", "WW")},
    "hier": {"pattern": ("WD", "WD", "WD", "W"), "window_size": ("14+7", "14+7", 14, 7)},
}
SIZES = [(56, 56), (75, 50), (5, 5)]
CASES = pytest.mark.parametrize(("kind", "size"), [(kind, size) for kind in NETS for size in SIZES])


def narrow(kind, **kwargs):
    depths = [len(stage) for stage in NETS[kind]["pattern"]]
    options = {**NETS[kind], "depths": depths, "dims": (8, 16, 24, 32), "num_classes": 5, **kwargs}
    model = randomize(timm.create_model("wbmm_a", **options))
    for module in model.modules():
        if isinstance(module, SqueezeExcite):  # its few hidden units are alive, so that every gradient counts
            module.fc1.bias.data.add_(1)
    return model.double()


def close(actual, expected, message=None):
    torch.testing.assert_close(
        actual.reshape(expected.shape), expected, rtol=1e-10, atol=1e-10, msg=message and (lambda m: f"{message}: {m}")
    )


def run(model, images):
    """Logits, and gradients of a scalar of them for the images and by name."""
    images = images.clone().requires_grad_()
    logits = model(images)
    (logits * torch.arange(1, 6, dtype=logits.dtype).cos()).sum().backward()
    return logits.detach(), {"images": images.grad, **{n: p.grad for n, p in model.named_parameters()}}


def compare_gradients(found, expected):
    assert found.keys() == expected.keys()
    assert all(gradient.any() for gradient in expected.values())
    for name, gradient in expected.items():
        close(found[name], gradient, name)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@CASES
def test_training_form(kind, size, training):
    model = narrow(kind).train(training)
    plain = to_plain(model)
    assert plain.training == training
    images = torch.randn(3, 3, *size, dtype=torch.float64)
    (expected, gradients), (logits, found) = run(model, images), run(plain, images)
    close(logits, expected)
    compare_gradients(found, gradients)
    statistics = dict(plain.named_buffers())
    for name, buffer in model.named_buffers():
        if "running" in name or "tracked" in name:
            close(statistics[name], buffer, name)


@pytest.mark.parametrize("form", ["compact", "dense"])
@CASES
def test_fused_form(kind, size, form):
    model = narrow(kind).eval()
    fused = wbmm.fuse(model, form)
    plain = to_plain(fused)
    assert not plain.training
    images = torch.randn(3, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        close(plain(images), fused(images))
        close(plain(images), to_plain(model)(images))
    (expected, gradients), (logits, found) = run(fused, images), run(plain, images)
    close(logits, expected)
    if form == "dense":
        compare_gradients(found, gradients)


def test_with_drop_path():
    model = narrow("T", drop_path_rate=0.5).train()
    plain = to_plain(model)
    images = torch.randn(4, 3, 56, 56, dtype=torch.float64)
    torch.manual_seed(1)
    expected = model(images)
    torch.manual_seed(1)
    close(plain(images), expected)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_other_padding(mode):
    model = narrow("hier", padding_mode=mode, window_size=("4+2", "4+2", 4, 2)).eval()
    images = torch.randn(2, 3, 75, 50, dtype=torch.float64)
    with torch.no_grad():
        close(to_plain(model)(images), model(images))
        close(to_plain(wbmm.fuse(model))(images), model(images))


@pytest.mark.parametrize("case", ["wbmm_p", "wbmm_t_dense", "wbmm_t_dense_odd"])
def test_logits_of_the_released_code(case):
    name = case.removesuffix("_odd")
    model = timm.create_model(name).eval()
    model.load_state_dict(released_state_dict(name))
    size, expected = released_logits(case)
    with torch.no_grad():
        for plain in (to_plain(model), to_plain(wbmm.fuse(model))):
            torch.testing.assert_close(plain(image(*size)), expected, rtol=0, atol=1e-5)


def test_the_original_is_untouched_and_memory_is_contiguous():
    model = narrow("T").eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = to_plain(model)
    maps = []
    for block in (block for stage in plain.stages for block in stage.blocks):
        block.register_forward_hook(lambda module, args, out: maps.append(out))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1)
        plain(torch.randn(2, 3, 56, 56, dtype=torch.float64).contiguous(memory_format=torch.channels_last))
    assert maps
    assert all(x.is_contiguous() for x in maps)
    assert all(x.is_contiguous() for x in plain.parameters())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("mixer", ["dw13_reparam", "dw5"])
def test_depthwise_nets(mixer):
    model = narrow("T", mixer=mixer)
    images = torch.randn(3, 3, 75, 50, dtype=torch.float64)
    (expected, gradients), (logits, found) = run(model.train(), images), run(to_plain(model), images)
    close(logits, expected)
    compare_gradients(found, gradients)
    fused = wbmm.fuse(model.eval())
    with torch.no_grad():
        close(to_plain(fused)(images), fused(images))


def test_what_has_no_such_layout():
    with pytest.raises(ValueError, match="mixer SLaKConv2d has no reference implementation"):
        to_plain(narrow("T", mixer="slak"))
    with pytest.raises(ValueError, match="this is a ConvNeXt"):
        to_plain(timm.create_model("test_convnext"))

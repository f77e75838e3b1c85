"""`wbmm.optimize`: every way computes what the model does, the fastest is taken, and what cannot be had says why."""

import pytest
import timm
import torch

import wbmm
from tests.fixtures.tiny import tiny
from wbmm.deploy import optimize as module
from wbmm.timing import Timing

IMAGES = torch.randn(2, 3, 64, 64)
WITHOUT_COMPILER = {"runtimes": ("eager", "openvino"), "seconds": 0.1, "verbose": False}


@pytest.fixture(scope="module")
def net():
    return tiny()


def fastest(name, monkeypatch):
    """Makes one way the fastest, whatever this machine says; times stay in order of the names otherwise."""

    def time(candidates, *args, **kwargs):
        return {key: Timing((0.001 if key == name else 1.0 + i,)) for i, key in enumerate(candidates)}

    monkeypatch.setattr(module, "time_interleaved", time)


@pytest.mark.parametrize("way", ["eager", "openvino", "eager, bf16", "openvino, bf16"])
def test_the_fastest_is_taken_and_computes_the_same(net, way, monkeypatch):
    pytest.importorskip("openvino")
    fastest(way, monkeypatch)
    fast = wbmm.optimize(net, IMAGES, precisions=("float32", "bf16"), **WITHOUT_COMPILER)
    assert fast.way == way
    assert [item.way for item in fast.measured[:2]] == [way, "as given"]
    assert {item.way for item in fast.measured} == {*("as given", "eager", "openvino", "eager, bf16", "openvino, bf16")}
    tolerance = 0.05 if "bf16" in way else 1e-4
    with torch.no_grad():
        for images in (IMAGES, torch.randn(3, 3, 64, 64), torch.randn(1, 3, 96, 70)):
            expected, got = net(images), fast(images)
            assert got.dtype == torch.float32
            assert (got - expected).abs().max() <= tolerance * max(1.0, expected.abs().max().item())


def test_the_table_says_what_was_tried(net, capsys):
    pytest.importorskip("openvino")
    fast = wbmm.optimize(net, IMAGES, runtimes=("eager", "openvino"), seconds=0.1)
    out = capsys.readouterr().out
    assert out.strip() == fast.report().strip()
    assert [line.split()[0] for line in out.splitlines()[2:5]].count("openvino") == 1
    assert out.count("chosen") == 1
    assert "torch " in out


def test_what_computes_something_else_is_left_out(net, monkeypatch):
    monkeypatch.setattr(module, "_openvino", lambda fused, images, precision: lambda x: fused(x) + 1)
    fast = wbmm.optimize(net, IMAGES, **WITHOUT_COMPILER)
    assert fast.way != "openvino"
    assert "its outputs differ by 1.0e+00" in fast.measured[-1].why
    assert "left out: its outputs differ" in fast.report()


def test_a_missing_package_is_a_reason_and_no_error(net, monkeypatch):
    def missing(*args, **kwargs):
        raise ImportError("needs the package openvino")

    monkeypatch.setattr(module, "export_model", missing)
    fast = wbmm.optimize(net, IMAGES, **WITHOUT_COMPILER)
    assert (fast.measured[-1].way, fast.measured[-1].why) == ("openvino", "needs the package openvino")


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto"])
def test_models_of_timm_and_maps(name):
    backbone = timm.create_model(name, features_only=True).eval()
    fast = wbmm.optimize(backbone, IMAGES, runtimes=("eager",), seconds=0.1, verbose=False)
    with torch.no_grad():
        for expected, got in zip(backbone(IMAGES), fast(IMAGES), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_it_is_for_inference(net):
    fast = wbmm.optimize(net, IMAGES, runtimes=("eager",), seconds=0.1, verbose=False)
    assert not fast(IMAGES).requires_grad
    with pytest.raises(ValueError, match="train the model that it was made of"):
        fast.train()
    with pytest.raises(ValueError, match=r"call model.eval\(\) before wbmm.optimize"):
        wbmm.optimize(tiny().train(), IMAGES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precisions": ("fp16",)}, r"precisions \('fp16',\): expected a tuple of some of float32, bf16"),
        ({"precisions": "bf16"}, "precisions 'bf16': expected a tuple"),
        ({"runtimes": ()}, r"runtimes \(\): expected a tuple of some of eager, compiled, openvino"),
        ({"seconds": 0}, "seconds 0: expected a number above 0"),
        ({"images": IMAGES[0]}, r"images of shape \(3, 64, 64\) and type torch.float32: expected \[batch, channels"),
        ({"images": IMAGES.byte()}, "type torch.uint8: expected .* in float32"),
    ],
)
def test_bad_input_is_one_line(net, options, message):
    with pytest.raises(ValueError, match=message):
        wbmm.optimize(net, **{"images": IMAGES, **options})


def test_a_half_model_says_how_to_ask_for_bf16():
    with pytest.raises(ValueError, match=r"the model is in torch.bfloat16 on cpu.*precisions=\(\.\.\.\)"):
        wbmm.optimize(tiny().bfloat16(), IMAGES)


@pytest.mark.heavy
@pytest.mark.parametrize("way", ["compiled", "compiled, bf16"])
def test_compiled_with_frozen_weights(net, way, monkeypatch):
    fastest(way, monkeypatch)
    options = {"precisions": ("float32", "bf16"), "runtimes": ("compiled",), "verbose": False}
    fast = wbmm.optimize(net, IMAGES, **options)
    assert fast.way == way
    tolerance = 0.05 if "bf16" in way else 1e-4
    with torch.no_grad():
        for images in (IMAGES, torch.randn(3, 3, 64, 64), torch.randn(1, 3, 96, 70)):
            expected = net(images)
            assert (fast(images) - expected).abs().max() <= tolerance * max(1.0, expected.abs().max().item())

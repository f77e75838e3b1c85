"""A compiled runtime one argument away, and what happens without it."""

import logging

import pytest
import timm
import torch

from tests.helpers import randomize
from wbmm.deploy.export import compiled_runner


@pytest.fixture(scope="module")
def net():
    return randomize(timm.create_model("wbmm_a", num_classes=5)).eval()


def test_openvino_gives_the_same_logits(net, caplog):
    runner = compiled_runner(net, "openvino")
    assert runner.name == "OpenVINO"
    assert "is not available" not in caplog.text
    images = torch.randn(3, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(runner(images), net(images), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("device", "package", "reason"),
    [("meta", "openvino", "the device is 'meta'"), ("cpu", None, "needs the package openvino")],
)
def test_pytorch_takes_over_with_a_reason(net, device, package, reason, caplog, monkeypatch):
    if package is None:

        def missing(name):
            raise ValueError(f"this needs the package {name}" if name == "openvino" else name)

        monkeypatch.setattr("wbmm.deploy.export.need", missing)
        monkeypatch.setattr("wbmm.deploy.export.PACKAGES", {"openvino": ("openvino",)})
    monkeypatch.setattr("wbmm.deploy.export.torch_runner", lambda model, card, device: (model, device))
    with caplog.at_level(logging.WARNING):
        assert compiled_runner(net, "openvino", device=device) == (net, device)
    assert reason in caplog.text
    assert "PyTorch runs the model" in caplog.text


def test_by_default_pytorch_runs_it(net):
    assert compiled_runner(net, "pytorch").name.startswith("PyTorch")
    with pytest.raises(ValueError, match="'onnx': expected one of pytorch, openvino"):
        compiled_runner(net, "onnx")

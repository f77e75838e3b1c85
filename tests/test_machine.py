"""OpenVINO and NNCF are kept from reporting their use; the precision of float32 products."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from wbmm.machine import set_precision

ROOT = Path(__file__).parents[1]
# Not in pytest's own process, where NNCF is silent by itself. Whatever would go out is written down and stopped.
SCRIPT = """
import multiprocessing.process, socket, sys

tried = []

def blocked(*args, **kwargs):
    tried.append(args)
    raise OSError("blocked")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = blocked
multiprocessing.process.BaseProcess.start = blocked  # reports are sent from a process of their own

import numpy as np
import torch
import torch.nn.functional as F
from pathlib import Path
from wbmm.io.card import ModelCard
from wbmm.deploy.export import to_openvino
from wbmm.deploy.quantize.with_openvino import OpenVino
from wbmm.extras import need
from wbmm.deploy.runtime import open_runner

openvino, folder = need("openvino"), Path(sys.argv[1])
card = ModelCard(model="wbmm_a", num_classes=4, input_size=(3, 16, 16))
net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()).eval()
images = torch.randn(2, 3, 16, 16)
model = openvino.convert_model(net, example_input=images[:1], input=(1, 3, 16, 16))
to_openvino.save_openvino(model, card, folder / "net.xml")
OpenVino(folder / "net.xml", card).quantize(images, set(), folder / "int8.xml")
assert open_runner(folder / "int8.xml")(images).shape == (2, 4)

from concurrent.futures import thread
from nncf.telemetry import telemetry
print(tried, type(telemetry).__name__, sys.modules["openvino_telemetry"], len(thread._threads_queues))
"""


def test_nothing_goes_out(tmp_path):
    pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    home = tmp_path / "home"
    home.mkdir()
    quiet = ("CI", "NNCF_CI", "NNCF_DEV", "TF_BUILD", "JENKINS_URL")  # what the packages themselves take for a reason
    env = {key: value for key, value in os.environ.items() if key not in quiet}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**env, "HOME": str(home)},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[] MagicMock None 0"
    assert not (home / "intel").exists()


def test_a_package_that_somebody_else_imported_is_silenced(monkeypatch):
    package = pytest.importorskip("openvino_telemetry")
    from wbmm.extras import silence_telemetry

    sent = []
    monkeypatch.setattr(package.main.TelemetrySender, "send", lambda *args: sent.append(args))
    monkeypatch.setitem(sys.modules, "openvino_telemetry", package)
    silence_telemetry()
    package.main.TelemetrySender.send(None, None, None)
    assert not sent


def _cpu_flags() -> str:
    info = Path("/proc/cpuinfo")
    return info.read_text() if info.is_file() else ""


@pytest.fixture
def precision_as_before():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    set_precision("ieee")
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize(("precision", "tf32"), [("tf32", True), ("ieee", False), ("bf16", True)])
def test_precision_is_set_for_products_and_convolutions(precision, tf32, precision_as_before):
    set_precision("bf16")  # nothing of it stays
    set_precision(precision)
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (tf32, tf32)
    cpu = torch.backends.mkldnn.matmul.fp32_precision, torch.backends.mkldnn.conv.fp32_precision
    assert cpu.count("bf16") == (2 if precision == "bf16" else 0)
    torch.get_float32_matmul_precision()  # libraries read it, and PyTorch raises where two switches disagree


def test_bf16_precision_may_round_what_is_multiplied_and_sums_in_float32(precision_as_before):
    """oneDNN rounds on processors with AMX; on others it may compute as before, with AVX-512 BF16 too."""
    torch.manual_seed(0)
    x, weight = torch.randn(256, 1024), torch.randn(512, 1024)
    exact = x.double() @ weight.double().T

    def error():
        return ((F.linear(x, weight) - exact).abs().max() / exact.abs().max()).item()

    strict = error()
    assert strict < 1e-6
    set_precision("bf16")
    rounded = x.bfloat16().double() @ weight.bfloat16().double().T
    given = F.linear(x, weight).double()
    distances = [((given - expected).abs().max() / exact.abs().max()).item() for expected in (exact, rounded)]
    assert min(distances) < 1e-5, "neither in float32 nor rounded to bfloat16 alone"
    if "amx_bf16" in _cpu_flags():
        assert distances[1] < distances[0], "not rounded, though the processor has AMX"
    set_precision("tf32")
    assert error() == strict


def test_an_unknown_precision_names_those_that_there_are():
    with pytest.raises(ValueError, match="'fp8': expected one of tf32, ieee, bf16"):
        set_precision("fp8")

"""`wbmm bench profile`: operators with their calls and shares, in each runtime; what is reported, never how fast."""

import csv
from argparse import Namespace
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from torch.autograd import DeviceType

from wbmm import cli
from wbmm.bench import operator_times
from wbmm.bench.setting import Setting

SMALL = ["--size", "64", "64", "--rounds", "2", "--batch", "2"]


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_add_up():
    seconds, calls = Counter(a=6.0, b=3.0, c=0.5, d=0.5), Counter(a=2, b=4, c=6, d=8)
    rows = operator_times.rows(seconds, calls, rounds=2, batch=1, top=2)
    assert [row["model"] for row in rows] == ["a", "b", "2 others"]
    assert [row["calls"] for row in rows] == [1, 2, 7]
    assert [row["ms"] for row in rows] == [3000, 1500, 500]
    assert [row["part"] for row in rows] == [0.6, 0.3, 0.1]


@pytest.mark.parametrize(
    ("model", "runtime", "operator"),
    [
        ("wbmm_a:compact", "eager", "aten::layer_norm"),
        ("wbmm_a", "training", "Optimizer.step"),
        ("test_convnext", "openvino", "Convolution"),  # small: most of the time is its export
    ],
)
def test_every_runtime(model, runtime, operator, tmp_path, capsys):
    if runtime == "openvino":
        pytest.importorskip("openvino")
    command = ["bench", "profile", model, "--runtime", runtime, *SMALL, "--top", "200", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    assert operator in capsys.readouterr().out
    rows = read(tmp_path / "profile.csv")
    assert sum(float(row["part"]) for row in rows) == pytest.approx(1, abs=1e-3)
    assert all(float(row["calls"]) > 0 for row in rows)
    assert "| operator |" in (tmp_path / "profile.md").read_text()


def event(key, cpu, device, kind=DeviceType.CPU, annotation=False):
    return SimpleNamespace(
        key=key,
        self_cpu_time_total=cpu,
        self_device_time_total=device,
        device_type=kind,
        is_user_annotation=annotation,
        count=3,
    )


EVENTS = [
    event("aten::mm", 10, 4e6),
    event("cudaLaunchKernel", 50, 0),
    event("gemm_kernel", 0, 4e6, DeviceType.CUDA),
    event("a kernel that no operator launched", 0, 1e6, DeviceType.CUDA),
    event("Optimizer.step", 0, 9e6, DeviceType.CUDA, annotation=True),
]


def test_a_gpu_is_profiled_by_its_kernels():
    seconds, calls = operator_times.operator_times(EVENTS, on_cuda=True)
    assert seconds == {"aten::mm": 4.0, "kernels outside operators": 1.0}
    assert calls == {"aten::mm": 3}
    seconds, _ = operator_times.operator_times(EVENTS[:2], on_cuda=False)
    assert seconds == pytest.approx({"aten::mm": 1e-5, "cudaLaunchKernel": 5e-5})


def test_the_activities_of_a_gpu_are_recorded(monkeypatch):
    log = []

    def profiler(activities):
        log.append([activity.name for activity in activities])
        return nullcontext(SimpleNamespace(key_averages=lambda: EVENTS))

    monkeypatch.setattr(operator_times, "profile", profiler)
    monkeypatch.setattr(operator_times, "build", lambda *args: nn.Flatten())
    monkeypatch.setattr(operator_times, "images_for", lambda spec, images, setting: images)
    monkeypatch.setattr(torch.cuda, "device", lambda device: log.append(device) or nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(f"wait for {device}"))
    args = Namespace(model="wbmm_a", runtime="eager", batch=1, size=(8, 8), rounds=1)
    seconds, _ = operator_times._pytorch(args, Setting("cuda:1"))
    assert log == ["cuda:1", ["CPU", "CUDA"], "wait for cuda:1"]
    assert seconds["aten::mm"] == 4.0


@pytest.mark.parametrize(
    ("argv", "kind"), [(["--dtype", "bfloat16"], "bf16"), (["--int8"], "I8")], ids=["bf16", "int8"]
)
def test_openvino_in_other_precisions(argv, kind, tmp_path):
    pytest.importorskip("openvino")
    if argv == ["--int8"]:
        pytest.importorskip("nncf")
    command = ["bench", "profile", "test_convnext", "--runtime", "openvino", *SMALL, *argv, "--out", str(tmp_path)]
    assert cli.main(command) == 0
    if kind == "I8":  # a processor without bf16 computes in float32 all the same
        assert any(row["model"].endswith(("I8", "i8", "u8")) for row in read(tmp_path / "profile.csv"))
    assert argv[0] in read(tmp_path / "profile.csv")[0]["command"]


def test_what_openvino_is_not_profiled_in(capsys):
    assert cli.main(["bench", "profile", "wbmm_a", "--runtime", "openvino", "--dtype", "float16"]) == 1
    assert "--dtype float16: OpenVINO is profiled on the CPU in float32 or bfloat16" in capsys.readouterr().err
    assert cli.main(["bench", "profile", "wbmm_a", "--int8"]) == 1
    assert "--int8 is of --runtime openvino, not of eager" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["wbmm_q"], ["wbmm_a", "--batch", "0"], ["wbmm_a", "--top", "0"], ["wbmm_a:odd"]])
def test_bad_arguments(argv, capsys):
    assert cli.main(["bench", "profile", *argv]) == 1
    assert argv[-1] in capsys.readouterr().err

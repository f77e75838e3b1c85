"""The options that all benchmarks share: what they mean, and that every benchmark has and reports them."""

import csv
from contextlib import nullcontext

import pytest
import torch
import torch.nn as nn

from wbmm import cli, progress
from wbmm.bench import setting as setting_module
from wbmm.bench.limit import product_calls
from wbmm.bench.setting import CPU, Setting, TrainingStep, build, images_for

GPU = Setting("cuda:1")


@pytest.fixture(autouse=True)
def _precision_as_before():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (CPU, "cpu, float32 weights, precision tf32 (without effect on a CPU)"),
        (Setting(dtype="bfloat16"), "cpu, bfloat16 weights, precision tf32 (without effect on a CPU)"),
        (GPU, "cuda:1, float32 weights, precision tf32 (products and convolutions in TF32, as in the paper)"),
        (
            Setting("cuda", "float16", True, "ieee"),
            "cuda, float32 weights under autocast to float16, precision ieee (strict float32)",
        ),
    ],
)
def test_what_is_said(setting, said):
    assert setting.describe() == said
    assert Setting(**setting.columns()) == setting


def test_the_command_has_what_differs_from_the_defaults():
    assert CPU.argv() == []
    words = ["--device", "cuda:1", "--dtype", "bfloat16", "--autocast", "--precision", "ieee"]
    assert Setting("cuda:1", "bfloat16", True, "ieee").argv() == words


def test_pure_types():
    setting = Setting(dtype="bfloat16")
    model, images = build("wbmm_a:compact", setting), images_for("wbmm_a", torch.randn(1, 3, 32, 32), setting)
    assert {parameter.dtype for parameter in model.parameters()} == {images.dtype} == {torch.bfloat16}
    with torch.no_grad():
        assert setting.forward(model, images).dtype == torch.bfloat16


def test_autocast_is_entered_anew_in_each_pass():
    """Otherwise its copies of the weights would be kept: not timed, and in training those of the step before."""
    setting, seen = Setting(dtype="bfloat16", autocast=True), []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 10)

        def forward(self, x):
            y = self.fc(x.mean((2, 3)))
            seen.append((self.fc.weight.dtype, y.dtype, torch.is_autocast_enabled("cpu")))
            return y

    net = setting.place(Net())
    step = TrainingStep(net, setting.place(torch.randn(2, 3, 4, 4)), setting)
    before = net.fc.weight.detach().clone()
    step()
    assert not torch.equal(net.fc.weight, before)
    assert not torch.is_autocast_enabled("cpu")
    setting.forward(net, torch.randn(2, 3, 4, 4))
    assert seen == [(torch.float32, torch.bfloat16, True)] * 2


def test_the_limit_is_of_the_same_type():
    model = build("wbmm_a")
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wbmm.bench.limit.linear", lambda x, weight, bias: seen.append((x.dtype, weight.dtype)))
        for call in product_calls([model], 1, (32, 32), Setting(dtype="bfloat16", autocast=True)).values():
            call()
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}


def test_timing_is_on_the_device(monkeypatch, capsys):
    current, given = [], {}

    def time_interleaved(calls, rounds, warmup, on_round, pause, device):
        given.update(rounds=rounds, warmup=warmup, pause=pause, device=device)
        on_round()

    monkeypatch.setattr(torch.cuda, "device", lambda device: current.append(device) or nullcontext())
    monkeypatch.setattr(setting_module, "time_interleaved", time_interleaved)
    monkeypatch.setattr(progress, "INTERVAL_S", 0.0)
    GPU.time({}, "rounds", 3, warmup=1, pause=0.5)
    assert current == ["cuda:1"]
    assert given == {"rounds": 3, "warmup": 1, "pause": 0.5, "device": "cuda:1"}
    assert "rounds: 1 of 4" in capsys.readouterr().err


def test_an_operator_that_lacks_the_type_is_one_line():
    setting = Setting(dtype="float16")
    one_line = r"^--dtype float16 does not work on cpu: \"x\" not implemented for 'Half'$"
    with pytest.raises(ValueError, match=one_line), setting.running():
        raise RuntimeError("\"x\" not implemented for 'Half'\nand a long story")
    with pytest.raises(RuntimeError, match="a bug"), CPU.running():
        raise RuntimeError("a bug")
    with pytest.raises(torch.OutOfMemoryError), setting.running():
        raise torch.OutOfMemoryError("CUDA out of memory")


SMALL = ["--size", "32", "32", "--rounds", "1", "--batch", "2"]
COMMANDS = {
    "model": ["model", "wbmm_a:compact", "--baseline", "wbmm_a", *SMALL],
    "train": ["train", "wbmm_a", "--baseline", "wbmm_a", *SMALL],
    "profile": ["profile", "wbmm_a:compact", *SMALL],
    "runtime": ["runtime", "wbmm_a", "--baseline", "wbmm_a", "--runtimes", "eager", *SMALL],
}


@pytest.mark.parametrize("bench", COMMANDS)
@pytest.mark.parametrize("autocast", [False, True], ids=["pure", "autocast"])
def test_every_benchmark_runs_and_reports_them(bench, autocast, tmp_path, capsys):
    options = ["--dtype", "bfloat16", *["--autocast"] * autocast, "--precision", "ieee"]
    assert cli.main(["bench", *COMMANDS[bench], *options, "--out", str(tmp_path)]) == 0
    weights = "float32 weights under autocast to bfloat16" if autocast else "bfloat16 weights"
    assert f"cpu, {weights}, precision ieee (without effect on a CPU)" in capsys.readouterr().out
    assert not torch.backends.cuda.matmul.allow_tf32
    with (tmp_path / f"{bench}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            assert [row[key] for key in ("device", "dtype", "precision")] == ["cpu", "bfloat16", "ieee"]
            assert row["autocast"] == str(autocast)
            assert " ".join(options) in row["command"]


@pytest.mark.parametrize("bench", ["model", "train", "seg", "memory", "profile", "paths", "runtime"])
def test_bad_options(bench, capsys):
    if bench == "seg":
        pytest.importorskip("mmseg")
    assert cli.main(["bench", bench, "--autocast"]) == 1
    said = "paths of the CPU in float32" if bench == "paths" else "--autocast needs a --dtype to compute in"
    assert said in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert cli.main(["bench", bench, "--device", "cuda:1"]) == 1
        assert "--device cuda:1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["bench", bench, "--precision", "fp8"])

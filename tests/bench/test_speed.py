"""Presets of the paper, the layout that counts, what does not fit in memory, and runs that go on: nothing is timed."""

import argparse
import csv

import pytest
import torch

from wbmm import cli
from wbmm.bench import inference, speed, training
from wbmm.bench.results import Entry, read_log
from wbmm.bench.setting import CPU, Setting, build, why_not
from wbmm.bench.speed import Contest, Job, add_paper_figures, net_of, paper_model_speeds, time_each
from wbmm.layers import depthwise
from wbmm.timing import Timing

ARGS = argparse.Namespace(layout="best", rounds=1, pause=0.0)


@pytest.fixture
def counted(monkeypatch):
    """A measurement that is made up: WBMM takes 1 s for a batch, UniRepLKNet 2; what was asked for is noted."""
    jobs = []

    def measure(job, **more):
        jobs.append((job.size[0], job.batch, list(job.specs)))
        result = {}
        for spec in job.specs:
            if spec.endswith("+lka"):
                result[spec] = {"why_not": "no CUDA device"}
            else:
                seconds = 1.0 if spec.startswith("wbmm") else 2.0
                result[spec] = {"seconds": [seconds], "layout": "nchw", "peak_mb": 100.0}
        return result

    monkeypatch.setattr(inference, "measure", measure)
    monkeypatch.setattr(training, "measure", measure)
    return jobs


def sheet(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_papers_table_of_inference(counted, tmp_path, capsys):
    argv = ["bench", "model", "--preset", "paper", "--out", str(tmp_path)]
    assert cli.main(argv) == 0
    assert len(counted) == 4 * 3 * 3, "P N T S, three sizes, three batches"
    assert counted[0][:2] == (224, 1), "small cells first"
    rows = [row for row in sheet(tmp_path / "model.csv") if row["model"] == "wbmm_t:plain"]
    first = next(row for row in rows if (row["height"], row["batch"]) == ("224", "16"))
    assert float(first["ratio"]) == 2
    assert float(first["paper_ratio"]) == pytest.approx(34.7 / 25.3, rel=1e-4)
    assert first["over"] == "unireplknet_t:plain"
    assert "unireplknet_t:plain+lka: no CUDA device." in capsys.readouterr().out
    assert cli.main(argv) == 0
    assert len(counted) == 36, "nothing is measured twice"
    assert len(read_log(tmp_path / "model.jsonl")) == 36


def test_the_papers_table_of_training(counted, tmp_path):
    argv = ["bench", "train", "--preset", "paper", "--sizes", "p", "--batch", "8", "--out", str(tmp_path)]
    assert cli.main(argv) == 0
    rows = {row["model"]: row for row in sheet(tmp_path / "train.csv")}
    ours = rows["wbmm_p:plain-training"]
    assert (ours["paper_epoch"], ours["paper_memory_gb"]) == ("3:46", "8.61")
    assert float(ours["paper_ratio"]) == pytest.approx(353 / 226, rel=1e-4)
    assert ours["epoch"] == "44 h 29 min", "1,281,167 images at 8 a second"
    assert ours["peak_mb"] == "100"


def test_names_stand_beside_a_preset(counted, tmp_path):
    argv = ["bench", "model", "test_convnext", "--preset", "paper", "--quick", "--batch", "1", "--out", str(tmp_path)]
    assert cli.main(argv) == 0
    assert [size for size, _, _ in counted] == [224, 224], "P and T"
    rows = [row for row in sheet(tmp_path / "model.csv") if row["model"] == "test_convnext"]
    assert [row["over"] for row in rows] == ["unireplknet_p:compact", "unireplknet_t:compact"]


def test_a_dry_run_measures_nothing(counted, capsys):
    assert cli.main(["bench", "model", "--preset", "paper", "--sizes", "t", "--px", "224", "--dry-run"]) == 0
    assert counted == []
    assert "size t, height 224, width 224, batch 16" in capsys.readouterr().out


def test_a_budget_of_nothing_writes_nothing(counted, tmp_path, capsys):
    assert cli.main(["bench", "model", "--preset", "paper", "--quick", "--budget", "0", "--out", str(tmp_path)]) == 0
    assert counted == []
    assert list(tmp_path.iterdir()) == []
    assert "nothing was measured" in capsys.readouterr().out


def test_each_model_counts_in_its_faster_layout(monkeypatch):
    seconds = {("wbmm_a", torch.channels_last): 1.0, ("wbmm_a", torch.contiguous_format): 3.0}
    seconds |= {("test_convnext", torch.channels_last): 2.0, ("test_convnext", torch.contiguous_format): 1.0}

    def fake_time(self, calls, label, rounds, warmup=2, pause=0.0):
        return {key: Timing((call(),)) for key, call in calls.items()}

    monkeypatch.setattr(Setting, "time", fake_time)
    job = Job(["wbmm_a", "test_convnext", "unireplknet_a:compact+lka"], 1, (32, 32), ARGS, CPU)
    found, extra = time_each(job, lambda spec, layout: lambda: seconds[spec, layout], extra=lambda: {"x": lambda: 7.0})
    assert found["wbmm_a"] == {"seconds": [1.0], "layout": "channels_last"}
    assert found["test_convnext"] == {"seconds": [1.0], "layout": "nchw"}
    assert "CUDA" in found["unireplknet_a:compact+lka"]["why_not"]
    assert extra["x"].median == 7


def test_out_of_memory_is_a_reason_and_other_errors_are_raised():
    def fails(text):
        def prepare(spec, layout):
            raise RuntimeError(text)

        return prepare

    job = Job(["wbmm_a"], 1, (32, 32), ARGS, CPU)
    found, _ = time_each(job, fails("CUDA out of memory. Tried to allocate 3 GiB"))
    assert found["wbmm_a"]["why_not"].startswith("out of memory")
    with pytest.raises(RuntimeError, match="something else"):
        time_each(job, fails("something else"))


def test_the_package_takes_the_place_of_large_kernels_in_the_reference_implementation(monkeypatch):
    called = []

    def package(x, weight, bias=None):
        called.append(weight.shape[-1])
        return torch.nn.functional.conv2d(x, weight, bias, padding=weight.shape[-1] // 2, groups=weight.shape[0])

    monkeypatch.setattr("wbmm.bench.setting.large_kernel_conv2d", package)
    torch.manual_seed(0)
    plain = build("unireplknet_a:plain")
    torch.manual_seed(0)
    fast = build("unireplknet_a:plain+lka")
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(fast(images), plain(images))
    assert set(called) == {13}
    assert "CUDA" in why_not("unireplknet_a:plain+lka", CPU)
    assert why_not("unireplknet_a:plain", CPU) is None
    assert depthwise.find_implicit_gemm() is None


def test_who_is_who():
    assert [net_of(name) for name in ("wbmm_t:plain", "unireplknet_s", "unireplknet_s:compact+lka")] == [
        "W",
        "UN",
        "UA",
    ]
    assert net_of("convnext_tiny") is None
    assert paper_model_speeds("desktop")["A800", "p", "UA", 224, 128] == 4484
    record = {"model": "wbmm_p:plain", "over": "unireplknet_p:plain", "height": 224, "width": 320, "batch": 1}
    add_paper_figures(record, Contest("p", {}), "i7-13700K")
    assert "paper_ratio" not in record, "the paper has square images"


def test_the_limit_is_said(capsys):
    entry = Entry("model", {"height": 8, "width": 8, "batch": 2}, {"limit": {"gmacs_per_s": 3.0, "shape": [4, 5, 6]}})
    assert speed._limits_text([entry]) == " Limit at 8x8, batch 2: 3.0 GMAC/s (4x5 by 5x6)."


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--sizes", "t"], "--sizes is for a preset"),
        (["wbmm_a", "--preset", "edge"], "leave 'wbmm_a' out"),
        (["--preset", "edge", "--runtimes", "torch-fp16"], "--runtimes torch-fp16: it is for --device cuda"),
        (["--preset", "paper", "--px", "0"], "--px [0]"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, reason, capsys):
    assert cli.main(["bench", "model", *arguments]) == 1
    assert reason in capsys.readouterr().err

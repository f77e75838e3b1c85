"""`wbmm bench runtime`: every runtime has its row, beside the baseline; what is reported, never how fast."""

import csv
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch

import wbmm
from wbmm import cli, progress
from wbmm.bench import limit, runtime
from wbmm.bench.setting import CPU, Setting

GPU = Setting("cuda:1")


@pytest.fixture
def checkpoint(tmp_path):
    model = timm.create_model("wbmm_a", dims=(8, 16, 32, 64), num_classes=10).eval()
    return str(wbmm.save_model(model, tmp_path / "narrow.safetensors"))


def rows(capsys, checkpoint, *argv):
    command = ["bench", "runtime", checkpoint, "--baseline", "test_convnext", "--size", "56", "56", "--rounds", "2"]
    assert cli.main([*command, *argv]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    return [[part.strip() for part in line if part.strip()] for line in lines if len(line) > 5]


@pytest.mark.parametrize(
    ("names", "precisions", "ways"),
    [
        (["eager", "onnxruntime"], ["float32"], ["eager", "onnxruntime"]),
        (["eager", "openvino"], ["float32", "bf16"], ["eager", "eager, bf16", "openvino", "openvino, bf16"]),
        pytest.param(
            ["eager", "compiled", "onnxruntime", "openvino"],
            ["float32", "int8"],
            ["eager", "compiled", "onnxruntime", "onnxruntime, int8", "openvino", "openvino, int8"],
            marks=pytest.mark.heavy,
        ),
    ],
    ids=["float32", "bf16", "int8"],
)
def test_every_model_has_a_row_in_every_way(checkpoint, capsys, names, precisions, ways):
    table = rows(capsys, checkpoint, "--batch", "1", "3", "--runtimes", *names, "--precisions", *precisions)
    for batch in ("1", "3"):
        found = {row[0]: row for row in table if row[1] == batch}
        assert sorted(found) == sorted(
            f"{model}, {way}" for model in ("narrow.safetensors", "test_convnext") for way in ways
        )
        assert all(found[f"test_convnext, {way}"][-2:] == ["1.00x", "1.00x"] for way in ways), "ratios are within a way"
        assert all(float(row[2]) > 0 for row in found.values())


def test_accuracy_and_agreement_on_images(files, images, tmp_path, capsys):
    net = str(files["compact"])
    command = ["bench", "runtime", net, "--baseline", net, "--runtimes", "openvino", "--batch", "1"]
    command += ["--precisions", "float32", "bf16", "int8", "--rounds", "2", "--data", str(images), "--n", "16"]
    assert cli.main([*command, "--images", "24", "--out", str(tmp_path)]) == 0
    with (tmp_path / "runtime.csv").open(newline="") as file:
        found = {row["computed_in"]: row for row in csv.DictReader(file)}
    assert float(found["float32"]["agreement"]) == 100
    assert {row["images"] for row in found.values()} == {"24"}
    assert all(float(row["agreement"]) >= 80 and float(row["accuracy"]) > 50 for row in found.values())
    page = (tmp_path / "runtime.md").read_text()
    assert "same top-1 as float32, %" in page
    assert str(images) not in page


def test_files(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(limit, "COMMON", ((256, 256, 256),))
    monkeypatch.setattr(limit, "MACS_A_CALL", 1e7)
    out = tmp_path / "results"
    rows(capsys, checkpoint, "--batch", "2", "--runtimes", "eager", "--limit", "--out", str(out))
    with (out / "runtime.csv").open(newline="") as file:
        found = {row["model"]: row for row in csv.DictReader(file)}
    assert set(found) == {"test_convnext, eager", "narrow.safetensors, eager"}
    eager = found["narrow.safetensors, eager"]
    values = {key: float(eager[key]) for key in ("share", "gmacs", "images_per_s", "limit_gmacs_per_s")}
    share = values["gmacs"] * values["images_per_s"] / values["limit_gmacs_per_s"]
    assert values["share"] == pytest.approx(share, rel=1e-4)
    assert share > 0
    assert eager["command"].endswith("--precisions float32 --batch 2 --size 56 56 --rounds 2 --limit")


def test_what_cannot_be_measured(checkpoint, capsys):
    assert cli.main(["bench", "runtime", "wbmm_q"]) == 1
    assert "'wbmm_q' is neither a file nor a model" in capsys.readouterr().err
    assert cli.main(["bench", "runtime", checkpoint, "--batch", "0"]) == 1
    assert "--batch [0]" in capsys.readouterr().err


def providers(monkeypatch, *names):
    onnxruntime = pytest.importorskip("onnxruntime")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: list(names))


def ways(asked, setting, *precisions):
    return [str(way) for way in runtime.choose_ways(asked, precisions or ["float32"], setting)]


def test_the_runtimes_of_a_device(monkeypatch):
    assert ways(None, CPU) == ["eager", "compiled", "onnxruntime", "openvino"]
    assert ways(None, Setting(dtype="bfloat16")) == ["eager", "compiled"]
    providers(monkeypatch, "CPUExecutionProvider")
    assert ways(None, GPU) == ["eager", "compiled"]
    providers(monkeypatch, "TensorrtExecutionProvider", "CUDAExecutionProvider")
    assert ways(None, GPU) == ["eager", "compiled", "onnxruntime", "tensorrt"]
    assert ways(None, Setting("cuda", precision="ieee")) == ["eager", "compiled", "onnxruntime"]
    assert ways(["openvino"], GPU) == ["openvino"], "OpenVINO has to be asked for there"


def test_the_precisions_of_a_runtime(capsys):
    assert ways(None, CPU, "bf16", "int8") == [
        *("eager, bf16", "compiled, bf16", "onnxruntime, int8", "openvino, bf16", "openvino, int8")
    ]
    assert ways(["onnxruntime"], CPU, "float32", "bf16") == ["onnxruntime"]
    assert "left out: onnxruntime, bf16: ONNX Runtime has no bf16 on a CPU" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--runtimes eager: INT8 needs openvino or onnxruntime"):
        ways(["eager"], CPU, "int8")


@pytest.mark.parametrize(
    ("name", "setting", "reason"),
    [
        (
            "onnxruntime",
            Setting(dtype="float16"),
            "files are exported in float32; with --dtype float16, expected",
        ),
        ("tensorrt", CPU, "it runs on a GPU: add --device cuda"),
        ("tensorrt", Setting("cuda", precision="ieee"), "it computes in TF32"),
    ],
)
def test_runtimes_that_cannot_compute_so(name, setting, reason):
    with pytest.raises(ValueError, match=f"--runtimes {name}: {reason}"):
        ways([name], setting)


def test_openvino_stays_on_the_cpu():
    assert runtime._label("net", runtime.Way("openvino", "bf16"), GPU) == "net, openvino, bf16, on the CPU"
    assert runtime._label("net", runtime.Way("openvino", "float32"), CPU) == "net, openvino"


class Session:
    """What `onnx_call` needs of an ONNX Runtime session on a GPU; it writes down what it is told."""

    def __init__(self):
        self.log = []

    def get_inputs(self):
        return [SimpleNamespace(name="images")]

    def get_outputs(self):
        return [SimpleNamespace(name="logits")]

    def io_binding(self):
        return SimpleNamespace(
            bind_input=lambda *args: self.log.append(args[:5]), bind_output=lambda *args: self.log.append(args)
        )

    def run_with_iobinding(self, binding):
        self.log.append("run")


def test_onnxruntime_reads_and_writes_the_memory_of_the_gpu(monkeypatch, tmp_path):
    session, asked = Session(), []
    monkeypatch.setattr(runtime, "onnx_session", lambda *args, **options: asked.append((args, options)) or session)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
    path, shape = tmp_path / "a.onnx", (2, 3, 8, 8)
    runtime.onnx_call(path, "tensorrt", shape, Setting("cuda:1", precision="tf32"))()
    assert asked == [((path, "cuda:1"), {"tensorrt": True, "tf32": True})]
    assert session.log == [("images", "cuda", 1, np.float32, shape), ("logits", "cuda", 1), "run"]


def test_progress_is_printed(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(progress, "INTERVAL_S", 0.0)
    command = ["bench", "runtime", checkpoint, "--baseline", "test_convnext", "--size", "56", "56", "--rounds", "2"]
    assert cli.main([*command, "--runtimes", "onnxruntime", "--batch", "1"]) == 0
    said = capsys.readouterr().err
    assert "exporting wbmm_a, 56x56, .onnx" in said
    assert "batch 1: narrow.safetensors, onnxruntime; test_convnext, onnxruntime" in said
    assert "batch 1, rounds: 3 of 4" in said


@pytest.mark.parametrize(("name", "kept"), [("wbmm_a", {"gate"}), ("test_convnext", set())])
def test_other_nets_are_quantised_by_the_defaults_of_the_tool(name, kept, tmp_path, monkeypatch):
    """A peer with layers in float that it wants in INT8 would be a slower peer."""
    asked = []

    class Quantiser:
        suffix, float_groups = ".xml", {"gates"}

        def __init__(self, source, card):
            pass

        def layers(self):
            return [SimpleNamespace(name="gate", group="gates"), SimpleNamespace(name="linear", group="linears")]

        def quantize(self, images, keep, target):
            asked.append(keep)

    monkeypatch.setitem(runtime.BACKENDS, "openvino", Quantiser)
    monkeypatch.setattr(runtime, "export_model", lambda model, path, *args, **options: path.touch())
    runtime.converted_file(runtime.open_named(name), "openvino", "int8", (32, 32), tmp_path / "net")
    assert asked == [kept]

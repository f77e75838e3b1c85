"""`wbmm export` as people meet it: what it prints, what it refuses, and that nothing wrong is ever left behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import wbmm
from tests.fixtures.tiny import TINY, tiny
from wbmm import cli
from wbmm.commands import export as command
from wbmm.deploy import export
from wbmm.deploy.export import ExportError, export_model
from wbmm.deploy.export.verify import Comparison, Shapes, check_tolerance, compare_outputs, sample
from wbmm.deploy.runtime import Runner, open_runner
from wbmm.io.atomic import atomic_model_path

pytest.importorskip("onnxscript")


ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkpoint(tmp_path):
    return wbmm.save_model(tiny(), tmp_path / "net.safetensors")


def run(capsys, *argv):
    code = cli.main(["export", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys, *argv):
    """The one line that an error prints."""
    code, out, error = run(capsys, *argv)
    assert (code, out) == (1, "")
    assert error.count("\n") == 1, error
    return error


@pytest.fixture
def stub(monkeypatch):
    """Without tracing: files of a few bytes, which a wrong or a right runtime "runs"."""
    seen = {}

    def prepare(graph, shapes, format, half, boxes=False):
        def write(path):
            for file in [path, path.with_suffix(".bin")] if format == "openvino" else [path]:
                file.write_bytes(b"a file")

        seen.update(graph=graph, shapes=shapes)
        return write

    def runner(path):
        assert path.exists()
        seen["written"] = sorted(file.name for file in path.parent.iterdir() if file.name.startswith("."))
        error = seen.get("error", 0.0)
        return Runner("stub", seen["graph"].card, lambda x: [seen["graph"].net(x).float() + error])

    monkeypatch.setattr(export, "_prepare", prepare)
    monkeypatch.setattr(export, "open_runner", runner)
    return seen


def test_what_is_printed_and_where_it_goes(checkpoint, capsys):
    pytest.importorskip("onnxruntime")
    code, out, error = run(capsys, checkpoint, "--format", "onnx", "--size", "64", "64")
    assert code == 0, error
    assert error == ""
    lines = out.splitlines()
    assert lines[0].split("  ")[0] == "compared"
    assert sum(line.startswith("training and compact form") for line in lines) == 2
    assert sum(line.startswith("compact form and ONNX Runtime") for line in lines) == 2
    assert "net.onnx: 0.5 MB, wbmm_a (fused, compact form, 5 classes, 64x64 px, float32)" in lines[-2]
    assert lines[-1] == "images: float32, normalised, batch 1, size 64x64"
    card = open_runner(checkpoint.with_suffix(".onnx")).card
    assert card.source["file"] == "net.safetensors"
    assert len(card.source["sha256"]) == 64
    assert "onnxruntime" in card.versions
    assert "exists already" in refused(capsys, checkpoint, "--format", "onnx")
    assert json.loads(card.to_json())["args"]["dims"] == list(TINY["dims"])


@pytest.mark.parametrize("suffix", [".onnx", ".xml", ".pt2"])
def test_a_wrong_file_never_gets_its_name(suffix, checkpoint, stub, capsys):
    stub["error"] = 1e-2
    output = checkpoint.with_name(f"wrong{suffix}")
    error = refused(capsys, checkpoint, output)
    assert "compact form and stub differ by 1.0e-02" in error
    assert "nothing was written" in error
    assert [file.name for file in checkpoint.parent.iterdir()] == [checkpoint.name]
    assert len(stub["written"]) == (2 if suffix == ".xml" else 1), "it was hidden while it was tried"

    output.write_text("an older one")
    assert "exists already; say --force" in refused(capsys, checkpoint, output)
    assert "differ" in refused(capsys, checkpoint, output, "--force")
    assert output.read_text() == "an older one"
    assert run(capsys, checkpoint, output, "--force", "--tolerance", "0.1")[0] == 0
    assert output.read_bytes() == b"a file"


def test_a_model_whose_fused_form_differs_is_not_exported(checkpoint, stub, capsys, monkeypatch):
    real = export.fuse

    def broken(net, form):
        fused = real(net, form)
        fused.head.fc.bias.data += 1
        return fused

    monkeypatch.setattr(export, "fuse", broken)
    assert "training and compact form differ by 1.0e+00" in refused(capsys, checkpoint, "--format", "onnx")
    assert "graph" not in stub


def test_outputs_that_are_nan_are_wrong(checkpoint, stub, capsys):
    stub["error"] = float("nan")
    assert "differ by nan" in refused(capsys, checkpoint, "--format", "onnx")


def test_a_write_that_fails_leaves_nothing(checkpoint, stub, capsys, monkeypatch):
    def prepare(*args):
        def write(path):
            path.write_bytes(b"half")
            raise RuntimeError("disk is full\nmore")

        return write

    monkeypatch.setattr(export, "_prepare", prepare)
    assert "could not write" in refused(capsys, checkpoint, "--format", "torchexport")
    assert [file.name for file in checkpoint.parent.iterdir()] == [checkpoint.name]


@pytest.mark.heavy
@pytest.mark.parametrize("format", ["onnx", "openvino", "torchexport"])
def test_a_full_disk(format, checkpoint):
    script = f"""
import resource, sys
from wbmm import cli
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sys.exit(cli.main(["export", {str(checkpoint)!r}, "--format", {format!r}, "--size", "64", "64"]))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 1, result.stderr
    assert result.stderr.startswith("wbmm export: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert [file.name for file in checkpoint.parent.iterdir()] == [checkpoint.name]


def test_a_pair_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "net.xml"
    with atomic_model_path(path) as temporary:
        temporary.write_text("xml")
        temporary.with_suffix(".bin").write_text("bin")
        assert not path.exists()
    assert (path.read_text(), path.with_suffix(".bin").read_text()) == ("xml", "bin")
    with pytest.raises(ZeroDivisionError), atomic_model_path(path, force=True) as temporary:
        temporary.with_suffix(".bin").write_bytes(b"new" * (1 // 0))
    with pytest.raises(ValueError, match="could not write"), atomic_model_path(tmp_path / "b.xml") as temporary:
        temporary.with_suffix(".bin").write_text("bin")  # and no .xml
    assert sorted(file.name for file in tmp_path.iterdir()) == ["net.bin", "net.xml"]
    assert path.with_suffix(".bin").read_text() == "bin"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["wbmm_a", "--format", "onnx"], "wbmm_a is a model's name, not a file with weights; say --random-weights"),
        (["wbmm_q", "--format", "onnx", "--random-weights"], "timm knows no model 'wbmm_q'"),
        (["none.pth", "--format", "onnx"], "none.pth: there is no such file"),
        (["NET"], "say OUT or --format, one of onnx, openvino, torchexport"),
        (["NET", "out.tflite"], "say which format it is"),
        (["NET", "out.onnx", "--format", "openvino"], "a file for openvino ends with .xml"),
        (["NET", "nowhere/out.onnx"], "there is no folder nowhere"),
        (["NET", "--format", "onnx", "--half"], "half precision is for openvino files here, not for onnx"),
        (["NET", "--format", "onnx", "--size", "32", "64", "--dynamic-size"], "a dynamic size starts at 33 px; 32x64"),
        (["NET", "--format", "onnx", "--size", "0", "64"], "each must be at least 1"),
        (["NET", "--format", "onnx", "--model", "wbmm_t"], "says that it is a wbmm_a, not a wbmm_t"),
        (["NET", "--format", "onnx", "--random-weights"], "is a file: --random-weights goes with a model's name"),
        (["NET", "--format", "onnx", "--config", "none.py"], "none.py: there is no such configuration file"),
    ],
)
def test_refusals(argv, message, checkpoint, capsys, monkeypatch):
    monkeypatch.chdir(checkpoint.parent)
    assert message in refused(capsys, *(str(checkpoint) if word == "NET" else word for word in argv))
    assert [file.name for file in checkpoint.parent.iterdir()] == [checkpoint.name]


def test_damaged_and_hostile_checkpoints(tmp_path, capsys):
    class Bomb:
        def __reduce__(self):
            return (tmp_path / "pwned").mkdir, ()

    torch.save({"state_dict": {"x": Bomb()}}, tmp_path / "evil.pth")
    assert "refused" in refused(capsys, tmp_path / "evil.pth", "--format", "onnx")
    (tmp_path / "cut.pth").write_bytes((tmp_path / "evil.pth").read_bytes()[:-50])
    assert "cut.pth" in refused(capsys, tmp_path / "cut.pth", "--format", "onnx")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cut.pth", "evil.pth"]


def test_missing_packages_are_named_before_any_work(checkpoint, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    error = refused(capsys, checkpoint, "--format", "onnx")
    assert "needs the package onnxscript: pip install 'wbmm[export]'" in error


def test_random_weights_count(tmp_path, stub, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, _ = run(capsys, "wbmm_a", "--random-weights", "--format", "onnx", "--size", "64", "64")
    assert code == 0
    assert (tmp_path / "wbmm_a.onnx").is_file()
    gammas = [block.gamma for stage in command._random("wbmm_a").stages for block in stage.blocks]
    assert all((gamma == 1).all() for gamma in gammas), "at 1e-6 a block does nothing"


def test_what_cannot_be_dynamic_says_so(tmp_path):
    class Pinned(torch.nn.Module):
        def forward(self, x):
            return (
                x.flatten(1)[:, : 3 * 64 * 64].view(-1, 3, 64, 64).mean((2, 3)) if x.shape[2] == 64 else x.mean((2, 3))
            )

    source = export.Exportable(Pinned().eval(), sample_card(), ["logits"])
    with pytest.raises(ValueError, match=r"cannot be exported with batch 1, size any from 33 px") as caught:
        export.export_to_file(source, tmp_path / "net.pt2", dynamic_size=True)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def sample_card():
    return wbmm.io.card.ModelCard(model="wbmm_a", num_classes=3, input_size=(3, 64, 64))


def test_mirrored_maps_have_a_smallest_size():
    assert export._smallest(tiny()) == 33
    assert export._smallest(tiny(padding_mode="reflect")) == 97
    assert export._smallest(wbmm.fuse(tiny("wbmm_a_hier", padding_mode="reflect"), "dense")) == 225
    with pytest.raises(ValueError, match="a dynamic size starts at 97 px"):
        export_model(tiny(padding_mode="reflect"), "net.onnx", size=(64, 64), dynamic_size=True)


def test_shapes():
    assert Shapes(3, (224, 224)).trials() == [(1, 3, 224, 224)]
    assert Shapes(3, (96, 64), 4).trials() == [(4, 3, 96, 64)]
    free = Shapes(1, (224, 224), dynamic_batch=True, dynamic_size=True)
    assert {(1, 1, 224, 224), (3, 1, 224, 224)} <= set(free.trials())
    assert {(256, 320), (250, 333), (33, 34)} <= {shape[2:] for shape in free.trials()}
    assert free.example[0] > 1
    assert free.example[2] != free.example[3], "or torch.export would take both for one"
    assert Shapes(3, (224, 224)).dims() is None


def test_images_to_compare_on():
    card = sample_card()
    images = sample((2, 3, 40, 30), card)
    assert {tuple(image.shape) for image in images.values()} == {(2, 3, 40, 30)}
    assert all(image.std() > 0.5 for image in images.values())
    bytes_ = sample((2, 3, 40, 30), card.replace(input="uint8"))
    assert all(image.dtype == torch.uint8 and image.float().std() > 30 for image in bytes_.values())


def test_comparing():
    x = torch.zeros(1, 3, 4, 4)
    big = compare_outputs("a and b", "zeros", x, lambda x: [x + 100, x], lambda x: [x + 100.005, x])
    assert big.within(1e-4)
    assert not big.within(1e-5)
    assert not Comparison("a", "b", (1,), 0.5, 2e-4).within(1e-4)
    with pytest.raises(ExportError, match=r"outputs of shape \[\(3, 4, 4\)\] instead of \[\(1, 3, 4, 4\)\]"):
        compare_outputs("a and b", "zeros", x, lambda x: x, lambda x: x[0])
    with pytest.raises(ExportError, match="differ by nan"):
        check_tolerance([Comparison("a", "b", (1,), 1.0, 1.0), Comparison("a", "b", (1,), 1.0, float("nan"))], 1e-4)

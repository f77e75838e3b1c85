"""INT8, fp16 and bf16: what is chosen, what is written, and what is refused."""

import argparse
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from wbmm.commands import quantize as quantize_command
from wbmm.data.images import open_labelled
from wbmm.deploy import evaluate
from wbmm.deploy.evaluate import MeasuredFile, Quality, collect, quality
from wbmm.deploy.quantize import convert as conversion
from wbmm.deploy.quantize.choose import Layer, LayerChoice, choose_layers, match_layers
from wbmm.deploy.quantize.convert import BACKENDS, QuantizeError, convert_precision, read_calibration
from wbmm.deploy.runtime import open_runner, read_openvino

SUFFIX = {"onnx": ".onnx", "openvino": ".xml"}
# The model has blocks D, W, WD, W, a stem of two convolutions, three of downsampling, and a classifier.
GROUPS = {"convolution": 5, "depthwise": 2, "window": 3, "gate": 10, "expand": 5, "reduce": 5, "head": 1}


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    """No time is looked at here."""
    monkeypatch.setattr(evaluate, "PAUSE_S", 0.0)


@pytest.fixture(scope="module")
def calibration(card, images):
    return read_calibration(card, images, "folder", "train", 24)


@pytest.fixture(scope="module", params=["onnx", "openvino"])
def backend(request, files, card):
    path = files[request.param]
    return BACKENDS[request.param](path, open_runner(path).card)


@pytest.fixture(scope="module")
def int8(backend, calibration, tmp_path_factory):
    """A file in INT8 with every layer quantised."""
    output = tmp_path_factory.mktemp("int8") / f"model{backend.suffix}"
    return convert_precision(backend, "int8", output, calibration, [], target=0)


def test_what_int8_makes_no_faster_stays_in_float(files, calibration, tmp_path):
    """Of OpenVINO's file every depthwise convolution and gate; the linears are fenced off from their shortcuts."""
    backend = BACKENDS["openvino"](files["openvino"], open_runner(files["openvino"]).card)
    result = convert_precision(backend, "int8", tmp_path / "model.xml", calibration, target=0)
    groups = {layer.name: layer.group for layer in result.layers}
    assert {groups[name] for name in result.choice.keep} == set(backend.float_groups)
    assert len(result.choice.keep) == sum(GROUPS[group] for group in backend.float_groups)
    kinds = Counter(node.get_type_name() for node in read_openvino(result.path).get_ordered_ops())
    assert kinds["Maximum"] == GROUPS["reduce"]
    # One for each input; weights are stored as integers.
    assert kinds["FakeQuantize"] == sum(GROUPS[group] for group in ("convolution", "expand", "reduce", "head"))


def test_layers_are_grouped_by_what_they_do(backend):
    assert Counter(layer.group for layer in backend.layers()) == GROUPS


def test_int8_agrees_and_is_smaller(int8, backend, files, images, card):
    source = open_labelled(card, images)
    before, after = (collect(open_runner(path), source) for path in (backend.path, int8.path))
    assert quality(after.logits, before.logits).agreement >= 90
    difference = quality(after.logits, before.logits)
    assert 0 < difference.noise < 0.2  # zero would mean that nothing was quantised
    weights = int8.path.with_suffix(".bin") if backend.suffix == ".xml" else int8.path
    reference = backend.path.with_suffix(".bin") if backend.suffix == ".xml" else files["training"]
    assert weights.stat().st_size < reference.stat().st_size
    assert not int8.choice.keep


def test_the_file_says_what_it_is(int8, card):
    found = open_runner(int8.path).card
    assert found.dtype == "int8"
    assert (found.class_names, found.mean, found.input_size) == (card.class_names, card.mean, card.input_size)


def test_kept_layers_stay_in_float(backend, calibration, tmp_path, int8):
    """With everything but the classifier kept, the noise is the classifier's; and it is less than with all in INT8."""
    keep = [group for group in GROUPS if group != "head"]
    result = convert_precision(backend, "int8", tmp_path / f"model{backend.suffix}", calibration, keep, target=0)
    assert len(result.layers) - len(result.choice.keep) == 1
    assert 0 < result.choice.after.noise < int8.choice.after.noise
    text = result.path.read_bytes()
    assert int8.path.read_bytes() != text


def test_windowed_products_are_right_in_int8(backend, calibration, tmp_path):
    """A stack of matrices with one scale for each column would run in ONNX Runtime and give something else."""
    keep = [group for group in GROUPS if group != "window"]
    result = convert_precision(backend, "int8", tmp_path / f"model{backend.suffix}", calibration, keep, target=0)
    assert 0 < result.choice.after.noise < 0.05


@pytest.mark.parametrize(("format", "least"), [("onnx", 1.5), ("openvino", 1.5), ("safetensors", 1.5)])
def test_fp16(format, least, files, images, card, calibration, tmp_path):
    path = files["compact"] if format == "safetensors" else files[format]
    backend = BACKENDS[format](path, open_runner(path).card)
    result = convert_precision(backend, "fp16", tmp_path / f"model{backend.suffix}", calibration)
    assert open_runner(result.path).card.dtype == "float16"
    sizes = [p.with_suffix(".bin").stat().st_size if p.suffix == ".xml" else p.stat().st_size for p in
             (path, result.path)]  # fmt: skip
    assert sizes[0] > least * sizes[1] or format == "onnx"  # its graph outweighs the weights of so small a model
    source = open_labelled(card, images)
    before, after = (collect(open_runner(p), source) for p in (path, result.path))
    torch.testing.assert_close(after.logits, before.logits, rtol=0, atol=3e-2)
    assert not torch.equal(after.logits, before.logits)


def test_bf16_weights(files, calibration, tmp_path):
    backend = BACKENDS["safetensors"](files["compact"], open_runner(files["compact"]).card)
    result = convert_precision(backend, "bf16", tmp_path / "model.safetensors", calibration)
    assert result.card.dtype == "bfloat16"
    assert files["compact"].stat().st_size > 1.5 * result.path.stat().st_size


def test_sums_of_squares_do_not_overflow_in_fp16(tmp_path):
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    from wbmm.deploy.quantize.with_onnx import to_half

    make, float32 = onnx.helper.make_node, onnx.TensorProto.FLOAT
    nodes = [
        make("Mul", ["x", "x"], ["square"], name="a"),
        make("MatMul", ["ones", "square"], ["sum"], name="b"),
        make("Max", ["sum", "least"], ["max"], name="c"),
        make("Sqrt", ["max"], ["norm"], name="d"),
        make("Add", ["norm", "least"], ["y"], name="e"),
    ]
    tensors = {"ones": np.ones((1, 64), np.float32), "least": np.array(1e-6, np.float32)}
    graph = onnx.helper.make_graph(
        nodes,
        "norm",
        [onnx.helper.make_tensor_value_info("x", float32, (64, 2))],
        [onnx.helper.make_tensor_value_info("y", float32, (1, 2))],
        [onnx.numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    half = to_half(model)
    onnx.checker.check_model(half, full_check=True)
    session = runtime.InferenceSession(half.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.full((64, 2), 100, np.float32)  # 64 squares of 10,000 are ten times what fp16 holds
    np.testing.assert_allclose(session.run(None, {"x": x})[0], 800, rtol=1e-3)


LAYERS = [Layer("a1", "convolution"), Layer("a2", "convolution"), Layer("b", "reduce"), Layer("c", "head")]


def fake(costs: dict[str, float]):
    """Agreement falls by what each quantised layer costs."""
    tried = []

    def attempt(keep):
        tried.append(set(keep))
        cost = sum(value for name, value in costs.items() if name not in keep)
        return Quality(100 - cost, cost / 100)

    return attempt, tried


def test_nothing_is_kept_when_nothing_hurts():
    attempt, tried = fake({"a1": 0.2, "b": 0.3})
    choice = choose_layers(LAYERS, attempt, 99, set())
    assert (choice.keep, choice.groups, choice.alone) == (set(), [], {})
    assert len(tried) == 1


def test_the_worst_group_is_kept_until_the_target_is_reached():
    attempt, _ = fake({"a1": 1, "a2": 1, "b": 10, "c": 0.5})
    choice = choose_layers(LAYERS, attempt, 97, set())
    assert choice.groups == ["reduce"]
    assert choice.keep == {"b"}
    assert list(choice.alone) == ["reduce", "convolution", "head"]
    assert (choice.before.agreement, choice.after.agreement) == (87.5, 97.5)
    assert choose_layers(LAYERS, attempt, 99, set()).groups == ["reduce", "convolution"]


def test_what_does_not_help_is_quantised_all_the_same():
    """The noise comes from one group, but the target is out of reach."""

    def attempt(keep):
        return Quality(80.0 if "b" in keep else 70.0, 0.1 if "b" in keep else 0.2)

    choice = choose_layers(LAYERS, attempt, 99, set())
    assert choice.keep == {"b"}
    assert choice.after.agreement == 80


def test_the_user_s_layers_are_never_quantised():
    attempt, tried = fake({"a1": 5, "b": 5})
    choice = choose_layers(LAYERS, attempt, 99, {"a1"})
    assert all("a1" in keep for keep in tried)
    assert choice.keep == {"a1", "b"}


def test_patterns_name_groups_and_layers():
    assert match_layers(LAYERS, ["convolution", "c"]) == {"a1", "a2", "c"}
    assert match_layers(LAYERS, ["a?"]) == {"a1", "a2"}
    assert match_layers(LAYERS, []) == set()
    with pytest.raises(ValueError, match="--keep stem: no layer has this name or group"):
        match_layers(LAYERS, ["stem"])


def test_quality_of_the_same_logits():
    logits = torch.randn(5, 3)
    assert quality(logits, logits) == Quality(100.0, 0.0)
    assert quality(logits + 1e-3, logits).noise > 0


def test_calibration_images_are_spread_and_apart(card, images, capsys):
    found = read_calibration(card, images, "folder", "train", 16)
    assert found.apart
    assert len(found.images) == len(found.others) == 16
    both = torch.cat([found.images, found.others]).flatten(1)
    assert len(torch.unique(both, dim=0)) == 32
    means = found.images.mean((2, 3))
    assert len({tuple((row > 0).tolist()) for row in means}) >= 3  # of every colour
    assert "note" not in capsys.readouterr().err


@pytest.mark.parametrize(("count", "calibrated", "others"), [(40, 40, 24), (60, 60, 60), (64, 64, 64)])
def test_calibration_comes_first_where_images_are_few(card, images, count, calibrated, others):
    found = read_calibration(card, images, "folder", "train", count)
    assert (len(found.images), len(found.others)) == (calibrated, others)
    colours = {tuple((image.mean((1, 2)) > 0).tolist()) for image in found.images}
    assert len(colours) >= 3  # to the end of the sorted files


def test_bad_data_shows_before_anything_is_written(files, images, tmp_path, command, capsys):
    shutil.copytree(images / "val", tmp_path / "val")
    (tmp_path / "val" / "red" / "7.png").write_bytes(b"nothing")
    output = tmp_path / "out.onnx"
    arguments = ("quantize", files["onnx"], output, "--format", "onnx", "--calib", images, "--n", 16, "--workers", 0)
    assert command(*arguments, "--data", tmp_path) == 1
    assert "7.png" in capsys.readouterr().err
    assert not output.exists()


def test_fewer_images_than_asked_for_are_used_and_said(card, images, tmp_path, capsys):
    folder = tmp_path / "few"
    shutil.copytree(images / "val" / "red", folder)
    (folder / "0.png").write_bytes(b"nothing")
    found = read_calibration(card, folder, "folder", "train", 128)
    assert not found.apart
    assert len(found.images) == 7
    error = capsys.readouterr().err
    assert "note: 8 images to calibrate on, not 128" in error
    assert "skipped: cannot read image" in error


def test_a_file_that_disagrees_is_deleted(backend, calibration, tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "LEAST_AGREEMENT", 100.1)
    output = tmp_path / f"model{backend.suffix}"
    with pytest.raises(QuantizeError, match="it was deleted"):
        convert_precision(backend, "fp16", output, calibration)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_run_is_deleted(backend, calibration, tmp_path, monkeypatch):
    """Some files load and then fail in a kernel."""

    def fail(images):
        raise RuntimeError("no kernel for this")

    def opened(path):
        runner = open_runner(path)
        if path != backend.path:
            runner._forward = fail
        return runner

    monkeypatch.setattr(conversion, "open_runner", opened)
    with pytest.raises(QuantizeError, match="the converted file cannot be run and was deleted: "):
        convert_precision(backend, "fp16", tmp_path / f"model{backend.suffix}", calibration)
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_one_table(files, images, tmp_path, command, capsys):
    output = tmp_path / "model.onnx"
    arguments = ("quantize", files["onnx"], output, "--format", "onnx", "--calib", images, "--n", 16, "--workers", 0)
    assert command(*arguments, "--data", images, "--keep", "window", "gate", "--sensitivity") == 0
    text = capsys.readouterr().out
    assert "calibrated on 16 images; layers chosen on 16, images that were not calibrated on" in text
    assert "18 of 31 layers in INT8" in text
    assert "agreement with float32 on 16 images that were not calibrated on: " in text
    assert "agreement with float32 on 32 images of --data: " in text
    rows = [
        line.split() for line in text.splitlines() if "ONNX Runtime" in line and line.startswith(("float32", "int8"))
    ]
    assert [row[0] for row in rows] == ["float32,", "int8,"]
    assert all(row[5] == "32" and 60 < float(row[6]) <= 100 and float(row[7]) >= 90 for row in rows)
    assert "quantised alone" in text
    assert command(*arguments) == 1
    assert "exists already; say --force" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    again = ("quantize", output, tmp_path / "twice.onnx", "--format", "onnx", "--calib", images)
    assert command(*again) == 1
    assert "is in int8 already" in capsys.readouterr().err


def test_a_target_that_is_missed_on_the_data_is_said(capsys):
    args = argparse.Namespace(target=99.0, data=Path("photos"))
    measured = MeasuredFile("a.onnx", 1, 500, 80.0, 98.2, 0.1, 0.01, 1.0)
    choice = LayerChoice(set(), [], Quality(99.5, 0.1), Quality(99.5, 0.1), {})
    quantize_command._compare_with_target(measured, args, choice)
    assert capsys.readouterr().err == (
        "note: agreement with float32 on 500 images of --data: 98.20 %, below --target 99; the layers were chosen on "
        "others, where it is 99.50 %. More calibration images (--n) or a higher --target keep it nearer to float32\n"
    )
    quantize_command._compare_with_target(measured, argparse.Namespace(target=98.0, data=None), None)
    assert capsys.readouterr().out == "agreement with float32 on 500 images: 98.20 %, --target 98 is reached\n"


def test_a_checkpoint_is_fused_first(files, tmp_path, command, capsys):
    """Without images drawn landscapes are compared on."""
    output = tmp_path / "model.safetensors"
    arguments = ("quantize", files["training"], output, "--format", "safetensors", "--precision", "bf16")
    assert command(*arguments) == 0
    assert "agreement is on drawn landscapes" in capsys.readouterr().out
    assert open_runner(output).card.form == "compact"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["onnx"], "give images to calibrate on: --calib DIR"),
        (["onnx", "--calib", "nowhere"], "there is no such folder"),
        (["onnx", "--calib", "IMAGES", "--target", "101"], "--target 101: expected a percentage from 0 to 100"),
        (["onnx", "--calib", "EMPTY"], "no image in the folder"),
        (["onnx", "--calib", "IMAGES", "--n", "0"], "--n 0: give 1 or more"),
        (["onnx", "--calib", "IMAGES", "--n", "8", "--keep", "stem"], "no layer has this name or group"),
        (["onnx", "--calib", "IMAGES", "--data", "nowhere"], "there is no such folder"),
        (["openvino", "--calib", "IMAGES"], "takes a checkpoint or a file that ends with .xml"),
        (["openvino", "--precision", "bf16"], "OpenVINO has no files in bf16"),
        (["onnx", "--precision", "bf16"], "cannot run bf16 on a CPU"),
        (["onnx", "--precision", "fp16", "--full-range"], "--full-range is about the weights of int8"),
        (["safetensors"], "INT8 needs a runtime"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(files, images, tmp_path, command, capsys, arguments, message):
    (tmp_path / "empty").mkdir()
    arguments = [{"IMAGES": images, "EMPTY": tmp_path / "empty"}.get(item, item) for item in arguments]
    suffix = {"openvino": ".xml", "onnx": ".onnx", "safetensors": ".safetensors"}[arguments[0]]
    output = tmp_path / f"out{suffix}"
    assert command("quantize", files["onnx"], output, "--format", *arguments) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize(
    ("name", "message"), [("nowhere/out.onnx", "there is no folder"), ("out.xml", "ends with .onnx")]
)
def test_out_is_checked_first(files, images, tmp_path, command, capsys, name, message):
    arguments = ("quantize", files["onnx"], tmp_path / name, "--format", "onnx", "--calib", images)
    assert command(*arguments) == 1
    assert message in capsys.readouterr().err

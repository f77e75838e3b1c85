"""Exported files compute what the model does: every format, other batch sizes, other image sizes."""

import json
import time

import pytest
import timm
import torch

import wbmm
from tests.fixtures.tiny import tiny
from wbmm.deploy.export import export_model
from wbmm.deploy.runtime import open_runner
from wbmm.io.card import ModelCard, card_of
from wbmm.io.reader import METADATA_KEY

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
pytest.importorskip("openvino")

SUFFIXES = {"onnx": ".onnx", "openvino": ".xml", "torchexport": ".pt2"}
FREE = {"dynamic_batch": True, "dynamic_size": True, "size": (64, 64)}
SHAPES = [(1, 3, 224, 224), (3, 3, 256, 320), (1, 3, 250, 333), (3, 3, 64, 64), (2, 3, 33, 97)]


def agree(runner, model, shape, atol=1e-4):
    x = torch.randn(shape)
    with torch.no_grad():
        expected = model(x)
    got = runner(x)
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)
    if len(expected) > 1:
        assert (expected[0] - expected[1]).abs().max() > 100 * atol, "the outputs say nothing about the images"


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("wbmm_a", "onnx"),
        ("wbmm_a_hier", "openvino"),
        pytest.param(
            "wbmm_a_dense", "torchexport", marks=pytest.mark.heavy
        ),  # tests/models/test_tracing.py has its like
        pytest.param("wbmm_a_hier", "onnx", marks=pytest.mark.heavy),
    ],
)
def test_any_batch_and_size(name, format, tmp_path):
    model = tiny(name)
    path = tmp_path / f"net{SUFFIXES[format]}"
    report = export_model(model, path, **FREE)
    runner = open_runner(path)
    assert (runner.batch, runner.size) == (None, None)
    for shape in SHAPES:
        agree(runner, model, shape)
    assert runner.card == report.card
    assert (report.card.model, report.card.form, report.card.input_size) == (name, "compact", (3, 64, 64))
    tried = {comparison.shape for comparison in report.comparisons}
    assert {shape[0] for shape in tried} == {1, 3}
    assert {(224, 224), (256, 320), (250, 333), (64, 64)} <= {shape[2:] for shape in tried}
    names = {"net.xml", "net.bin"} if format == "openvino" else {path.name}
    assert {file.name for file in tmp_path.iterdir()} == names
    assert report.bytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert str(tmp_path).encode() not in path.read_bytes()
    assert b"site-packages" not in path.read_bytes()


def test_onnx_of_one_shape_with_everything_that_others_need(tmp_path):
    """Bytes in, logits out, and what to know in the metadata; run without this package."""
    import onnxruntime

    model = tiny()
    card = card_of(model).replace(class_names=list("abcde"), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    path = tmp_path / "net.onnx"
    export_model(model, path, card, size=(40, 48), batch=2, with_preprocess=True)
    session = onnxruntime.InferenceSession(str(path))
    (image,), (output,) = session.get_inputs(), session.get_outputs()
    assert (image.name, image.shape, image.type) == ("images", [2, 3, 40, 48], "tensor(uint8)")
    assert (output.name, output.shape) == ("logits", [2, 5])

    props = session.get_modelmeta().custom_metadata_map
    assert json.loads(props["class_names"]) == list("abcde")
    assert json.loads(props["mean"]) == [0.4, 0.5, 0.6]
    assert json.loads(props["input_size"]) == [3, 40, 48]
    assert (props["interpolation"], props["crop_pct"], props["input"]) == ("bicubic", "0.875", "uint8")
    assert ModelCard.from_json(props[METADATA_KEY]).input == "uint8"

    x = torch.randint(0, 256, (2, 3, 40, 48), dtype=torch.uint8)
    got = torch.from_numpy(session.run(None, {"images": x.numpy()})[0])
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (card.mean, card.std))
    with torch.no_grad():
        torch.testing.assert_close(got, model((x / 255 - mean) / std), rtol=0, atol=1e-4)
    assert open_runner(path)(x[:1]).shape == (1, 5)
    with pytest.raises(ValueError, match="the model takes uint8 ones"):
        open_runner(path)(x.float())


def test_feature_maps_in_half_precision_and_dense_form(tmp_path):
    import openvino

    model = wbmm.fuse(tiny("wbmm_a_hier"))
    report = export_model(model, tmp_path / "maps.xml", features=True, size=(64, 96), half=True, form="dense")
    assert (report.card.kind, report.card.dtype, report.card.form) == ("features", "float16", "dense")
    full = sum(p.numel() for p in wbmm.fuse(model, "dense").parameters()) * 4
    assert report.bytes < 0.6 * full
    names = [output.get_any_name() for output in openvino.Core().read_model(tmp_path / "maps.xml").outputs]
    assert names == ["stage1", "stage2", "stage3", "stage4"]
    x = torch.randn(1, 3, 64, 96)
    maps = open_runner(tmp_path / "maps.xml")(x)
    with torch.no_grad():
        expected = model.forward_intermediates(x, intermediates_only=True)
    assert [tuple(m.shape[1:]) for m in maps] == [(8, 16, 24), (8, 8, 12), (16, 4, 6), (16, 2, 3)]
    for a, b in zip(maps, expected, strict=True):
        assert (a - b).abs().max() < 1e-2 * max(1, b.abs().max().item())


def test_a_fixed_size_in_torchexport_needs_no_operator_of_ours(tmp_path):
    model = tiny()
    path = tmp_path / "net.pt2"
    export_model(model, path, size=(64, 64), batch=2, form="dense")
    program = torch.export.load(path)
    assert "wbmm" not in str(program.graph)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), model(x), rtol=0, atol=1e-4)


@pytest.mark.heavy
@pytest.mark.parametrize("format", ["onnx", "openvino"])
@pytest.mark.parametrize("name", ["wbmm_t", "wbmm_t_hier"])
def test_models_of_full_size(name, format, tmp_path):
    from wbmm.commands.export import _random

    model = _random(name)
    path = tmp_path / f"net{SUFFIXES[format]}"
    started = time.monotonic()
    report = export_model(model, path, dynamic_batch=True, dynamic_size=name == "wbmm_t")
    print(f"{name} {format}: {report.bytes / 2**20:.0f} MB, {time.monotonic() - started:.0f} s")
    runner = open_runner(path)
    for shape in [(1, 3, 224, 224), (3, 3, 224, 224), *([(1, 3, 256, 320)] if name == "wbmm_t" else [])]:
        agree(runner, model, shape)


@pytest.mark.heavy
def test_a_model_that_is_not_ours(tmp_path):
    model = timm.create_model("convnext_atto", num_classes=7).eval()
    report = export_model(model, tmp_path / "net.onnx", size=(64, 64), dynamic_batch=True)
    assert report.card.form == "training"
    agree(open_runner(tmp_path / "net.onnx"), model, (3, 3, 64, 64))

"""An exported segmentor gives the labels of its checkpoint: same resizing, logits interpolated, same score."""

import argparse
import builtins
import json

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("mmseg")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from tests.helpers import randomize
from tests.mm.shapes import write_config, write_shapes
from wbmm import cli
from wbmm.io.picture_pipeline import PicturePipeline
from wbmm.mm.exportable import picture_pipeline
from wbmm.mm.exported import ExportedSegmentor, label_pixels, resize_picture
from wbmm.mm.networks import build_segmentor, load_mm_config
from wbmm.mm.runner import add_test_arguments, run_testing
from wbmm.mm.segment import open_photo_segmenter
from wbmm.mm.tools import evaluate_tool

TIES = 1e-3  # share of pixels whose two best logits are equal but for rounding
ONE_SIZE, SEVERAL = [(240, 320)], [(240, 320), (301, 259), (150, 420)]


def build(config):
    """A segmentor of random weights whose classes differ from pixel to pixel."""
    model = randomize(build_segmentor(config)).eval()
    for module in model.modules():  # with norms around 0 and a large bias, every pixel would have the same class
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.ones_(module.weight)
    torch.nn.init.zeros_(model.decode_head.conv_seg.bias)
    return model


def prepare(folder, sizes, scale):
    """A tiny segmentor of random weights, its configuration with a test scale, and pictures."""
    data = write_shapes(folder / "data", train=1, val=3, sizes=sizes)
    config = write_config(folder / "tiny.py", data)
    config.write_text(f"{config.read_text()}\ntest_pipeline[1]['scale'] = {scale}\ntest_dataloader = val_dataloader\n")
    model = build(config)
    torch.save({"meta": {}, "state_dict": model.state_dict()}, folder / "net.pth")
    return folder


@pytest.fixture(scope="module")
def fixed(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("fixed"), ONE_SIZE, (160, 120))


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("dynamic"), SEVERAL, (200, 120))


def export(folder, name, *options):
    argv = ["export", folder / "net.pth", folder / name, "--config", folder / "tiny.py", "--force", *options]
    assert cli.main(list(map(str, argv))) == 0
    return folder / name


def share_of_other_labels(folder, file):
    """Between the checkpoint and an exported file, of all pixels of the validation pictures."""
    net = open_photo_segmenter(str(folder / "net.pth"), folder / "tiny.py")
    exported = open_photo_segmenter(str(file), None)
    assert exported.classes == net.classes
    np.testing.assert_array_equal(exported.colours, net.colours)
    different = total = 0
    for path in sorted((folder / "data" / "images" / "validation").glob("*.jpg")):
        image = Image.open(path).convert("RGB")
        expected, found = net.labels(image), exported.labels(image)
        assert expected.shape == found.shape == image.size[::-1]
        assert len(np.unique(expected)) > 1
        different, total = different + (expected != found).sum(), total + found.size
    return different / total


def warnings_of(caplog):
    return [record.message for record in caplog.records if record.name.startswith("wbmm")]


def score(folder, file):
    """The metrics, as `--json` writes them."""
    parser, written = argparse.ArgumentParser(), folder / "new" / "metrics.json"
    add_test_arguments(parser, "seg")
    argv = [folder / "tiny.py", file, "--work-dir", folder / "work", "--json", written]
    metrics = run_testing("seg", parser.parse_args(list(map(str, argv))))
    said = json.loads(written.read_text())
    assert said["metrics"] == {key: float(value) for key, value in metrics.items()}
    assert (said["checkpoint"], said["how"], said["images"]) == (str(file), "single scale", 3)
    return said["metrics"]


def test_a_file_of_the_test_scale(fixed, caplog):
    file = export(fixed, "net.onnx")
    segmentor = ExportedSegmentor(file)
    assert segmentor.runner.size == (120, 160), "the default size is the test scale's"
    assert segmentor.pictures.scale == (160, 120)
    assert "within 160x120 px (bilinear)" in segmentor.card.describe_transform()
    assert share_of_other_labels(fixed, file) < TIES
    assert not warnings_of(caplog)
    assert score(fixed, file)["mIoU"] == pytest.approx(score(fixed, fixed / "net.pth")["mIoU"], abs=0.01)
    assert Image.open(fixed / "work" / "test_mosaic.png").width > 600, "annotated beside predicted"


def test_a_file_of_any_size(dynamic):
    file = export(dynamic, "net.onnx", "--dynamic-size")
    assert share_of_other_labels(dynamic, file) < TIES
    assert score(dynamic, file)["mIoU"] == pytest.approx(score(dynamic, dynamic / "net.pth")["mIoU"], abs=0.01)


@pytest.mark.heavy
@pytest.mark.parametrize("suffix", [".xml", ".pt2"])
def test_other_formats(fixed, dynamic, suffix):
    assert share_of_other_labels(fixed, export(fixed, f"net{suffix}", "--with-preprocess")) < TIES
    assert share_of_other_labels(dynamic, export(dynamic, f"net{suffix}", "--dynamic-size")) < TIES


def test_a_picture_that_does_not_fit_is_padded_and_reported_once(fixed, caplog):
    segmentor = ExportedSegmentor(export(fixed, "net.onnx"))
    for size in ((100, 400), (90, 91), (1, 300)):
        assert segmentor.labels(Image.new("RGB", size)).shape == size[::-1]
    (told,) = warnings_of(caplog)
    assert "takes 160x120 px alone" in told
    assert "--dynamic-size" in told


def test_a_padded_pipeline_and_one_output(fixed, tmp_path):
    """mmseg pads right and below after normalising, cuts the logits, and compares a single one with a threshold."""
    text = (fixed / "tiny.py").read_text()
    changes = """
model["data_preprocessor"].update(test_cfg=dict(size_divisor=64), pad_val=0.5)
model["decode_head"].update(num_classes=2, out_channels=1, threshold=0.5)
"""
    (tmp_path / "tiny.py").write_text(text + changes)
    model = build(tmp_path / "tiny.py")
    with torch.no_grad():
        noise = torch.nn.functional.interpolate(torch.randn(1, 3, 8, 12), scale_factor=16)
        model.decode_head.conv_seg.bias -= model.encode_decode(noise, [{"img_shape": noise.shape[2:]}]).median()
    meta = {"dataset_meta": {"classes": ("a", "b"), "palette": [[1, 2, 3], [4, 5, 6]]}}
    torch.save({"meta": meta, "state_dict": model.state_dict()}, tmp_path / "net.pth")
    (tmp_path / "data").symlink_to(fixed / "data")
    file = export(tmp_path, "net.onnx")
    segmentor = ExportedSegmentor(file)
    assert segmentor.runner.size == (128, 192)
    assert (segmentor.pictures.size_divisor, segmentor.pictures.threshold) == (64, 0.5)
    assert share_of_other_labels(tmp_path, file) < TIES


def test_what_a_file_cannot_carry(fixed):
    model = build_segmentor(fixed / "tiny.py")
    for options, reason in (
        ({"model.test_cfg.mode": "slide"}, "takes whole pictures"),
        ({"test_dataloader.dataset.pipeline.1.type": "RandomFlip"}, "has RandomFlip, which an exported file cannot"),
        ({"test_dataloader.dataset.pipeline.0": {"type": "Resize"}}, "has two steps Resize"),
    ):
        with pytest.raises(ValueError, match=reason):
            picture_pipeline(load_mm_config(fixed / "tiny.py", options), model)


def test_what_an_exported_file_is_not_tested_with(fixed, capsys):
    argv = [str(fixed / "tiny.py"), str(export(fixed, "net.onnx")), "--work-dir", str(fixed / "work")]
    assert evaluate_tool("seg", [*argv, "--tta"]) == 1
    assert "--tta needs a checkpoint, not an exported file" in capsys.readouterr().err


@pytest.mark.parametrize("size", [(160, 120), (431, 333), (90, 300)])
def test_resizing_is_mmcvs(size, monkeypatch):
    import mmcv

    pixels = np.random.default_rng(0).integers(0, 256, (240, 320, 3), dtype=np.uint8)
    for interpolation in ("bilinear", "nearest", "bicubic", "area", "lanczos"):
        expected = mmcv.imresize(pixels, size, interpolation=interpolation, backend="cv2")
        np.testing.assert_array_equal(resize_picture(pixels, size, interpolation), expected)
    expected = mmcv.imresize(pixels, size, backend="pillow")
    np.testing.assert_array_equal(resize_picture(pixels, size, backend="pillow"), expected)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", lambda name, *a, **k: _without_cv2(real, name, *a, **k))
    cv2 = mmcv.imresize(pixels, size, backend="cv2").astype(int)
    assert np.abs(resize_picture(pixels, size).astype(int) - cv2).max() <= 1
    with pytest.raises(ValueError, match="pip install opencv-python-headless"):
        resize_picture(pixels, size, "area")


def _without_cv2(real, name, *args, **kwargs):
    if name == "cv2":
        raise ImportError("no cv2 in this test")
    return real(name, *args, **kwargs)


@pytest.mark.parametrize("keep_ratio", [True, False])
@pytest.mark.parametrize("scale", [{"scale": (200, 120)}, {"scale": (64, 90)}, {"scale_factor": (0.3, 0.7)}])
def test_sizes_are_mmcvs(scale, keep_ratio):
    from mmcv.transforms import Resize

    step = Resize(**scale, keep_ratio=keep_ratio)
    pipeline = PicturePipeline(**scale, keep_ratio=keep_ratio)
    for width, height in ((320, 240), (101, 333), (57, 57)):
        height_, width_ = step({"img": np.zeros((height, width, 3), np.uint8)})["img_shape"]
        assert pipeline.resized(width, height) == (width_, height_)


def test_labels_of_many_classes_are_found_in_parts(monkeypatch):
    logits = torch.randn(1, 37, 9, 11)
    pipeline = PicturePipeline(align_corners=True)
    whole = label_pixels(logits, (30, 41), pipeline)
    monkeypatch.setattr("wbmm.mm.exported.MOST_LOGITS", 5 * 30 * 41)
    torch.testing.assert_close(label_pixels(logits, (30, 41), pipeline), whole)

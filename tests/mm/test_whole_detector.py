"""A whole detector in one file: the same objects as MMDetection finds, in ONNX Runtime and OpenVINO."""

import argparse
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("mmdet")
pytest.importorskip("mmcv.ops")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from tests.helpers import randomize
from tests.mm.helpers import ROOT
from tests.mm.objects import write_objects
from wbmm import cli
from wbmm.deploy.export.graph import roi_features, suppress
from wbmm.deploy.export.to_onnx import onnx_program
from wbmm.io.card import ModelCard
from wbmm.mm import exported
from wbmm.mm.detect import open_photo_detector
from wbmm.mm.exportable import DetectorGraph, compare_detections
from wbmm.mm.exported import ExportedDetector, paste_masks
from wbmm.mm.networks import build_detector
from wbmm.mm.runner import add_test_arguments, run_testing

CONFIG = """
_base_ = "wbmm::own/{base}.py"
classes = ("disc", "square", "triangle")
data_root = "{data}/"
train_json, train_images = "annotations/instances_train2017.json", "train2017/"
val_json, val_images = "annotations/instances_val2017.json", "val2017/"
arch, scale, workers = "wbmm_a", (112, 80), 0
width, rois, box_features, mask_convs, proposals, anchor_scale = 8, 8, 16, 1, 20, 4
model = dict(
    backbone=dict(dims=(8, 8, 16, 16), depths=(1, 1, 1, 1), pattern=("W", "D", "W", "W")),
    test_cfg=dict(rcnn=dict(score_thr=0.02)),
)
"""


def prepare(folder, base):
    """A tiny detector of random weights that sees much, its configuration, and pictures of three shapes."""
    data = write_objects(folder / "data", train=1, val=3)
    (folder / "tiny.py").write_text(CONFIG.format(base=base, data=data))
    torch.manual_seed(0)
    model = build_detector(folder / "tiny.py")
    randomize(model.backbone)
    heads = model.roi_head.bbox_head
    for head in heads if isinstance(heads, torch.nn.ModuleList) else [heads]:
        torch.nn.init.normal_(head.fc_cls.weight, std=0.6)
        torch.nn.init.normal_(head.fc_reg.weight, std=0.3)
    torch.save({"meta": {}, "state_dict": model.state_dict()}, folder / "net.pth")
    return folder


def export(folder, name, *options):
    argv = ["export", folder / "net.pth", folder / name, "--config", folder / "tiny.py", *options]
    assert cli.main(list(map(str, argv))) == 0
    return folder / name


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = prepare(tmp_path_factory.mktemp("whole"), "mask_rcnn")
    export(folder, "net.onnx")
    return folder


def check_same_objects(folder, file):
    """Between mmdet with the checkpoint and a file, on pictures of several shapes."""
    net, found = (open_photo_detector(str(f), c) for f, c in ((folder / "net.pth", folder / "tiny.py"), (file, None)))
    assert found.classes == net.classes == ["disc", "square", "triangle"]
    np.testing.assert_array_equal(found.colours, net.colours)
    count, labels = 0, set()
    for path in sorted((folder / "data" / "val2017").glob("*.jpg")):
        image = Image.open(path).convert("RGB")
        expected, got = net.find(image), found.find(image)
        np.testing.assert_array_equal(got.labels, expected.labels)
        np.testing.assert_allclose(got.boxes, expected.boxes, rtol=0, atol=1e-3)
        np.testing.assert_allclose(got.scores, expected.scores, rtol=0, atol=1e-4)
        if expected.masks is None:
            assert got.masks is None
        else:
            assert got.masks.shape == expected.masks.shape == (len(got.boxes), image.height, image.width)
            assert (got.masks != expected.masks).mean() < 1e-4
        count, labels = count + len(got.boxes), labels | set(got.labels.tolist())
    assert count > 10
    assert len(labels) > 1


def test_a_file_finds_what_mmdet_finds(place):
    detector = ExportedDetector(place / "net.onnx")
    assert detector.runner.size is None, "it takes any size"
    assert (detector.card.num_classes, detector.pictures.scale) == (3, (112, 80))
    check_same_objects(place, place / "net.onnx")


def test_it_is_scored_as_its_checkpoint_is(place):
    def score(file):
        parser = argparse.ArgumentParser()
        add_test_arguments(parser, "det")
        argv = [place / "tiny.py", file, "--work-dir", place / "w", "--json", place / "ap.json"]
        run_testing("det", parser.parse_args(list(map(str, argv))))
        return json.loads((place / "ap.json").read_text())["metrics"]

    expected, got = score(place / "net.pth"), score(place / "net.onnx")
    assert expected.keys() == got.keys()
    assert Image.open(place / "w" / "test_mosaic.png").height > 3 * 200, "three pictures, annotated and predicted"
    for key, value in expected.items():
        assert got[key] == pytest.approx(value, abs=0.002)


def test_detect_needs_no_mm_package(place, tmp_path):
    script = f"""
import sys
sys.modules.update(dict.fromkeys(("mmengine", "mmcv", "mmseg", "mmdet")))
from wbmm import cli
argv = ["detect", "{place}/net.onnx", "{place}/data/val2017", "--out", "{tmp_path}/out", "--json", "{tmp_path}/r.json"]
sys.exit(cli.main(argv))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out").glob("*.png"))) == 3
    results = json.loads((tmp_path / "r.json").read_text())
    assert {entry["category_id"] for entry in results} <= {1, 2, 3}
    assert all(entry["segmentation"]["counts"] for entry in results)


@pytest.mark.heavy
@pytest.mark.parametrize(("base", "name"), [("cascade_mask_rcnn", "net.onnx"), ("cascade_mask_rcnn", "net.xml"),
                                            ("mask_rcnn", "net.xml"), ("cascade_rcnn", "net.onnx")])  # fmt: skip
def test_cascades_and_openvino(base, name, tmp_path):
    prepare(tmp_path, base)
    check_same_objects(tmp_path, export(tmp_path, name))


def test_a_detector_without_masks(tmp_path):
    """From boxes alone: exported, drawn, and its results written."""
    prepare(tmp_path, "faster_rcnn")
    file = export(tmp_path, "net.onnx")
    check_same_objects(tmp_path, file)
    argv = ["detect", file, tmp_path / "data" / "val2017", "--out", tmp_path / "out", "--json", tmp_path / "r.json"]
    assert cli.main(list(map(str, argv))) == 0
    results = json.loads((tmp_path / "r.json").read_text())
    assert results
    assert all("segmentation" not in entry for entry in results)


def test_a_cascade_is_the_same_in_pytorch(tmp_path):
    """The graph before it is exported, beside mmdet."""
    from mmdet.structures import DetDataSample

    prepare(tmp_path, "cascade_mask_rcnn")
    model = build_detector(tmp_path / "tiny.py", tmp_path / "net.pth")
    graph = DetectorGraph(model)
    for size in ((80, 112), (67, 91)):
        x = torch.randn(1, 3, *size)
        meta = {"img_shape": size, "ori_shape": size, "scale_factor": (1.0, 1.0)}
        padded = torch.nn.functional.pad(x, (0, -size[1] % 32, 0, -size[0] % 32))
        with torch.no_grad():
            expected = model.predict(padded, [DetDataSample(metainfo=meta)], rescale=False)[0].pred_instances
            boxes, labels, scores, masks = graph(x)
        torch.testing.assert_close(boxes[0], expected.bboxes)
        torch.testing.assert_close(scores[0], expected.scores)
        assert torch.equal(labels[0], expected.labels)
        pasted = paste_masks(masks[0], boxes[0], size, 0.5)
        assert (pasted != expected.masks).float().mean() < 1e-4


class _Boxes(torch.nn.Module):
    def forward(self, scores):
        boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 11, 11], [20, 20, 60, 50], [0, 0, 200, 180]]).expand(2, 4, 4)
        kept, best, group = suppress(boxes + 0 * scores[..., None], scores, 0.5, 0.1, 5)
        maps = [torch.arange(64.0 * n * n).view(1, 64, n, n) for n in (64, 32)]
        return kept, best, group, roi_features(maps, kept, [4, 8], 56, 7, 0)


def test_the_two_operators_in_onnx_runtime(tmp_path):
    """No box, one box, and more than are kept."""
    import onnxruntime

    module = _Boxes()
    program = torch.export.export(module, (torch.rand(2, 4),))
    onnx_program(program, ["b", "s", "g", "f"], None).save(tmp_path / "x.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "x.onnx"))
    some = torch.tensor([[0.9, 0.8, 0.7, 0.6], [0.0, 0.3, 0.5, 0.95]])
    for scores, count in ((torch.zeros(2, 4), 0), (0.2 * torch.eye(4)[:2], 2), (some, 5)):
        expected = module(scores)
        assert len(expected[0]) == count
        for a, b in zip(expected, session.run(None, {session.get_inputs()[0].name: scores.numpy()}), strict=True):
            np.testing.assert_allclose(a.numpy(), b, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "detector", "num_classes": 0}, "holds a detector's backbone and neck: it gives maps, and no boxes"),
        ({"kind": "segmentor"}, "is no detector but a segmentor"),
    ],
)
def test_other_files_are_told_apart(monkeypatch, changes, reason):
    card = ModelCard(model="wbmm_a", **changes)
    monkeypatch.setattr(exported, "open_runner", lambda path, device: SimpleNamespace(card=card, size=None))
    with pytest.raises(ValueError, match=reason):
        ExportedDetector("x.onnx")


def test_a_detector_that_is_not_known(tmp_path):
    prepare(tmp_path, "mask_rcnn")
    model = build_detector(tmp_path / "tiny.py")
    model.test_cfg.rcnn.nms.type = "soft_nms"
    with pytest.raises(ValueError, match=r"suppression by .*soft_nms.*take --neck"):
        DetectorGraph(model)


def test_how_detections_are_compared():
    def form(*boxes):
        parts = torch.tensor(boxes, dtype=torch.float32)
        return lambda x: (parts[None, :, :4], parts[None, :, 4].long(), parts[None, :, 5])

    first = form([0, 0, 10, 10, 1, 0.9], [5, 5, 50, 50, 0, 0.8])
    x = torch.zeros(1, 3, 8, 8)
    swapped = form([5, 5, 50, 50, 0, 0.8], [0, 0, 10, 10.5, 1, 0.9])
    assert compare_detections("a", "noise", x, first, swapped).images == "noise, 2 boxes"
    several = [[i, 0, i + 9, 9, 0, 0.5] for i in range(60)]
    moved = [[*box[:2], box[2] + 0.5, *box[3:]] for box in several]
    assert compare_detections("a", "noise", x, form(*several), form(*moved)).difference == pytest.approx(0.5)
    assert compare_detections("a", "noise", x, form(*several), form(*several[:30])).difference > 1
    assert compare_detections("a", "noise", x, form(*several), form(*several[1:], moved[0])).difference == 0

"""Training and testing of detectors through the real runner, on small data in COCO's format."""

import argparse
import copy
import json
import shutil
import types

import numpy as np
import pytest
import torch

pytest.importorskip("mmdet")

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from pycocotools import mask as rle

from tests.mm.helpers import checkpoint, logged
from tests.mm.objects import write_config, write_objects
from tests.mm.released import released_names
from wbmm import cli
from wbmm.mm.mm_checkpoint import read_mm_checkpoint
from wbmm.mm.networks import build_detector
from wbmm.mm.runner import add_test_arguments, run_testing
from wbmm.mm.tools import evaluate_tool, prefer_fast_metrics, train_tool

EPOCHS, STEPS = 3, 4  # steps of an epoch
SEEN: list[tuple] = []


@HOOKS.register_module(force=True)
class NoteHook(Hook):
    """Notes which images each iteration saw, their shapes, the learning rates and the optimiser's state."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        paths = [sample.img_path for sample in data_batch["data_samples"]]
        shapes = [tuple(image.shape[1:]) for image in data_batch["inputs"]]
        rates = [group["lr"] for group in runner.optim_wrapper.param_groups]
        state = copy.deepcopy(runner.optim_wrapper.state_dict()["state"])
        SEEN.append((runner.epoch, runner.iter, paths, shapes, rates, state))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_objects(tmp_path_factory.mktemp("coco"), train=8, val=4)


@pytest.fixture(scope="module")
def config(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "tiny.py"
    write_config(path, data, epochs=EPOCHS, lr=3e-3)
    path.write_text(path.read_text() + 'custom_hooks = [dict(type="NoteHook")]\n')
    return path


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    """A finished run: its folder, and what it saw."""
    folder = tmp_path_factory.mktemp("run")
    SEEN.clear()
    assert train_tool("det", [str(config), "--work-dir", str(folder)]) == 0
    return folder, list(SEEN)


def evaluate(config, checkpoint, work_dir, *options):
    parser = argparse.ArgumentParser()
    add_test_arguments(parser, "det")
    argv = [str(config), str(checkpoint), "--work-dir", str(work_dir), *options]
    return run_testing("det", parser.parse_args(argv))


def detections(model, config, data):
    """What a detector finds in the validation images, with every score."""
    from mmdet.apis import inference_detector
    from mmengine.registry import DefaultScope

    with DefaultScope.overwrite_default_scope("mmdet"):
        files = sorted(map(str, (data / "val2017").glob("*.jpg")))
        return [inference_detector(model, file).pred_instances for file in files]


def test_the_loss_falls(trained):
    folder, _ = trained
    losses = [line["loss"] for line in logged(folder)[-1] if "loss" in line]
    assert len(losses) == EPOCHS * STEPS
    assert np.mean(losses[-STEPS:]) < 0.9 * np.mean(losses[:STEPS])
    last = [line for line in logged(folder)[-1] if "coco/bbox_mAP" in line][-1]
    assert {"coco/bbox_mAP_50", "coco/segm_mAP", "coco/segm_mAP_50"} <= last.keys()
    assert [path.name for path in sorted(folder.glob("epoch_*.pth"))] == [f"epoch_{i + 1}.pth" for i in range(EPOCHS)]
    assert list(folder.glob("best_coco_bbox_mAP_epoch_*.pth"))
    assert not list(folder.glob(".*"))  # no temporary file


def test_portrait_landscape_and_empty_images_are_trained_on(trained):
    shapes = [shapes for _, _, _, shapes, _, _ in trained[1]]
    assert any(a[0] > a[1] and b[0] < b[1] for a, b in (sorted(pair, reverse=True) for pair in shapes)), shapes
    assert len({path for _, _, paths, _, _, _ in trained[1] for path in paths}) == 8  # the one without objects too


def test_resuming_continues_where_the_run_was(trained, config, tmp_path):
    folder, undisturbed = trained
    shutil.copy(folder / "epoch_1.pth", tmp_path)
    (tmp_path / "epoch_2.pth").write_bytes(b"PK cut off")  # passed over
    SEEN.clear()
    assert train_tool("det", [str(config), "--work-dir", str(tmp_path), "--resume"]) == 0
    assert [entry[:2] for entry in SEEN] == [entry[:2] for entry in undisturbed[STEPS:]]
    for new, old in zip(SEEN, undisturbed[STEPS:], strict=True):
        assert new[2] == old[2]
        assert new[4] == old[4]
    torch.testing.assert_close(SEEN[0][5], undisturbed[STEPS][5])
    assert (tmp_path / f"epoch_{EPOCHS}.pth").is_file()


def test_a_folder_with_a_run_is_not_overwritten(trained, config, capsys):
    assert train_tool("det", [str(config), "--work-dir", str(trained[0])]) == 1
    assert "of a run: continue it with --resume" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["compact", "dense"])
def test_a_fused_detector_finds_the_same(trained, config, data, form):
    checkpoint = trained[0] / f"epoch_{EPOCHS}.pth"
    model, fused = build_detector(config, checkpoint), build_detector(config, checkpoint, fuse=form)
    assert fused.backbone.form == form
    assert model.dataset_meta["classes"] == ("disc", "square", "triangle")
    found = 0
    for a, b in zip(detections(model, config, data), detections(fused, config, data), strict=True):
        assert a.labels.tolist() == b.labels.tolist()
        torch.testing.assert_close(a.bboxes, b.bboxes, rtol=1e-4, atol=1e-2)
        torch.testing.assert_close(a.scores, b.scores, rtol=1e-3, atol=1e-5)
        assert (a.masks == b.masks).float().mean() > 0.999
        found += len(a)
    assert found > 10


@pytest.fixture(scope="module")
def own_truth(trained, config, data, tmp_path_factory):
    """The data with what the detector itself finds as the truth: so short a training would give an AP of nothing."""
    root = tmp_path_factory.mktemp("own") / "coco"
    shutil.copytree(data, root)
    results = root / "results.json"
    checkpoint, annotations = trained[0] / f"epoch_{EPOCHS}.pth", root / "annotations" / "instances_val2017.json"
    argv = ["detect", checkpoint, root / "val2017", "--config", config, "--no-fuse", "--no-pictures"]
    assert cli.main([*map(str, argv), "--json", str(results), "--annotations", str(annotations)]) == 0
    contents, kept = json.loads(annotations.read_text()), []
    for found in json.loads(results.read_text()):
        area = found["bbox"][2] * found["bbox"][3]
        of_image = sum(other["image_id"] == found["image_id"] for other in kept)
        if of_image < 3 and min(found["bbox"][2:]) >= 2 and rle.area(found["segmentation"]) > 9:
            kept.append({**found, "id": len(kept) + 1, "area": area, "iscrowd": 0})
    assert len(kept) > 4
    annotations.write_text(json.dumps({**contents, "annotations": kept}))
    return root


def test_every_way_of_testing_gives_the_same_ap(trained, config, own_truth, tmp_path, capsys):
    checkpoint, options = trained[0] / f"epoch_{EPOCHS}.pth", ["--data-root", str(own_truth)]
    assert cli.main(["reparam", str(checkpoint), str(tmp_path / "fused.pth"), "--check"]) == 0
    assert "model.backbone.form='compact'" in capsys.readouterr().out
    plain = evaluate(config, checkpoint, tmp_path / "a", *options)
    assert plain["coco/bbox_mAP_50"] > 0.3
    assert plain["coco/segm_mAP_50"] > 0.3
    for name, arguments in {"b": [checkpoint, "--fuse"], "c": [tmp_path / "fused.pth"]}.items():
        other = evaluate(config, arguments[0], tmp_path / name, *arguments[1:], *options)
        for key, value in plain.items():
            assert other[key] == pytest.approx(value, abs=0.001), key


def test_a_released_detector_loads(trained, config, own_truth, tmp_path):
    """The released names of the backbone, around the weights of this run; mmdet's for the heads."""
    state_dict = read_mm_checkpoint(trained[0] / f"epoch_{EPOCHS}.pth")["state_dict"]
    renamed = released_names(state_dict)
    assert "backbone.downsample_layers.0.0.weight" in renamed
    torch.save({"state_dict": renamed, "meta": {"CLASSES": ["a", "b", "c"]}}, tmp_path / "released.pth")
    model = build_detector(config, tmp_path / "released.pth")
    torch.testing.assert_close(dict(model.state_dict()), dict(state_dict))
    assert model.dataset_meta == {"classes": ["a", "b", "c"]}
    options = ["--data-root", str(own_truth)]
    assert evaluate(config, tmp_path / "released.pth", tmp_path / "out", *options)["coco/segm_mAP_50"] > 0.3


class TestErrors:
    """What the user can mend: one sentence, code 2."""

    def fails(self, capsys, config, work_dir, message, *options):
        assert train_tool("det", [str(config), "--work-dir", str(work_dir), *options]) == 1
        text = capsys.readouterr().err.strip().splitlines()[-1]
        assert text.startswith(("train_seg: ", "train_det: "))
        assert message in text

    def test_classes(self, data, tmp_path, capsys):
        config = write_config(tmp_path / "tiny.py", data)
        options = ["--cfg-options", "model.roi_head.mask_head.num_classes=80"]
        message = "model.roi_head.mask_head.num_classes is 80, but the data set names 3 classes"
        self.fails(capsys, config, tmp_path / "a", message, *options)
        config.write_text(config.read_text().replace('("disc", "square"', '("disc", "cube"'))
        self.fails(
            capsys, config, tmp_path / "a", "no category is called 'cube', which is a class of the configuration"
        )

    def test_missing_images_and_files(self, data, tmp_path, capsys):
        root = tmp_path / "coco"
        shutil.copytree(data, root)
        config = write_config(tmp_path / "tiny.py", root)
        (root / "train2017" / "000000000003.jpg").unlink()
        message = "1 of 8 images of instances_train2017.json are missing"
        self.fails(capsys, config, tmp_path / "a", message)
        self.fails(capsys, config, tmp_path / "a", "no such annotation file", "--data-root", str(tmp_path))
        self.fails(capsys, tmp_path / "no.py", tmp_path / "a", "there is no such configuration file")
        assert not (tmp_path / "a").exists()

    def test_metrics_of_other_annotations(self, data, tmp_path, capsys):
        config = write_config(tmp_path / "tiny.py", data)
        options = ["--cfg-options", f"val_evaluator.ann_file={data}/annotations/instances_train2017.json"]
        self.fails(capsys, config, tmp_path / "a", "instances_val2017.json: they must be the same", *options)

    def test_a_start_from_a_segmentor(self, data, tmp_path, capsys):
        config = write_config(tmp_path / "tiny.py", data)
        torch.save(checkpoint(build_detector(config).backbone), tmp_path / "seg.pth")
        message = "seg.pth does not fit the configuration: not in the file: neck."
        self.fails(capsys, config, tmp_path / "a", message, "--cfg-options", f"load_from={tmp_path / 'seg.pth'}")

    def test_testing(self, trained, config, tmp_path, capsys):
        checkpoint = str(trained[0] / f"epoch_{EPOCHS}.pth")
        options = ["--cfg-options", "model.roi_head.mask_head.conv_out_channels=8"]
        assert evaluate_tool("det", [str(config), checkpoint, "--work-dir", str(tmp_path), *options]) == 1
        assert "does not fit the configuration: roi_head.mask_head.0" in capsys.readouterr().err
        assert evaluate_tool("det", [str(config), checkpoint, "--data-root", str(tmp_path)]) == 1
        assert "there is no such annotation file" in capsys.readouterr().err
        with pytest.raises(SystemExit):  # an option of segmentation alone
            evaluate_tool("det", [str(config), checkpoint, "--tta"])


def test_without_mmcvs_operators(capsys, monkeypatch, config):
    monkeypatch.setattr("wbmm.mm.check_mmcv_ops", lambda: (False, "build it with its operators"))
    assert train_tool("det", [str(config)]) == 1
    assert capsys.readouterr().err.startswith("train_det: detection needs mmcv's operators: build it")


def test_faster_metrics_are_taken_where_they_are(monkeypatch):
    import sys

    calls = []
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    assert not prefer_fast_metrics("det")
    stand_in = types.SimpleNamespace(init_as_pycocotools=lambda: calls.append(1))
    monkeypatch.setitem(sys.modules, "faster_coco_eval", stand_in)
    assert not prefer_fast_metrics("seg")
    assert prefer_fast_metrics("det")
    assert calls == [1]

"""Training and testing of segmentors through the real runner, on small data in ADE20K's format."""

import argparse
import copy
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("mmseg")

import wbmm
from tests.mm.helpers import Bomb, count_reads, logged
from tests.mm.released import released_names
from tests.mm.shapes import write_config, write_shapes
from wbmm import cli
from wbmm.mm import register as hooks
from wbmm.mm.check_data import check_segmentation_data, follow_ignore_index
from wbmm.mm.loading import CLASSIFIERS, describe_misfit
from wbmm.mm.mm_checkpoint import MMCheckpoint, read_mm_checkpoint
from wbmm.mm.networks import build_segmentor, load_mm_config, prepare_device
from wbmm.mm.runner import add_test_arguments, add_train_arguments, multi_scale_pipeline, run_testing
from wbmm.mm.tools import evaluate_tool, train_tool

ITERATIONS, INTERVAL = 8, 4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_shapes(tmp_path_factory.mktemp("ade"), train=8, val=2)


@pytest.fixture(scope="module")
def config(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "tiny.py"
    return write_config(path, data, iterations=ITERATIONS, interval=INTERVAL, lr=5e-3)


@pytest.fixture(scope="module")
def watched():
    """Has the hook that watches labels note which images each iteration saw, and with which learning rate."""
    seen, original = [], hooks.LabelRangeHook.before_train_iter

    def note(self, runner, batch_idx, data_batch=None):
        original(self, runner, batch_idx, data_batch)
        paths = [sample.img_path for sample in data_batch["data_samples"]]
        rates = [group["lr"] for group in runner.optim_wrapper.param_groups]
        state = copy.deepcopy(runner.optim_wrapper.state_dict()["state"])
        seen.append((runner.iter, paths, rates, state))

    hooks.LabelRangeHook.before_train_iter = note
    yield seen
    hooks.LabelRangeHook.before_train_iter = original


@pytest.fixture(scope="module")
def trained(config, watched, tmp_path_factory):
    """A finished run: its folder, and what it saw."""
    folder = tmp_path_factory.mktemp("run")
    assert train_tool("seg", [str(config), "--work-dir", str(folder)]) == 0
    seen = list(watched)
    watched.clear()
    return folder, seen


def evaluate(config, checkpoint, work_dir, *options):
    parser = argparse.ArgumentParser()
    add_test_arguments(parser, "seg")
    argv = [str(config), str(checkpoint), "--work-dir", str(work_dir), *options]
    return run_testing("seg", parser.parse_args(argv))


def test_the_loss_falls(trained):
    folder, _ = trained
    losses = [line["loss"] for line in logged(folder)[-1] if "loss" in line]
    assert len(losses) == ITERATIONS
    assert np.mean(losses[-3:]) < 0.95 * np.mean(losses[:3])
    assert (folder / f"iter_{ITERATIONS}.pth").is_file()
    assert list(folder.glob("best_mIoU_iter_*.pth"))
    assert not list(folder.glob(".*"))  # no temporary file


def test_a_warm_up_of_one_step_is_no_warm_up(config, tmp_path, watched):
    """With it, mmengine trains at the warm-up's first rate to the end."""
    before = len(watched)
    options = ["--cfg-options", "train_cfg.max_iters=3", "param_scheduler.1.end=3", "param_scheduler.1.begin=2"]
    warm = [*options, "param_scheduler.0.end=2"]
    assert train_tool("seg", [str(config), "--work-dir", str(tmp_path / "a"), *warm]) == 0
    assert train_tool("seg", [str(config), "--work-dir", str(tmp_path / "b"), *options]) == 0
    rates = [rates[-1] for _, _, rates, _ in watched[before:]]
    assert rates == pytest.approx([5e-4, 5e-3, 5e-3] + [5e-3] * 3)


def test_the_gradient_applied_is_bounded(config, tmp_path, monkeypatch):
    applied, step = [], torch.optim.AdamW.step

    def note(self, *args, **kwargs):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        applied.append(torch.nn.utils.get_total_norm(gradients).item())
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", note)
    options = ["--cfg-options", "model.decode_head.loss_decode.loss_weight=1e6", "train_cfg.max_iters=2"]
    assert train_tool("seg", [str(config), "--work-dir", str(tmp_path), *options]) == 0
    assert applied == pytest.approx([35, 35], rel=1e-3)
    assert next(line for line in logged(tmp_path)[-1] if "grad_norm" in line)["grad_norm"] > 1e4


def test_resuming_continues_where_the_run_was(trained, config, watched, tmp_path, monkeypatch):
    folder, undisturbed = trained
    shutil.copy(folder / f"iter_{INTERVAL}.pth", tmp_path)
    (tmp_path / f"iter_{INTERVAL + 1}.pth").write_bytes(b"PK cut off")  # passed over
    (tmp_path / "last_checkpoint").write_text("")  # as a kill leaves it
    watched.clear()
    reads = count_reads(monkeypatch)
    assert train_tool("seg", [str(config), "--work-dir", str(tmp_path), "--resume"]) == 0
    assert reads == [f"iter_{INTERVAL}.pth"]
    assert [entry[0] for entry in watched] == list(range(INTERVAL, ITERATIONS))
    for (_, paths, rates, _), (_, old_paths, old_rates, _) in zip(watched, undisturbed[INTERVAL:], strict=True):
        assert paths == old_paths
        assert rates == old_rates
    torch.testing.assert_close(watched[0][3], undisturbed[INTERVAL][3])
    assert (tmp_path / f"iter_{ITERATIONS}.pth").is_file()


def test_a_folder_with_a_run_is_not_overwritten(trained, config, capsys):
    folder, _ = trained
    assert train_tool("seg", [str(config), "--work-dir", str(folder)]) == 1
    assert f"already holds iter_{ITERATIONS}.pth of a run: continue it with --resume" in capsys.readouterr().err


def test_single_and_multi_scale_and_fused(trained, config, tmp_path, capsys):
    checkpoint = trained[0] / f"iter_{ITERATIONS}.pth"
    assert cli.main(["reparam", str(checkpoint), str(tmp_path / "fused.pth"), "--form", "dense", "--check"]) == 0
    said = capsys.readouterr().out
    assert "model.backbone.form='dense'" in said
    assert "map 3" in said
    plain = evaluate(config, checkpoint, tmp_path / "a")
    assert 0 <= plain["mIoU"] <= 100
    assert plain["aAcc"] > 0
    assert evaluate(config, checkpoint, tmp_path / "b", "--fuse")["mIoU"] == pytest.approx(plain["mIoU"], abs=0.01)
    assert evaluate(config, tmp_path / "fused.pth", tmp_path / "c")["mIoU"] == pytest.approx(plain["mIoU"], abs=0.01)
    multi = evaluate(config, checkpoint, tmp_path / "d", "--tta", "--fuse", "dense")
    assert 0 <= multi["mIoU"] <= 100


def test_scales_of_multi_scale_testing_follow_the_test_pipeline(config):
    options = {"test_dataloader.dataset.pipeline.1.scale": (96, 48)}
    pipeline, scales = multi_scale_pipeline(load_mm_config(config, options))
    assert [step["scale"] for step in pipeline[1]["transforms"][0]] == [(96, 48), (120, 60)]
    assert [step[0]["type"] for step in pipeline[1]["transforms"][2:]] == ["LoadAnnotations", "PackSegInputs"]
    assert scales == "(96, 48), (120, 60)"
    cfg = load_mm_config(config, {"tta_ratios": [0.5]})
    del cfg.test_dataloader.dataset.pipeline[1]
    pipeline, scales = multi_scale_pipeline(cfg)
    assert pipeline[1]["transforms"][0][0]["scale_factor"] == 0.5
    assert scales == "x0.5"
    cfg.tta_pipeline = [{"type": "LoadImageFromFile"}]
    assert multi_scale_pipeline(cfg)[0] == cfg.tta_pipeline


def test_annotations_of_two_sets_in_one_folder(config):
    expected = "data: 8 images for train, 2 images for val, 150 classes"
    assert check_segmentation_data(load_mm_config(config)) == expected
    shared = {"val_dataloader.dataset.data_prefix.seg_map_path": "annotations/training"}
    assert check_segmentation_data(load_mm_config(config, shared)) == expected


def own_data(tmp_path, data, ignored):
    """The data as labels from 0 with another ignored label, and a configuration for them."""
    root = tmp_path / "own"
    shutil.copytree(data, root)
    for file in root.glob("annotations/*/*.png"):
        labels = np.array(Image.open(file)).astype(int) - 1
        Image.fromarray(np.where(labels < 0, ignored, labels).astype(np.uint8)).save(file)
    config = write_config(tmp_path / "own.py", root)
    dataset = (
        "dict(type='BaseSegDataset', metainfo=dict(classes=[str(i) for i in range(150)]), reduce_zero_label=False)"
    )
    text = "".join(f"{part}_dataloader['dataset'].update({dataset})\n" for part in ("train", "val"))
    config.write_text(f"{config.read_text()}\n{text}test_dataloader = val_dataloader\n")
    return config


def test_another_ignored_label(data, tmp_path, capsys):
    config = own_data(tmp_path, data, ignored=200)
    assert train_tool("seg", [str(config), "--work-dir", str(tmp_path / "a")]) == 1
    assert "label 200 with num_classes=150" in capsys.readouterr().err
    options = ["--cfg-options", "model.decode_head.ignore_index=200", "train_cfg.val_interval=1"]
    assert train_tool("seg", [str(config), "--work-dir", str(tmp_path / "b"), *options]) == 0
    cfg = load_mm_config(tmp_path / "b" / "own.py")
    assert cfg.model.auxiliary_head.ignore_index == cfg.model.data_preprocessor.seg_pad_val == 200
    assert cfg.val_dataloader.dataset.ignore_index == cfg.val_evaluator.ignore_index == 200
    assert [step.get("ignore_index") for step in cfg.train_dataloader.dataset.pipeline][3] == 200
    both = [*options, "train_dataloader.dataset.ignore_index=7"]
    assert train_tool("seg", [str(config), "--work-dir", str(tmp_path / "c"), *both]) == 1
    assert "ignore_index is 200 in UPerHead and 7 in BaseSegDataset" in capsys.readouterr().err


def test_padding_gets_the_ignored_label(config):
    """As mmcv and mmseg have it, padding has the label 255, which would be no class."""
    cfg = load_mm_config(config, {"model.decode_head.ignore_index": 200})
    pad = {"type": "Pad", "size": (64, 64)}
    steps = [pad, {**pad, "pad_val": 114}, {"type": "RandomMosaic"}]
    cfg.train_dataloader.dataset.pipeline += steps
    assert follow_ignore_index(cfg) == 200
    *_, first, second, mosaic = cfg.train_dataloader.dataset.pipeline
    assert (first.pad_val, second.pad_val) == ({"img": 0, "seg": 200}, {"img": 114, "seg": 200})
    assert mosaic.seg_pad_val == 200


def test_reparam_touches_the_backbone_alone(trained, tmp_path, capsys):
    checkpoint = trained[0] / f"iter_{ITERATIONS}.pth"
    assert cli.main(["reparam", str(checkpoint), str(tmp_path / "fused.pth")]) == 0
    before, after = read_mm_checkpoint(checkpoint), read_mm_checkpoint(tmp_path / "fused.pth")
    heads = {key: value for key, value in before["state_dict"].items() if not key.startswith("backbone.")}
    for key, value in heads.items():
        torch.testing.assert_close(after["state_dict"][key], value, rtol=0, atol=0)
    assert not any(key.endswith("running_mean") for key in after["state_dict"] if key.startswith("backbone."))
    assert "optimizer" not in after
    assert "form='compact'" in after["meta"]["cfg"].replace('"', "'")
    assert (tmp_path / "fused.pth").stat().st_size < checkpoint.stat().st_size
    card = json.loads(after["wbmm"])
    assert (card["form"], card["source"]["file"]) == ("compact", checkpoint.name)
    assert cli.main(["reparam", str(checkpoint), str(tmp_path / "fused.safetensors")]) == 1
    assert "read .pth files" in capsys.readouterr().err
    assert cli.main(["reparam", str(checkpoint), str(tmp_path / "b.pth"), "--model", "wbmm_t"]) == 1
    assert "not wbmm_t" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["whole", "slide"])
def test_sizes(trained, config, mode):
    checkpoint = trained[0] / f"iter_{ITERATIONS}.pth"
    model, fused = build_segmentor(config, checkpoint), build_segmentor(config, checkpoint, fuse="compact")
    assert model.dataset_meta["classes"][:2] == ("wall", "building")
    for net in (model, fused):
        net.test_cfg.update(mode=mode, crop_size=(64, 64), stride=(43, 43))
    for size in [(64, 64), (57, 131), (33, 132), (20, 19)]:
        images = torch.randn(1, 3, *size)
        with torch.no_grad():
            a, b = (net.predict(images)[0] for net in (model, fused))
        assert a.pred_sem_seg.data.shape == (1, *size)
        torch.testing.assert_close(a.seg_logits.data, b.seg_logits.data, rtol=1e-3, atol=1e-3)


def test_a_released_segmentor_loads(trained, config, tmp_path):
    """Its names, around the weights of this run; a classifier's names for the head as mmseg has always had them."""
    state_dict = read_mm_checkpoint(trained[0] / f"iter_{ITERATIONS}.pth")["state_dict"]
    torch.save({"state_dict": released_names(state_dict), "meta": {"CLASSES": ["a"]}}, tmp_path / "released.pth")
    model = build_segmentor(config, tmp_path / "released.pth")
    torch.testing.assert_close(dict(model.state_dict()), dict(state_dict))
    assert model.dataset_meta == {"classes": ["a"]}


class TestErrors:
    """What the user can mend: one sentence, code 2."""

    def fails(self, capsys, config, work_dir, message, *options):
        assert train_tool("seg", [str(config), "--work-dir", str(work_dir), *options]) == 1
        text = capsys.readouterr().err.strip().splitlines()[-1]
        assert text.startswith(("train_seg: ", "train_det: "))
        assert message in text
        return text

    def test_data(self, data, tmp_path, capsys):
        root = tmp_path / "ade"
        shutil.copytree(data, root)
        config = write_config(tmp_path / "tiny.py", root)
        few = ["--cfg-options", "model.decode_head.num_classes=149", "model.auxiliary_head.num_classes=149"]
        self.fails(
            capsys, config, tmp_path / "a", "149 classes (decode_head.num_classes), the data set names 150", *few
        )
        label = root / "annotations" / "training" / "ADE_0003.png"
        Image.fromarray(np.full((8, 8), 151, np.uint8)).save(label)
        self.fails(
            capsys, config, tmp_path / "a", "ADE_0003.png: label 151 with num_classes=150; labels go from 1 (0 is"
        )
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(label)
        self.fails(capsys, config, tmp_path / "a", "is 128x128, its annotation")
        kept = {file: file.read_bytes() for file in label.parent.iterdir()}
        for file in kept:
            with Image.open(root / "images" / "training" / f"{file.stem}.jpg") as image:
                Image.new("L", image.size).save(file)
        self.fails(capsys, config, tmp_path / "a", "every pixel of the annotations in")
        for file, contents in kept.items():
            file.write_bytes(contents)
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(label)
        self.fails(capsys, config, tmp_path / "a", "one channel of labels; this one has the shape (8, 8, 3)")
        label.unlink()
        self.fails(capsys, config, tmp_path / "a", "1 of 8 images have no annotation; the first is")
        image = root / "images" / "training" / "ADE_0002.jpg"
        shutil.copy(root / "annotations" / "training" / "ADE_0004.png", label)
        image.rename(tmp_path / "away.jpg")
        self.fails(capsys, config, tmp_path / "a", "have no image ending with '.jpg'; the first is ADE_0002.png")
        (tmp_path / "away.jpg").rename(image)
        shutil.rmtree(root / "annotations" / "validation")
        label.write_bytes((root / "annotations" / "training" / "ADE_0006.png").read_bytes())
        self.fails(capsys, config, tmp_path / "a", "annotations/validation; set data_root")

    def test_names_and_lists(self, data, tmp_path, capsys):
        """With serialised data sets, as mmengine has them by default, which fail when they are empty."""
        root = tmp_path / "ade"
        shutil.copytree(data, root)
        config = write_config(tmp_path / "tiny.py", root)
        serialised = ["--cfg-options", "train_dataloader.dataset.serialize_data=True"]
        where = "train_dataloader.dataset.data_prefix"
        missing = [*serialised, f"{where}.img_path=none"]
        self.fails(capsys, config, tmp_path / "a", "none; set data_root, or dataset.data_prefix.img_path", *missing)
        (root / "list.txt").write_text("")
        empty = [*serialised, "train_dataloader.dataset.ann_file=list.txt"]
        self.fails(capsys, config, tmp_path / "a", "list.txt lists no image", *empty)
        nowhere = [*serialised, "train_dataloader.dataset.ann_file=no.txt"]
        self.fails(capsys, config, tmp_path / "a", "leave dataset.ann_file out", *nowhere)
        masks = [*serialised, f"{where}.img_path=annotations/training"]
        message = "no image ends with '.jpg' in"
        text = self.fails(capsys, config, tmp_path / "a", message, *masks)
        assert "(8 with '.png'): set dataset.img_suffix" in text
        for file in (root / "annotations" / "training").glob("*.png"):
            file.rename(file.with_suffix(".PNG"))
        text = self.fails(capsys, config, tmp_path / "a", "8 of 8 images have no annotation", *serialised)
        assert "(8 with '.PNG'): set dataset.seg_map_suffix, which minds capital letters" in text
        for file in (root / "images" / "training").glob("*.jpg"):
            file.unlink()
        self.fails(capsys, config, tmp_path / "a", "training; there are no files in it", *serialised)

    def test_data_to_be_tested_on(self, trained, data, tmp_path, capsys):
        root = tmp_path / "ade"
        shutil.copytree(data, root)
        config = write_config(tmp_path / "tiny.py", root)
        checkpoint = str(trained[0] / f"iter_{ITERATIONS}.pth")

        def fails(message, *options):
            argv = [str(config), checkpoint, "--work-dir", str(tmp_path / "a"), *options]
            assert evaluate_tool("seg", argv) == 1
            assert message in capsys.readouterr().err.strip().splitlines()[-1]

        fails("set data_root, or dataset.data_prefix.img_path", "--data-root", str(tmp_path / "no"))
        where = "test_dataloader.dataset"
        fails("no image ends with '.bmp' in", "--cfg-options", f"{where}.img_suffix=.bmp")
        fails("have no annotation; the first is", "--cfg-options", f"{where}.seg_map_suffix=.tif")
        label = next((root / "annotations" / "validation").glob("*.png"))
        Image.open(label).save(label.with_suffix(".jpg"))
        label.with_suffix(".jpg").rename(label)
        fails(f"{label.name} is a JPEG file, which changes labels near edges: masks must be PNG")

    def test_images(self, data, tmp_path, capsys, monkeypatch):
        root = tmp_path / "ade"
        shutil.copytree(data, root)
        config = write_config(tmp_path / "tiny.py", root)
        cut = root / "images" / "training" / "ADE_0001.jpg"
        cut.write_bytes(cut.read_bytes()[:-500])
        self.fails(capsys, config, tmp_path / "a", "ADE_0001.jpg is no readable image")
        monkeypatch.setattr("wbmm.mm.check_data.SAMPLE", 1)  # the first image alone
        options = ["--cfg-options", "train_cfg.max_iters=0"]
        assert train_tool("seg", [str(config), "--work-dir", str(tmp_path / "b"), *options]) == 0
        self.fails(capsys, config, tmp_path / "a", "ADE_0001.jpg is no readable image", "--check-all")
        for file in list(cut.parent.iterdir())[:4]:
            file.write_text("no picture")
        whole = cut.parent / "ADE_0000.jpg"
        shutil.copy(data / "images" / "training" / whole.name, whole)
        message = "cannot be loaded: --check-all reads all of them before training, and names it"
        self.fails(capsys, config, tmp_path / "c", message)

    def test_heads_and_channels(self, config, tmp_path, capsys):
        options = ["--cfg-options", "model.auxiliary_head.num_classes=149"]
        self.fails(capsys, config, tmp_path / "a", "num_classes is 150 in UPerHead and 149 in FCNHead", *options)
        options = ["--cfg-options", "model.backbone.in_chans=1"]
        self.fails(capsys, config, tmp_path / "a", "in_chans is 1, but LoadImageFromFile gives 3 channels", *options)
        options = ["--cfg-options", "model.decode_head.in_channels=(8,16,32,65)"]
        message = "model.decode_head.in_channels is (8, 16, 32, 65), but the backbone gives [8, 16, 32, 64]"
        self.fails(capsys, config, tmp_path / "a", message, *options)

    def test_settings_that_nothing_takes(self, trained, config, tmp_path, capsys):
        """They are mistakes in a configuration, not bugs of ours."""
        options = ["--cfg-options", "train_dataloader.batchsize=4"]
        message = (
            "tiny.py: DataLoader.__init__() got an unexpected keyword argument 'batchsize'; did you mean 'batch_size'"
        )
        self.fails(capsys, config, tmp_path / "a", message, *options)
        text = self.fails(
            capsys, config, tmp_path / "a", "UPerHeed", "--cfg-options", "model.decode_head.type=UPerHeed"
        )
        assert "registry" in text
        checkpoint = str(trained[0] / f"iter_{ITERATIONS}.pth")
        options = ["--cfg-options", "test_dataloader.dataset.test_mod=True"]
        assert evaluate_tool("seg", [str(config), checkpoint, "--work-dir", str(tmp_path / "b"), *options]) == 1
        assert "unexpected keyword argument 'test_mod'; did you mean 'test_mode'" in capsys.readouterr().err
        options = ["--cfg-options", "param_scheduler.1.end=1"]
        message = "PolyLR of param_scheduler begins at 1 and ends at 1: make training longer, or"
        self.fails(capsys, config, tmp_path / "a", message, *options)

    def test_memory_that_runs_out(self, config, tmp_path, capsys, monkeypatch):
        def fail(self):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        monkeypatch.setattr("mmengine.runner.Runner.train", fail)
        message = "too small for batches of 2 images: lower train_dataloader.batch_size, or the scale and crop size"
        text = self.fails(capsys, config, tmp_path / "a", message)
        assert text.endswith("or set model.backbone.with_cp=True")

    def test_labels_that_only_training_meets(self, data, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr("wbmm.mm.runner.check_segmentation_data", lambda *_, **__: None)
        root = tmp_path / "ade"
        shutil.copytree(data, root)
        for file in (root / "annotations" / "training").glob("*.png"):
            labels = np.array(Image.open(file))
            labels[60:] = 151
            Image.fromarray(labels).save(file)
        config = write_config(tmp_path / "tiny.py", root)
        self.fails(capsys, config, tmp_path / "a", "label 150 with num_classes=150; labels must be below it")

    def test_init_cfg(self, data, tmp_path, capsys):
        torch.save({"conv1.weight": torch.zeros(1)}, tmp_path / "other.pth")
        init = {"type": "Pretrained", "checkpoint": str(tmp_path / "other.pth")}
        config = write_config(tmp_path / "tiny.py", data, init=init)
        self.fails(capsys, config, tmp_path / "a", "the backbone's 258 tensors match; 90% must")
        config = write_config(tmp_path / "tiny.py", data)
        options = ["--cfg-options", "model.backbone.init_cfg.checkpoint=x"]
        self.fails(capsys, config, tmp_path / "a", "--cfg-options cannot be applied", *options)

    def test_load_from(self, trained, config, tmp_path, capsys):
        message = "load_from is nowhere.pth: there is no such file"
        self.fails(capsys, config, tmp_path / "a", message, "--cfg-options", "load_from=nowhere.pth")
        contents = read_mm_checkpoint(trained[0] / f"iter_{ITERATIONS}.pth")
        torch.save(MMCheckpoint(contents).fuse()[0], tmp_path / "fused.pth")
        options = ["--cfg-options", f"load_from={tmp_path / 'fused.pth'}"]
        self.fails(capsys, config, tmp_path / "a", "fused (compact form), from which no training can start", *options)
        inner = {k.removeprefix("backbone."): v for k, v in contents["state_dict"].items() if k.startswith("backbone.")}
        torch.save(inner, tmp_path / "classifier.pth")
        options = ["--cfg-options", f"load_from={tmp_path / 'classifier.pth'}"]
        self.fails(
            capsys, config, tmp_path / "a", "start the backbone from them with model.backbone.init_cfg", *options
        )

    def test_a_start_from_another_model(self, trained, data, config, tmp_path, capsys):
        file = trained[0] / f"iter_{INTERVAL}.pth"
        other = write_config(tmp_path / "other.py", data, dims=[8, 16, 32, 72])
        message = (
            "does not fit the configuration: backbone.stages.3.downsample.conv.weight is (64, 32, 3, 3) in the file"
        )
        self.fails(capsys, other, tmp_path / "a", message, "--resume", str(file))
        text = self.fails(capsys, other, tmp_path / "b", message, "--cfg-options", f"load_from={file}")
        assert text.endswith("name the file in model.backbone.init_cfg.checkpoint")
        own = build_segmentor(load_mm_config(config, {"model.decode_head.num_classes": 149})).state_dict()
        given = read_mm_checkpoint(file)["state_dict"]
        assert describe_misfit(own, given).startswith(
            "decode_head.conv_seg.weight is (150, 64, 1, 1) in the file and (149"
        )
        assert describe_misfit(own, given, CLASSIFIERS) == ""

    def test_checkpoints_that_do_not_fit(self, trained, config, tmp_path, capsys):
        checkpoint = trained[0] / f"iter_{ITERATIONS}.pth"
        options = ["--cfg-options", "model.auxiliary_head.channels=32"]
        assert evaluate_tool("seg", [str(config), str(checkpoint), "--work-dir", str(tmp_path), *options]) == 1
        assert "auxiliary_head.conv_seg.weight is (150, 64, 1, 1) in the file and (150, 32" in capsys.readouterr().err
        torch.save(MMCheckpoint(read_mm_checkpoint(checkpoint)).fuse()[0], tmp_path / "fused.pth")
        options = ["--resume", str(tmp_path / "fused.pth")]
        self.fails(
            capsys, config, tmp_path / "a", "no checkpoint of a run that could continue; it has no opt", *options
        )

    def test_files_that_are_not_there(self, config, tmp_path, capsys):
        self.fails(capsys, tmp_path / "no.py", tmp_path / "a", "there is no such configuration file")
        self.fails(capsys, config, tmp_path / "a", "there is no such file", "--resume", str(tmp_path / "no.pth"))
        assert evaluate_tool("seg", [str(config), str(tmp_path / "no.pth")]) == 1

    @pytest.mark.parametrize("door", ["resume", "load_from", "init_cfg", "test", "work_dir"])
    def test_a_malicious_pickle_never_runs(self, door, data, tmp_path, capsys):
        file = tmp_path / "iter_3.pth"
        torch.save({"meta": {"iter": 3}, "state_dict": Bomb(tmp_path / "pwned")}, file)
        init = {"type": "Pretrained", "checkpoint": str(file)} if door == "init_cfg" else None
        config = write_config(tmp_path / "tiny.py", data, init=init)
        argv = [str(config), "--work-dir", str(tmp_path if door == "work_dir" else tmp_path / "run")]
        argv += {
            "resume": ["--resume", str(file)],
            "load_from": ["--cfg-options", f"load_from={file}"],
            "test": [str(file)],
            "work_dir": ["--resume"],
        }.get(door, [])
        code = (evaluate_tool if door == "test" else train_tool)("seg", argv)
        text = "".join(capsys.readouterr())
        assert "refused, since it is not only tensors and plain data" in text
        assert code == (0 if door == "work_dir" else 1)  # there, it is passed over, and the run starts
        assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=/data/my photos/train", "/data/my photos/train"),
        ("a='/data/my photos'", "/data/my photos"),
        ("a=['my photos', 'b c']", ["my photos", "b c"]),
        ("a=(512, 512)", (512, 512)),
        ("a=1, 2,3", [1, 2, 3]),
        ("a=[x, y]", ["x", "y"]),
        ("a=0.5", 0.5),
        ("a=None", None),
        ("a=b=c", "b=c"),
    ],
)
def test_options_with_spaces(text, expected):
    parser = argparse.ArgumentParser()
    add_train_arguments(parser)
    assert parser.parse_args(["c.py", "--cfg-options", text, "z=1"]).cfg_options == {"a": expected, "z": 1}


def test_precision(config, tmp_path, monkeypatch):
    asked, said = [], []
    monkeypatch.setattr("wbmm.mm.runner.print_log", lambda text, **_: said.append(text))
    monkeypatch.setattr("wbmm.mm.runner.set_precision", asked.append)
    options = ["--cfg-options", "train_cfg.max_iters=0"]
    assert train_tool("seg", [str(config), "--work-dir", str(tmp_path / "a"), *options]) == 0
    assert train_tool("seg", [str(config), "--work-dir", str(tmp_path / "b"), "--precision", "ieee", *options]) == 0
    assert asked == ["tf32", "ieee"]
    assert any(text.startswith("precision: ieee (without effect on a CPU") for text in said)


@pytest.mark.parametrize("cuda", [True, False])
def test_processes_validate_with_the_same_statistics(cuda, config, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for launcher, expected in (("none", []), ("pytorch", [{"type": "BroadcastBuffersHook"}])):
        cfg = load_mm_config(config, {"launcher": launcher})
        prepare_device(cfg)
        assert cfg.get("custom_hooks", []) == expected


def test_without_mmcv(capsys, monkeypatch, config):
    import sys

    monkeypatch.setitem(sys.modules, "mmcv", None)
    assert train_tool("seg", [str(config)]) == 1
    text = capsys.readouterr().err
    assert text.startswith("train_seg: segmentation needs mmcv, which cannot be imported")
    assert "--no-build-isolation" in text
    assert text.count("\n") == 1


def test_fusing_a_whole_segmentor(config):
    model = build_segmentor(config)
    assert model.backbone.form == "training"
    assert wbmm.fuse(model, "dense").backbone.form == "dense"

"""Every configuration builds: model, optimiser groups, pipelines; and the sizes are the paper's."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("mmseg")

from mmengine.config import Config
from mmengine.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS, DefaultScope

import wbmm.mm.register  # noqa: F401
from tests.mm.helpers import on_meta
from wbmm.mm.networks import without_sync_bn
from wbmm.mm.runner import multi_scale_pipeline

ROOT = Path(__file__).parents[2]
# Parameters in M, the paper's and measured in training form. By our arithmetic the hierarchical tables add 2.0 and 2.4;
# UniRepLKNet-S has 0.8 more than when fused, which the paper counts; for ConvNeXt it gives none.
PARAMETERS = {
    "wbmm-t-dense": (62, 61.8),
    "wbmm-s-dense": (87, 87.4),
    "wbmm-t-hier": (66, 63.8),
    "wbmm-s-hier": (92, 89.7),
    "unireplknet-t": (62, 62.4),
    "unireplknet-s": (87, 88.1),
    "convnext-t": (None, 60.2),
    "convnext-t-wbmm": (None, 60.7),
}
EXPLAINED = ("wbmm-t-hier", "wbmm-s-hier", "unireplknet-s", "convnext-t", "convnext-t-wbmm")
# The backbone's name in timm, where the file's is short; the rate of layer decay and its last group.
ARCHITECTURES = {"convnext-t": "convnext_tiny", "convnext-t-wbmm": "convnext_tiny_wbmm"}
LAYER_DECAY = {"wbmm-t": (1.0, 9), "wbmm-s": (0.9, 12), "unireplknet-t": (1.0, 9), "unireplknet-s": (0.9, 12)}
LAYER_DECAY["convnext-t"] = (0.9, 6)
SEGMENTATION = sorted((ROOT / "configs" / "ade20k").glob("*.py"))
# Whole detectors in M, the paper's and measured in training form; the differences are those of segmentors.
DETECTORS = {
    "wbmm-t-dense": (89, 88.5),
    "wbmm-s-dense": (113, 113.1),
    "wbmm-t-hier": (92, 90.5),
    "wbmm-s-hier": (118, 115.4),
    "unireplknet-t": (89, 89.1),
    "unireplknet-s": (113, 113.8),
    "convnext-t": (None, 85.9),
    "convnext-t-wbmm": (None, 86.4),
}
DETECTION = sorted((ROOT / "configs" / "coco").glob("*.py"))


def build_on_meta(cfg):
    with DefaultScope.overwrite_default_scope(cfg.default_scope), on_meta():
        return MODELS.build(cfg.model)


def groups_of(cfg, model):
    options = cfg.optim_wrapper.copy()
    constructor, paramwise = options.pop("constructor"), options.pop("paramwise_cfg")
    config = {"type": constructor, "optim_wrapper_cfg": options, "paramwise_cfg": paramwise}
    return OPTIM_WRAPPER_CONSTRUCTORS.build(config)(model).optimizer.param_groups


def test_there_are_some():
    assert len(SEGMENTATION) == 8
    assert len(DETECTION) == 10


def test_the_zoo_lists_them():
    readme = (ROOT / "models" / "README.md").read_text()
    listed = set(re.findall(r"\(\.\./(configs/[^)]+\.py)\)", readme))
    assert listed == {str(p.relative_to(ROOT)) for p in SEGMENTATION + DETECTION}


@pytest.mark.parametrize("path", SEGMENTATION, ids=lambda path: path.stem)
def test_segmentation(path):
    from mmcv.transforms import Compose

    cfg = Config.fromfile(path)
    arch, head, schedule, data = path.stem.split("_")
    assert cfg.model.backbone.arch == ARCHITECTURES.get(arch, arch.replace("-", "_"))
    assert head == "upernet"
    model = build_on_meta(cfg)
    assert any(type(module).__name__ == "SyncBatchNorm" for module in model.decode_head.modules())
    assert model.decode_head.num_classes == 150
    paper, measured = PARAMETERS[arch]
    count = sum(p.numel() for p in model.parameters()) / 1e6
    assert round(count, 1) == measured
    assert arch in EXPLAINED or round(count) == paper
    batch, iterations = schedule.split("xb")[1].split("-")
    assert cfg.train_dataloader.batch_size == int(batch)
    assert cfg.train_cfg.max_iters == int(iterations.removesuffix("k")) * 1000 == cfg.param_scheduler[-1].end
    assert "x".join(map(str, cfg.crop_size)) == data.split("-")[1]
    groups = groups_of(cfg, model)
    rate, last = LAYER_DECAY["-".join(arch.split("-")[:2])]
    assert {g["layer"] for g in groups} == set(range(last + 2))
    assert min(g["lr_scale"] for g in groups) == pytest.approx(rate ** (last + 1))
    with DefaultScope.overwrite_default_scope("mmseg"):
        for pipeline in (cfg.train_pipeline, cfg.test_pipeline, multi_scale_pipeline(cfg)[0]):
            assert Compose(pipeline).transforms


@pytest.mark.parametrize("path", DETECTION, ids=lambda path: path.stem)
def test_detection(path):
    pytest.importorskip("mmdet")
    from mmcv.transforms import Compose

    cfg = Config.fromfile(path)
    arch, head, schedule, _ = path.stem.split("_")
    cascade = head == "cascade-mask-rcnn"
    assert cfg.model.backbone.arch == ARCHITECTURES.get(arch, arch.replace("-", "_"))
    model = build_on_meta(cfg)
    boxes = list(model.roi_head.bbox_head) if cascade else [model.roi_head.bbox_head]
    assert len(boxes) == (3 if cascade else 1)
    assert {part.num_classes for part in boxes} == {80}
    assert cfg.model.backbone.with_cp == (arch != "wbmm-a")
    if cascade:
        paper, measured = DETECTORS[arch]
        count = sum(p.numel() for p in model.parameters()) / 1e6
        assert round(count, 1) == measured
        assert arch in EXPLAINED or round(count) == paper
        for part in boxes:
            kinds = [type(module).__name__ for module in part.modules()]
            assert kinds.count("SyncBatchNorm") == len(part.shared_convs) == 4
            assert [layer.out_features for layer in part.shared_fcs] == [1024]
        assert [stage.assigner.pos_iou_thr for stage in cfg.model.train_cfg.rcnn] == [0.5, 0.6, 0.7]
        assert [part.bbox_coder.stds[3] for part in boxes] == [0.2, 0.1, 0.067]
        assert all(part.reg_decoded_bbox and not part.reg_class_agnostic for part in boxes)
        assert {(type(part.loss_bbox).__name__, part.loss_bbox.loss_weight) for part in boxes} == {("GIoULoss", 10.0)}
        drop_path = {"wbmm-t": 0.3, "wbmm-s": 0.5, "unireplknet-t": 0.3, "unireplknet-s": 0.5, "convnext-t": 0.4}
        assert cfg.model.backbone.drop_path_rate == drop_path["-".join(arch.split("-")[:2])]
    per_gpu, length = schedule.split("xb")[1].split("-")
    assert cfg.train_dataloader.batch_size == int(per_gpu)
    epochs = {"3x": 36, "1x": 12}[length]
    assert cfg.train_cfg.max_epochs == epochs == cfg.param_scheduler[-1].end
    assert cfg.param_scheduler[-1].milestones == ([27, 33] if epochs == 36 else [8, 11])
    groups = groups_of(cfg, model)
    last = 5 if arch == "wbmm-a" else 6 if arch.startswith("convnext") else 12
    rate = 0.7 if arch.startswith("convnext") else 0.8
    assert max(g["layer"] for g in groups) == last + 1
    assert min(g["lr_scale"] for g in groups) == pytest.approx(rate ** (last + 1))
    assert cfg.val_evaluator.ann_file == cfg.val_dataloader.dataset.data_root + cfg.val_dataloader.dataset.ann_file
    with DefaultScope.overwrite_default_scope("mmdet"):
        for pipeline in (cfg.train_dataloader.dataset.pipeline, cfg.test_dataloader.dataset.pipeline):
            assert Compose(pipeline).transforms
    optimizer = cfg.optim_wrapper.optimizer
    lr = {"convnext-t_c": 2e-4, "convnext-t-w": 2e-4}.get(path.stem[:12], 1e-4)
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ("AdamW", lr, 0.05)
    augmentation = [step.type for step in cfg.train_dataloader.dataset.pipeline]
    assert ("RandomChoice" in augmentation) == cascade
    if cascade:
        whole, cropped = cfg.train_dataloader.dataset.pipeline[augmentation.index("RandomChoice")].transforms
        sides = [min(scale) for scale in whole[0].scales]
        assert (min(sides), max(sides), len(sides)) == (480, 800, 11)
        assert {max(scale) for step in (whole[0], *cropped[::2]) for scale in step.scales} == {1333}
        assert cropped[1].crop_size == (384, 600)


@pytest.mark.parametrize("path", SEGMENTATION + DETECTION, ids=lambda path: path.stem)
def test_gradients_are_bounded(path):
    assert Config.fromfile(path).optim_wrapper.clip_grad == {"max_norm": 35}


def test_sync_bn_becomes_bn_in_place():
    cfg = Config.fromfile(SEGMENTATION[0])
    without_sync_bn(cfg.model)
    model = build_on_meta(cfg)
    assert not any(type(module).__name__ == "SyncBatchNorm" for module in model.modules())


def test_tracking_and_amp_options(monkeypatch):
    from wbmm.mm.runner import track, use_amp

    cfg = Config.fromfile(SEGMENTATION[0])
    track(cfg, ["tensorboard", "wandb"])
    track(cfg, ["wandb"])
    kinds = [backend.type for backend in cfg.visualizer.vis_backends]
    assert kinds == ["LocalVisBackend", "TensorboardVisBackend", "WandbVisBackend"]
    with pytest.raises(ValueError, match="--amp needs a CUDA device"):
        use_amp(cfg)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    use_amp(cfg)
    assert cfg.optim_wrapper.type == "AmpOptimWrapper"
    assert cfg.optim_wrapper.loss_scale == "dynamic"


def test_the_data_can_be_elsewhere():
    from wbmm.mm.runner import set_data_root

    cfg = Config.fromfile(SEGMENTATION[-1])
    set_data_root(cfg, "/data/ade")
    assert {cfg[f"{part}_dataloader"].dataset.data_root for part in ("train", "val", "test")} == {"/data/ade"}
    dataset = {"data_root": "coco", "ann_file": "a.json"}
    cfg = Config(
        {
            "train_dataloader": {"dataset": {"type": "RepeatDataset", "dataset": dataset}},
            "val_dataloader": {"dataset": dataset},
            "val_evaluator": [{"type": "CocoMetric", "ann_file": "coco/annotations/a.json"}],
        }
    )
    set_data_root(cfg, "/data/coco")
    assert cfg.train_dataloader.dataset.dataset.data_root == "/data/coco"
    assert cfg.val_evaluator[0].ann_file == "/data/coco/annotations/a.json"


def test_keys_that_are_nearly_known():
    from wbmm.mm.runner import check_keys

    for path in SEGMENTATION + DETECTION:
        check_keys(Config.fromfile(path))
    for wrong, right in {"optim_wraper": "optim_wrapper", "train_dataloder": "train_dataloader"}.items():
        cfg = Config.fromfile(SEGMENTATION[0])
        cfg[wrong] = {}
        with pytest.raises(ValueError, match=f"unknown key '{wrong}'; did you mean '{right}'"):
            check_keys(cfg)

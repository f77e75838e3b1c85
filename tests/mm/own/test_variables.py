"""Configurations that follow a few variables, from any folder."""

from pathlib import Path

import pytest

pytest.importorskip("mmseg")

from mmengine.config import Config

from wbmm.mm.networks import build_mm_model, load_mm_config, settings_explained

CONFIGS = Path(__file__).parents[3] / "configs"


def test_a_copied_file_works_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = '_base_ = "wbmm::own/upernet.py"\narch = "wbmm_a_dense"\nclasses = ("a", "b", "c")\ncrop = (64, 96)\n'
    (tmp_path / "mine.py").write_text(text + "scale = (320, 240)\n")
    cfg = load_mm_config("mine.py", {"lr": 1e-3})
    assert cfg.model.decode_head.in_channels == [40, 80, 160, 320]
    assert cfg.model.auxiliary_head.in_channels == 160
    assert cfg.model.decode_head.num_classes == cfg.model.auxiliary_head.num_classes == 3
    assert cfg.model.data_preprocessor.size == (64, 96)
    assert cfg.train_dataloader.dataset.pipeline[3].crop_size == (64, 96)
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        resize = next(step for step in loader.dataset.pipeline if "Resize" in step.type)
        assert resize.scale == (320, 240)
        assert len(loader.dataset.metainfo.palette) == 3
    assert cfg.optim_wrapper.optimizer.lr == 1e-3
    assert cfg.model.backbone.init_cfg is None
    cfg = load_mm_config("mine.py", {"init": "weights.pt", "resize_tables": True})
    assert cfg.model.backbone.init_cfg == {"type": "Pretrained", "checkpoint": "weights.pt", "resize_tables": True}
    assert "$" not in str(cfg._cfg_dict)


def test_the_backbone_is_timms_where_it_is_not_ours():
    cfg = load_mm_config("own/mask_rcnn", {"arch": "convnext_atto", "width": 32})
    assert (cfg.model.backbone.type, cfg.model.neck.in_channels) == ("TimmBackbone", [40, 80, 160, 320])
    assert cfg.model.neck.out_channels == cfg.model.roi_head.bbox_head.in_channels == 32
    assert cfg.val_evaluator.ann_file == "data/custom/annotations/val.json"


def test_one_head_is_all_heads_of_a_cascade(tmp_path):
    text = '_base_ = "wbmm::own/cascade_mask_rcnn.py"\nclasses = ("a", "b")\n'
    (tmp_path / "mine.py").write_text(text + "model = dict(roi_head=dict(bbox_head=dict(num_shared_fcs=2)))\n")
    cfg = load_mm_config(tmp_path / "mine.py")
    heads = cfg.model.roi_head.bbox_head
    assert [head.num_shared_fcs for head in heads] == [2, 2, 2]
    assert [head.num_classes for head in heads] == [2, 2, 2]
    paper = Config.fromfile(CONFIGS / "coco" / "wbmm-t-dense_cascade-mask-rcnn_8xb2-3x_coco.py").model
    assert [h.bbox_coder for h in heads] == [h.bbox_coder for h in paper.roi_head.bbox_head]
    assert [part.assigner for part in cfg.model.train_cfg.rcnn] == [part.assigner for part in paper.train_cfg.rcnn]


def test_a_name_that_is_no_variable(tmp_path):
    (tmp_path / "mine.py").write_text('_base_ = "wbmm::own/upernet.py"\nlr = "$learning_rate"\n')
    with pytest.raises(ValueError, match=r"mine.py: '\$learning_rate' names no variable"):
        load_mm_config(tmp_path / "mine.py")
    (tmp_path / "mine.py").write_text('_base_ = "wbmm::own/upernett.py"\n')
    with pytest.raises(ValueError, match="did you mean own/upernet"):
        load_mm_config(tmp_path / "mine.py")


def test_names_that_nothing_reads(tmp_path):
    """A misspelt variable would be ignored in silence."""
    base = '_base_ = "wbmm::own/upernet.py"\n'
    (tmp_path / "mine.py").write_text(f"{base}bach_size = 4\n")
    with pytest.raises(ValueError, match=r"mine\.py: nothing reads 'bach_size'; did you mean 'batch_size'"):
        load_mm_config(tmp_path / "mine.py")
    (tmp_path / "mine.py").write_text(f"{base}half = 32\ncrop = (2 * half, 2 * half)\n")
    assert load_mm_config(tmp_path / "mine.py").model.data_preprocessor.size == (64, 64)
    with pytest.raises(ValueError, match=r"--cfg-options crops: nothing in .*mine\.py reads it; did you mean 'crop'"):
        load_mm_config(tmp_path / "mine.py", {"crops": (32, 32)})
    allowed = {"randomness": {"seed": 1}, "num_classes": 3, "model.backbone.with_cp": True}
    assert load_mm_config(tmp_path / "mine.py", allowed).model.decode_head.num_classes == 3
    with pytest.raises(ValueError, match=r"--cfg-options seed: nothing in .* reads it"):
        load_mm_config(CONFIGS / "coco" / "wbmm-a_mask-rcnn_8xb2-1x_coco.py", {"seed": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 640}, "scale is 640; expected two whole numbers, such as"),
        ({"crop": (64, 0)}, "crop is .64, 0.; expected two whole numbers"),
        ({"lr": "fast"}, "lr is 'fast'; expected a number from 0"),
        ({"max_iters": "many"}, "max_iters is 'many'; expected a whole number from 1"),
        ({"val_interval": 0}, "val_interval is 0; expected a whole number from 1"),
        ({"workers": -1}, "workers is -1; expected a whole number from 0"),
    ],
)
def test_values_of_another_kind(options, message):
    with pytest.raises(ValueError, match=message):
        load_mm_config("own/upernet", options)


def test_what_a_class_asserts_of_its_settings():
    pytest.importorskip("mmdet")
    cfg = load_mm_config("own/mask_rcnn", {"arch": "wbmm_a", "model.neck.in_channels": (40, 80, 160, 320)})
    message = r"mask_rcnn\.py: fpn does not take its settings: assert isinstance\(in_channels, list\)"
    with pytest.raises(ValueError, match=message), settings_explained(cfg):
        build_mm_model(cfg, "mmdet")


def test_lists_become_pairs():
    """Without brackets --cfg-options gives lists, which RandomResize does not take."""
    cfg = load_mm_config("own/upernet", {"scale": [640, 480], "crop": [64, 96]})
    assert cfg.train_dataloader.dataset.pipeline[2].scale == (640, 480)
    assert cfg.model.data_preprocessor.size == (64, 96)


def test_one_class_without_its_comma():
    with pytest.raises(ValueError, match=r"classes is the text 'road': write a tuple of names, \('road',\) for one"):
        load_mm_config("own/upernet", {"classes": "road"})


def test_others_are_left_alone():
    path = CONFIGS / "ade20k" / "wbmm-t-dense_upernet_8xb2-160k_ade20k-512x512.py"
    assert load_mm_config(path)._cfg_dict == Config.fromfile(path)._cfg_dict


@pytest.mark.parametrize("path", sorted(Path(p) for d in ("camvid", "pennfudan") for p in CONFIGS.glob(f"{d}/*.py")),
                         ids=lambda path: path.stem)  # fmt: skip
def test_small_configurations_build(path):
    scope = "mmseg" if path.parent.name == "camvid" else "mmdet"
    pytest.importorskip(scope)
    cfg = load_mm_config(path)
    assert cfg.model.backbone.init_cfg.type == "Pretrained"
    model = build_mm_model(cfg, scope)
    assert sum(parameter.numel() for parameter in model.parameters()) < 12e6
    if scope == "mmseg":
        assert cfg.test_dataloader.dataset.data_prefix.img_path == "images/test"
        assert cfg.val_dataloader.dataset.data_prefix.img_path == "images/val"
        assert model.decode_head.ignore_index == 255, "it follows the data set's when training starts"

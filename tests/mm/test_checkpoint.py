"""Checkpoints of segmentors and detectors: recognised in every form, and fused with their heads untouched."""

import pytest
import torch

import wbmm
from tests.mm.helpers import NARROW, backbone, checkpoint, released_dense_backbone
from wbmm.mm.backbone import WBMMBackbone
from wbmm.mm.reparam import backbone_config, build_backbone, compare_mm, fuse_mm_checkpoint, is_mm_checkpoint
from wbmm.models.state import CheckpointError

CFG = "model = dict(backbone=dict(arch='wbmm_a_hier', dims=(8, 16, 32, 64), {} type='WBMMBackbone'), type='X')\n"


def test_what_is_one(tmp_path):
    model = backbone()
    assert is_mm_checkpoint(checkpoint(model))
    assert is_mm_checkpoint(checkpoint(model)["state_dict"])
    assert is_mm_checkpoint(checkpoint(wbmm.fuse(model)))
    assert is_mm_checkpoint(checkpoint(wbmm.fuse(model, "dense")))
    released = {f"backbone.{k}": v for k, v in released_dense_backbone("wbmm_t_dense").items()}
    assert is_mm_checkpoint({"state_dict": released, "meta": {}})
    assert not is_mm_checkpoint(model.state_dict())
    assert not is_mm_checkpoint({"state_dict": {"backbone.conv1.weight": torch.zeros(1)}})
    assert not is_mm_checkpoint({"epoch": 3})
    assert not is_mm_checkpoint([1, 2])


@pytest.mark.parametrize("form", ["compact", "dense"])
@pytest.mark.parametrize("cfg", [None, CFG.format("")])
def test_fusing(form, cfg):
    contents = checkpoint(backbone(), **({"cfg": cfg} if cfg else {}), iter=7)
    before = {key: value.clone() for key, value in contents["state_dict"].items()}
    fused, report = fuse_mm_checkpoint(contents, form)
    assert compare_mm(contents, fused, torch.randn(2, 3, 50, 70)) < 1e-4
    assert report.form == form
    assert report.dropped == ("message_hub", "optimizer")
    assert report.elements[0] > 0
    assert "channels (8, 16, 32, 64)" in report.model
    assert fused["meta"]["iter"] == 7
    head = "decode_head.conv_seg.weight"
    torch.testing.assert_close(fused["state_dict"][head], before[head])
    torch.testing.assert_close(contents["state_dict"], before)  # untouched
    if cfg:
        assert f"form='{form}'" in fused["meta"]["cfg"]
        assert "form=" not in contents["meta"]["cfg"]
    target = torch.nn.ModuleDict({"backbone": WBMMBackbone(**NARROW, form=form)})
    target.load_state_dict({k: v for k, v in fused["state_dict"].items() if k != head})
    assert is_mm_checkpoint(fused)
    assert backbone_config(fused)["form"] == form


def test_fusing_again():
    compact, _ = fuse_mm_checkpoint(checkpoint(backbone()))
    again, _ = fuse_mm_checkpoint(compact)
    torch.testing.assert_close(again["state_dict"], compact["state_dict"])
    dense, _ = fuse_mm_checkpoint(compact, "dense")
    assert compare_mm(compact, dense, torch.randn(1, 3, 32, 32)) < 1e-5
    with pytest.raises(ValueError, match="tables cannot be recovered"):
        fuse_mm_checkpoint(dense, "compact")


def test_a_released_one():
    released = {f"backbone.{k}": v for k, v in released_dense_backbone("wbmm_t_dense").items()}
    released["decode_head.conv_seg.bias"] = torch.ones(150)
    assert backbone_config(released) == {
        "arch": "wbmm_t_dense",
        "out_indices": (0, 1, 2, 3),
        "in_chans": 3,
        "form": "training",
    }
    fused, report = fuse_mm_checkpoint({"state_dict": released})
    assert report.model.startswith("wbmm_t_dense (training form")
    assert report.elements[1] < report.elements[0]
    assert compare_mm({"state_dict": released}, fused, torch.randn(1, 3, 40, 64)) < 1e-4


def test_what_only_the_configuration_tells():
    options = {"padding_mode": "replicate", "window_size": ((7, 14), (7, 14), 7, 7)}
    model = backbone(arch="wbmm_a_dense", **options)
    text = CFG.replace("a_hier", "a_dense").format("padding_mode='replicate', window_size=((7, 14), (7, 14), 7, 7),")
    fused, _ = fuse_mm_checkpoint(checkpoint(model, cfg=text))
    x = torch.randn(1, 3, 60, 60)
    with torch.no_grad():
        for a, b in zip(build_backbone(fused)(x), model(x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_fewer_maps():
    contents = checkpoint(backbone(out_indices=(1, 3)))
    assert backbone_config(contents)["out_indices"] == (1, 3)
    fused, _ = fuse_mm_checkpoint(contents)
    assert compare_mm(contents, fused, torch.randn(1, 3, 32, 32)) < 1e-4


def test_errors():
    with pytest.raises(CheckpointError, match="no segmentor or detector on a WBMM backbone: its keys are a, "):
        fuse_mm_checkpoint({"a": torch.zeros(1)})
    wrong = checkpoint(backbone(), cfg=CFG.format("").replace("hier", "dense"))
    with pytest.raises(CheckpointError, match="does not fit the configuration inside the checkpoint"):
        fuse_mm_checkpoint(wrong)
    missing = checkpoint(backbone())
    del missing["state_dict"]["backbone.stages.0.blocks.0.gamma"]
    with pytest.raises(CheckpointError, match="gamma"):
        fuse_mm_checkpoint(missing)
    with pytest.raises(ValueError, match="form 'int8'"):
        fuse_mm_checkpoint(checkpoint(backbone()), "int8")

"""Checkpoints of segmentors and detectors: recognised in every form, and fused with their heads untouched."""

import pytest
import torch

import wbmm
from tests.mm.helpers import NARROW, backbone, checkpoint, count_reads, largest_difference, released_dense_backbone
from wbmm import cli
from wbmm.io.reader import safe_load
from wbmm.mm.backbone import WBMMBackbone
from wbmm.mm.mm_checkpoint import MMCheckpoint
from wbmm.models import state
from wbmm.models.state import CheckpointError

CFG = "model = dict(backbone=dict(arch='wbmm_a_hier', dims=(8, 16, 32, 64), {} type='WBMMBackbone'), type='X')\n"


def test_what_is_one(tmp_path):
    model = backbone()
    assert MMCheckpoint(checkpoint(model)).signature is not None
    assert MMCheckpoint(checkpoint(model)["state_dict"]).signature is not None
    assert MMCheckpoint(checkpoint(wbmm.fuse(model))).signature is not None
    assert MMCheckpoint(checkpoint(wbmm.fuse(model, "dense"))).signature is not None
    weights = {f"backbone.{k}": v for k, v in released_dense_backbone("wbmm_t_dense").items()}
    assert MMCheckpoint({"state_dict": weights, "meta": {}}).signature is not None
    assert MMCheckpoint(model.state_dict()).signature is None
    assert MMCheckpoint({"state_dict": {"backbone.conv1.weight": torch.zeros(1)}}).signature is None
    for nothing in ({"epoch": 3}, [1, 2]):
        with pytest.raises(CheckpointError, match="no state dict found"):
            MMCheckpoint(nothing)


@pytest.mark.parametrize("form", ["compact", "dense"])
@pytest.mark.parametrize("cfg", [None, CFG.format("")])
def test_fusing(form, cfg):
    contents = checkpoint(backbone(), **({"cfg": cfg} if cfg else {}), iter=7)
    before = {key: value.clone() for key, value in contents["state_dict"].items()}
    fused, report = MMCheckpoint(contents).fuse(form)
    assert largest_difference(contents, fused, torch.randn(2, 3, 50, 70)) < 1e-4
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
    assert MMCheckpoint(fused).signature is not None
    assert MMCheckpoint(fused).backbone_config["form"] == form


def test_fusing_again():
    compact, _ = MMCheckpoint(checkpoint(backbone())).fuse()
    again, _ = MMCheckpoint(compact).fuse()
    torch.testing.assert_close(again["state_dict"], compact["state_dict"])
    dense, _ = MMCheckpoint(compact).fuse("dense")
    assert largest_difference(compact, dense, torch.randn(1, 3, 32, 32)) < 1e-5
    with pytest.raises(ValueError, match="tables cannot be recovered"):
        MMCheckpoint(dense).fuse("compact")


def test_a_released_one():
    weights = {f"backbone.{k}": v for k, v in released_dense_backbone("wbmm_t_dense").items()}
    weights["decode_head.conv_seg.bias"] = torch.ones(150)
    assert MMCheckpoint(weights).backbone_config == {
        "arch": "wbmm_t_dense",
        "out_indices": (0, 1, 2, 3),
        "in_chans": 3,
        "form": "training",
    }
    fused, report = MMCheckpoint({"state_dict": weights}).fuse()
    assert report.model.startswith("wbmm_t_dense (training form")
    assert report.elements[1] < report.elements[0]
    assert largest_difference({"state_dict": weights}, fused, torch.randn(1, 3, 40, 64)) < 1e-4


def test_what_only_the_configuration_tells():
    options = {"padding_mode": "replicate", "window_size": ((7, 14), (7, 14), 7, 7)}
    model = backbone(arch="wbmm_a_dense", **options)
    text = CFG.replace("a_hier", "a_dense").format("padding_mode='replicate', window_size=((7, 14), (7, 14), 7, 7),")
    fused, _ = MMCheckpoint(checkpoint(model, cfg=text)).fuse()
    x = torch.randn(1, 3, 60, 60)
    with torch.no_grad():
        for a, b in zip(MMCheckpoint(fused).backbone(x), model(x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_fewer_maps():
    contents = checkpoint(backbone(out_indices=(1, 3)))
    assert MMCheckpoint(contents).backbone_config["out_indices"] == (1, 3)
    fused, _ = MMCheckpoint(contents).fuse()
    assert largest_difference(contents, fused, torch.randn(1, 3, 32, 32)) < 1e-4


def test_errors():
    with pytest.raises(CheckpointError, match="no segmentor or detector on a WBMM backbone: its keys are a, "):
        MMCheckpoint({"a": torch.zeros(1)}).fuse()
    wrong = checkpoint(backbone(), cfg=CFG.format("").replace("hier", "dense"))
    with pytest.raises(CheckpointError, match="does not fit the configuration inside the checkpoint"):
        MMCheckpoint(wrong).fuse()
    missing = checkpoint(backbone())
    del missing["state_dict"]["backbone.stages.0.blocks.0.gamma"]
    with pytest.raises(CheckpointError, match="gamma"):
        MMCheckpoint(missing).fuse()
    with pytest.raises(ValueError, match="form 'int8'"):
        MMCheckpoint(checkpoint(backbone())).fuse("int8")


def test_reparam_reads_a_file_once_and_converts_its_names_once(tmp_path, monkeypatch, capsys):
    inner = released_dense_backbone("wbmm_t_dense")
    torch.save({"state_dict": {f"backbone.{key}": value for key, value in inner.items()}}, tmp_path / "released.pth")
    converted, original = [], state._rename
    monkeypatch.setattr(state, "_rename", lambda *args: converted.append(args[0]) or original(*args))
    reads = count_reads(monkeypatch)
    assert cli.main(["reparam", str(tmp_path / "released.pth"), str(tmp_path / "fused.pth"), "--check"]) == 0
    assert reads == ["released.pth"]
    assert len(converted) == sum(not key.endswith("relative_position_index") for key in inner)
    capsys.readouterr()
    contents = torch.load(tmp_path / "fused.pth")
    contents["state_dict"]["backbone.stem.conv1.bias"] += 1  # as if a bit had flipped
    torch.save(contents, tmp_path / "changed.pth")
    with pytest.raises(CheckpointError, match="damaged"):
        safe_load(tmp_path / "changed.pth")

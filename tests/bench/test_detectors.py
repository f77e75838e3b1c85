"""`wbmm bench det`: the cost of a whole detector, beside the paper's."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("mmdet")

from mmdet.registry import MODELS
from mmdet.utils import register_all_modules
from mmengine.config import Config

from wbmm import cli
from wbmm.bench.detectors import PAPER, OnGivenRois, build, count

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("letter", "name"), [key for key in PAPER if key[0] == "t"])
def test_the_papers_flops(letter, name):
    params, fused, macs = count(build(name, letter))
    assert fused < params
    assert macs[""] / 1e9 == pytest.approx(PAPER[letter, name][1], abs=1)
    assert macs[""] == sum(value for part, value in macs.items() if part)
    if name != "hier":  # its tables add 2.0 M by our count, where the paper adds 3
        assert round(params / 1e6) == PAPER[letter, name][0]


def test_what_is_counted_is_what_the_configuration_builds():
    """Nothing is left out of the configuration's model, and nothing added to it: parameters agree, name by name."""
    from tests.mm.test_configs import build_on_meta

    path = ROOT / "configs" / "coco" / "wbmm-t-dense_cascade-mask-rcnn_8xb2-3x_coco.py"
    configured = build_on_meta(Config.fromfile(path)).state_dict()
    counted = build("7x7", "t").state_dict()
    renamed = {key.removeprefix("roi_head."): value.shape for key, value in configured.items()}
    assert renamed == {key: value.shape for key, value in counted.items()}


def test_the_command(capsys):
    assert (
        cli.main(["bench", "det", "--cost", "--models", "t", "--backbones", "7x7", "--sizes", "96x128", "--markdown"])
        == 0
    )
    out = capsys.readouterr().out
    assert "| 7x7, T" in out
    assert "| --" in out, "no figure of the paper at another size"
    assert cli.main(["bench", "det", "--cost", "--sizes", "8x8"]) == 1
    assert "at least 32" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rois_in_every_type(dtype):
    """mmcv has no RoIAlign in bfloat16: it runs in float32, and heads get the type of the net."""
    register_all_modules(init_default_scope=False)
    seen = []

    def extractor(side):
        layer = {"type": "RoIAlign", "output_size": side, "sampling_ratio": 0}
        kind = {"type": "SingleRoIExtractor", "out_channels": 2, "featmap_strides": [4]}
        return MODELS.build(kind | {"roi_layer": layer})

    heads = SimpleNamespace(
        bbox_head=[seen.append],
        mask_head=[seen.append],
        bbox_roi_extractor=[extractor(7)],
        mask_roi_extractor=[extractor(14)],
    )
    part = SimpleNamespace(max_per_img=3)
    detector = SimpleNamespace(
        test_cfg={"rpn": part, "rcnn": part},
        backbone=lambda images: [images[:, :2, ::4, ::4]],
        neck=lambda maps: maps,
        rpn_head=lambda maps: None,
        roi_head=heads,
    )
    images = torch.randn(2, 3, 64, 64)
    OnGivenRois(detector)(images.to(dtype))
    assert [tuple(part.shape) for part in seen] == [(6, 2, 7, 7), (6, 2, 14, 14)]
    assert {part.dtype for part in seen} == {dtype}
    OnGivenRois(detector)(images)
    for one, two in zip(seen[:2], seen[2:], strict=True):
        torch.testing.assert_close(one.float(), two, rtol=0.02, atol=0.02)

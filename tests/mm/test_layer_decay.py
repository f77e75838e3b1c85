"""The layer-decay constructor against the table of the design, for T and S, in mmseg and mmdet alike."""

import pytest
import torch.nn as nn

pytest.importorskip("mmengine")

from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS

import wbmm.mm.register  # noqa: F401
from tests.mm.helpers import NARROW, on_meta
from wbmm.mm.backbone import WBMMBackbone

# name -> group for T (9 groups, 18 blocks in stage 3) and for S (12 groups, 27 blocks), written out by hand.
TABLE = {
    "stem.conv1.weight": (0, 0),
    "stem.norm2.bias": (0, 0),
    "stages.0.blocks.0.mixer.table": (1, 1),
    "stages.0.blocks.2.ffn.fc2.weight": (1, 1),
    "stages.1.downsample.conv.weight": (2, 2),
    "stages.1.blocks.1.gamma": (2, 2),
    "stages.2.downsample.norm.weight": (3, 3),
    "stages.2.blocks.0.norm.weight": (3, 3),
    "stages.2.blocks.2.ffn.fc1.weight": (3, 3),
    "stages.2.blocks.3.se.fc1.weight": (4, 4),
    "stages.2.blocks.17.ffn.grn.gamma": (8, 8),
    "stages.2.blocks.26.ffn.fc1.bias": (None, 11),
    "stages.3.downsample.conv.bias": (9, 12),
    "stages.3.blocks.2.mixer.table": (9, 12),
    "norm0.weight": (10, 13),
    "norm3.bias": (10, 13),
}


class Model(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.backbone = WBMMBackbone(**kwargs)
        self.head = nn.Conv2d(8, 2, 1)


def build(model, **paramwise):
    config = {
        "type": "WBMMLayerDecay",
        "optim_wrapper_cfg": {"type": "OptimWrapper", "optimizer": {"type": "AdamW", "lr": 1.0, "weight_decay": 0.05}},
        "paramwise_cfg": paramwise,
    }
    return OPTIM_WRAPPER_CONSTRUCTORS.build(config)(model).optimizer


def by_name(model, optimizer):
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {names[p]: group for group in optimizer.param_groups for p in group["params"]}
    assert len(found) == len(names) == sum(len(group["params"]) for group in optimizer.param_groups)
    return found


@pytest.mark.parametrize(
    ("arch", "column", "rate", "groups"),
    [("wbmm_t_hier", 0, 0.8, 9), ("wbmm_s_dense", 1, 0.9, 12), ("wbmm_t_dense", 0, 0.8, None)],
)
def test_groups_and_scales(arch, column, rate, groups):
    with on_meta():
        model = Model(arch=arch, dims=(8, 16, 32, 64))
    found = by_name(model, build(model, decay_rate=rate, groups=groups))
    last = (9, 12)[column]
    for name, expected in TABLE.items():
        if expected[column] is None:
            continue
        group = found[f"backbone.{name}"]
        assert group["layer"] == expected[column], name
        assert group["lr"] == pytest.approx(rate ** (last + 1 - expected[column])), name
    assert found["head.weight"]["lr"] == 1.0


def test_twelve_groups_for_t_on_coco():
    with on_meta():
        model = Model(arch="wbmm_t_hier", dims=(8, 16, 32, 64))
    found = by_name(model, build(model, decay_rate=0.8, groups=12))
    assert found["backbone.stages.2.blocks.17.gamma"]["lr"] == pytest.approx(0.8**5)
    assert found["backbone.stages.3.blocks.0.gamma"]["lr"] == pytest.approx(0.8)
    assert found["backbone.stem.conv1.weight"]["lr"] == pytest.approx(0.8**13)


def test_no_weight_decay_on_vectors_and_biases_alone():
    model = Model(**NARROW)
    for name, group in by_name(model, build(model, decay_rate=1.0)).items():
        parameter = model.get_parameter(name)
        undecayed = parameter.ndim == 1 or name.endswith(".bias")
        assert group["weight_decay"] == (0.0 if undecayed else 0.05), name
    found = by_name(model, build(model, decay_rate=1.0))
    for name in ("mixer.table", "ffn.grn.gamma", "ffn.grn.beta"):
        assert found[f"backbone.stages.0.blocks.0.{name}"]["weight_decay"] == 0.05


def test_frozen_parameters_are_left_out():
    model = Model(**NARROW, frozen_stages=1)
    optimizer = build(model, decay_rate=0.9)
    assert {group["layer"] for group in optimizer.param_groups} == {2, 3, 4, 5, 6}


@pytest.mark.parametrize(
    ("paramwise", "message"),
    [({}, "expected decay_rate"), ({"decay_rate": 1, "num_layers": 12}, "num_layers"), ({"groups": 9}, "decay_rate")],
)
def test_wrong_options(paramwise, message):
    with pytest.raises(ValueError, match=message):
        build(Model(**NARROW), **paramwise)


def test_other_models_and_too_few_groups():
    with pytest.raises(ValueError, match="Conv2d has none"):
        build(nn.Conv2d(1, 1, 1), decay_rate=0.9)
    with pytest.raises(ValueError, match="4 layer groups are too few"):
        build(Model(**NARROW), decay_rate=0.9, groups=4)

"""Freezing, by the names of parameters."""

import pytest
import timm
import torch.nn as nn

import wbmm  # noqa: F401  (registers the models)
from wbmm.train.model import freeze, set_train_mode
from wbmm.train.optim import OptimConfig, build_optimizer


def test_freezing_by_whole_name_parts():
    model = timm.create_model("wbmm_a", num_classes=10)
    freeze(model, ["stem", "stages.0"])
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith(("stem.", "stages.0."))}
    optimizer = build_optimizer(model, OptimConfig(), 1e-3)
    trained = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    with pytest.raises(ValueError, match="no parameter is under 'stage'; the model's parts: head, stages, stem"):
        freeze(model, ["stage"])
    with pytest.raises(ValueError, match="leaves no parameter to train"):
        freeze(model, ["stem", "stages", "head"])


def test_frozen_batch_norms_keep_their_statistics():
    model = timm.create_model("wbmm_a", num_classes=10)
    set_train_mode(model, ["stages.0"], bn_eval=False)
    training = {name: m.training for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert {name for name, value in training.items() if not value} == {
        name for name in training if name.startswith("stages.0.")
    }
    assert model.training
    set_train_mode(model, [], bn_eval=True)
    assert not any(m.training for m in model.modules() if isinstance(m, nn.BatchNorm2d))

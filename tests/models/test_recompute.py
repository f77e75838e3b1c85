"""Activation checkpointing: the same gradients and the same batch-norm statistics, blocks run twice."""

import copy

import pytest
import timm
import torch

import wbmm  # noqa: F401  (registers the models)
from tests.helpers import randomize


@pytest.mark.parametrize("name", ["wbmm_a", "wbmm_a_hier"])
def test_nothing_changes_but_the_work(name):
    plain = randomize(timm.create_model(name, dims=(8, 16, 32, 64), num_classes=5, drop_path_rate=0.5)).train()
    checkpointed = copy.deepcopy(plain)
    checkpointed.set_grad_checkpointing()
    runs = []
    checkpointed.stages[2].blocks[0].register_forward_pre_hook(lambda *_: runs.append(1))
    x = torch.randn(4, 3, 64, 64)
    for model in (plain, checkpointed):
        torch.manual_seed(0)
        model(x).square().mean().backward()
    assert len(runs) == 2
    for (key, a), (_, b) in zip(plain.named_parameters(), checkpointed.named_parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=key)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(checkpointed.state_dict()[key], value, rtol=0, atol=0, msg=key)
    assert checkpointed.stages[0].blocks[0].norm.num_batches_tracked == 1

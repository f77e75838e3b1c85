"""Mixup: set by (seed, step, micro-batch, rank), and nothing else."""

import numpy as np
import pytest
import torch

from wbmm.data.loader import BatchMixer
from wbmm.data.settings import MixConfig


def mixer(rank=0, seed=0, **mix):
    return BatchMixer(MixConfig(**mix), num_classes=5, seed=seed, rank=rank)


@pytest.fixture
def batch():
    return torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 5


def run(mix, batch, step=0, micro=0):
    return mix(batch[0].clone(), batch[1].clone(), step, micro)


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_same_position_gives_the_same_mix(batch, mode):
    first = run(mixer(mode=mode), batch, step=3, micro=1)
    np.random.rand(7)
    again = run(mixer(mode=mode), batch, step=3, micro=1)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], batch[0])
    torch.testing.assert_close(first[1].sum(1), torch.ones(8))


def test_seed_step_micro_and_rank_each_change_it(batch):
    mixes = [
        run(mixer(), batch, 3, 1),
        run(mixer(seed=1), batch, 3, 1),
        run(mixer(), batch, 4, 1),
        run(mixer(), batch, 3, 2),
        run(mixer(rank=1), batch, 3, 1),
    ]
    assert len({images.numpy().tobytes() for images, _ in mixes}) == 5


def test_numpy_generator_is_left_alone(batch):
    np.random.seed(2)
    wanted = np.random.rand(3)
    np.random.seed(2)
    run(mixer(), batch)
    np.testing.assert_array_equal(np.random.rand(3), wanted)


def test_off_is_label_smoothing_alone(batch):
    images, targets = run(mixer(mixup=0.0, cutmix=0.0, label_smoothing=0.1), batch)
    assert torch.equal(images, batch[0])
    expected = torch.full((8, 5), 0.02).scatter_(1, batch[1][:, None], 0.92)
    torch.testing.assert_close(targets, expected)


def test_mixup_is_the_stated_blend(batch):
    images, targets = run(mixer(mixup=0.8, cutmix=0.0, label_smoothing=0.0), batch)
    share = targets[0, 0].item()  # image 0 is of class 0, its partner 7 of class 2
    assert 0 < share < 1
    torch.testing.assert_close(images[0], batch[0][0] * share + batch[0][7] * (1 - share))

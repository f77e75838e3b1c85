"""The order of the samples, and what sets the random numbers of each."""

import numpy as np
import pytest

from tests.data.helpers import config
from wbmm.data.order import Plan, hash64, permutation, uniform
from wbmm.train.build import build_data


def test_hash_is_fixed_and_uniform():
    # Written down: a change would silently break resuming runs of an older version.
    assert hash64(0, 1, 2).tolist() == [hash64(0, 1, np.array([2]))[0]]
    assert hash64(1, 2, 3)[0] == 16914669369030367833
    values = uniform(7, np.arange(20000))
    assert 0 <= values.min() < values.max() < 1
    np.testing.assert_allclose(np.histogram(values, 10)[0], 2000, atol=200)
    assert hash64(1, 2)[0] != hash64(2, 1)[0]


def test_permutation_holds_everything_and_changes_with_seed_and_epoch():
    orders = [permutation(101, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert sorted(order) == list(range(101))
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize(("world", "accumulation"), [(1, 4), (2, 2), (4, 1)])
def test_processes_and_accumulation_share_the_global_batches(world, accumulation):
    reference = list(Plan(70, 3, batch=4, accumulation=4).batches(epoch=2))
    ranks = [list(Plan(70, 3, 4, world, rank, accumulation).batches(2)) for rank in range(world)]
    merged = [batch for group in zip(*ranks, strict=True) for batch in group]
    np.testing.assert_array_equal(np.stack(merged), np.stack(reference))


def test_a_set_smaller_than_a_global_batch_is_refused(folder):
    with pytest.raises(ValueError, match="24 images, fewer than one global batch of 32"):
        build_data(config(folder, batch=32, global_batch=32))

"""The in-memory path: the same pictures as the worker path, augmented in batches."""

import numpy as np
import pytest
import torch

from wbmm.data import augment
from wbmm.data.augment import MemoryFetch, augment_batch
from wbmm.data.order import uniform
from wbmm.train.build import build_data, build_eval
from wbmm.train.config import config_from_dict

NO_CHANGE = {"auto": None, "color_jitter": 0.0, "reprob": 0.0, "hflip": 0.0, "scale": [1.0, 1.0], "ratio": [1.0, 1.0]}


def config(augment=(), **data):
    data = {"args": {"train_limit": 320, "val_limit": 60}, **data}
    data = {"source": "digits", "size": 28, "in_chans": 1, "mean": [0.3], "std": [0.4], "workers": 0, **data}
    changes = {"data": {"in_memory": True, **data}, "augment": {**NO_CHANGE, **dict(augment)}}
    return config_from_dict({"batch": 16, "global_batch": 32, "mix": {"mixup": 0.0, "cutmix": 0.0}, **changes})


def batches(cfg, epoch=0, start=0, **where):
    return [batch for step in build_data(cfg, **where).train.epoch(epoch, start) for batch in step]


def test_without_augmentation_it_gives_what_the_workers_give():
    # bytes are rounded after resizing in both paths, so they agree to rounding in float
    fast = build_data(config()).val
    slow = build_data(config(in_memory=False)).val
    assert fast.size == slow.size == 60
    for (images, labels), (others, other_labels) in zip(fast, slow, strict=True):
        torch.testing.assert_close(images, others, rtol=0, atol=1e-5)
        assert torch.equal(labels, other_labels)
        assert images.shape[1:] == (1, 28, 28)


AUGMENTED = {"hflip": 0.5, "scale": [0.7, 1.1], "ratio": [0.8, 1.25], "shift": 3, "color_jitter": 0.3, "reprob": 0.5}


def test_a_sample_depends_on_its_epoch_and_index_alone():
    whole = batches(config(AUGMENTED), epoch=1, accumulation=2)
    ranks = [batches(config(AUGMENTED), epoch=1, world=2, rank=rank) for rank in range(2)]
    merged = [batch for pair in zip(*ranks, strict=True) for batch in pair]
    assert len(whole) == len(merged) > 0
    for (images, labels), (others, other_labels) in zip(whole, merged, strict=True):
        assert torch.equal(labels, other_labels)
        assert torch.equal(images, others)
    rest = batches(config(AUGMENTED), epoch=1, start=4, accumulation=2)
    assert torch.equal(rest[0][0], whole[8][0])


def test_epochs_and_seeds_differ():
    images, indices = torch.rand(6, 1, 28, 28) * 255, np.arange(6)
    cfg = config(AUGMENTED).augment
    results = [augment_batch(images, cfg, seed, epoch, indices) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    # and a sample alone is as in company
    assert torch.equal(augment_batch(images[2:3], cfg, 0, 0, indices[2:3]), results[0][2:3])


def test_flip_alone_mirrors():
    images, indices = torch.rand(12, 3, 20, 20) * 255, np.arange(12)
    flipped = augment_batch(images, config({"hflip": 0.5}).augment, 0, 0, indices)
    is_flipped = [torch.allclose(new, old.flip(-1), atol=1e-2) for new, old in zip(flipped, images, strict=True)]
    is_same = [torch.allclose(new, old, atol=1e-2) for new, old in zip(flipped, images, strict=True)]
    assert all(a != b for a, b in zip(is_flipped, is_same, strict=True))
    assert any(is_flipped)
    assert any(is_same)


def test_shift_moves_the_centre_of_mass_by_no_more_than_stated():
    images = torch.zeros(64, 1, 33, 33)
    images[:, :, 16, 16] = 255
    moved = augment_batch(images, config({"shift": 4}).augment, 0, 0, np.arange(64))
    weights = moved / moved.sum(dim=(2, 3), keepdim=True)
    place = torch.arange(33.0) - 16
    dy, dx = (weights.sum(3) * place).sum((1, 2)), (weights.sum(2) * place).sum((1, 2))
    for delta in (dx, dy):
        assert delta.abs().max() <= 4.01
        assert delta.std() > 1.5


def test_scale_above_one_shrinks_the_picture():
    images = torch.full((8, 1, 32, 32), 200.0)
    smaller = augment_batch(images, config({"scale": [4.0, 4.0]}).augment, 0, 0, np.arange(8))
    torch.testing.assert_close(smaller.mean(dim=(1, 2, 3)), torch.full((8,), 50.0), rtol=0.1, atol=0)


@pytest.mark.parametrize("mode", ["pixel", "rand", "const"])
def test_erasing_covers_a_rectangle_of_the_stated_area(mode):
    cfg = config({"reprob": 1.0, "remode": mode})
    images = torch.full((200, 1, 32, 32), 255, dtype=torch.uint8)
    fetch = MemoryFetch(images, torch.zeros(200, dtype=torch.int64), cfg.data, cfg.augment, cfg.seed)
    ((erased, _),) = fetch(0, [np.arange(200)])
    untouched = (1 - 0.3) / 0.4
    shares = ((erased - untouched).abs() > 1e-4).float().mean(dim=(1, 2, 3))
    assert shares.min() > 0.01
    assert shares.max() < 0.36
    np.testing.assert_allclose(shares.mean(), 0.17, atol=0.03)


def test_erasing_mode_is_checked():
    cfg = config({"reprob": 1.0})
    cfg.augment.remode = "blur"
    with pytest.raises(ValueError, match="remode is 'blur'; valid: pixel, rand, const"):
        batches(cfg, accumulation=2)


def test_too_large_for_memory_is_an_error_before_reading(monkeypatch):
    monkeypatch.setattr(augment.os, "sysconf", lambda name: 100)
    with pytest.raises(ValueError, match=r"data.in_memory needs .* set data.in_memory=false"):
        build_data(config())


@pytest.mark.parametrize(("processes", "fits"), [(1, 380_000), (2, 750_000)])
def test_memory_is_that_of_both_sets_in_every_process_of_the_machine(monkeypatch, processes, fits):
    """320 + 60 images of 784 bytes are 297,920, or 372,400 for it to be four fifths; the larger set alone 250,880."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    memory = {"SC_PHYS_PAGES": fits // 10, "SC_PAGE_SIZE": 10}
    monkeypatch.setattr(augment.os, "sysconf", memory.__getitem__)
    build_data(config(), world=processes, accumulation=2 // processes)
    memory["SC_PHYS_PAGES"] -= 1000 * processes
    text = rf"needs \(320 \+ 60\) images x 1 x 28 x 28 bytes x {processes} process.* = 0.000\d+ GiB; the machine has"
    with pytest.raises(ValueError, match=text):
        build_data(config(), world=processes, accumulation=2 // processes)
    build_eval(config(), world=processes)


def test_uniform_numbers_of_neighbours_are_not_related():
    values = uniform(0, 4, np.arange(4000), 0)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.05

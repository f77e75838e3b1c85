"""Batches do not depend on workers, processes or where a run starts; bad images and dead workers are named."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.data.helpers import assert_same, collect, config
from tests.orphans import kill_and_count_orphans
from wbmm.data.augment import SampleDataset, seeded
from wbmm.data.loader import WorkerFetch
from wbmm.data.sources import (
    BadImage,
)
from wbmm.train.build import build_data


def test_start_in_the_middle_is_the_rest_of_the_epoch(folder):
    loader = build_data(config(folder, global_batch=8), accumulation=2).train
    assert loader.steps_per_epoch == 3
    assert_same(collect(loader, 1, 1), collect(loader, 1)[2:])
    assert collect(loader, 1, 3) == []


def test_samples_do_not_depend_on_workers_or_on_what_was_drawn_before(folder):
    alone = build_data(config(folder)).train
    shared = build_data(config(folder, data={"workers": 2})).train
    torch.rand(5), np.random.rand(3)
    for epoch in (0, 1):
        assert_same(collect(alone, epoch), collect(shared, epoch))
    first, second = collect(alone, 0), collect(alone, 1)
    assert not torch.equal(first[0][0], second[0][0])


def test_reading_leaves_the_global_generators_alone(folder):
    loader = build_data(config(folder)).train
    torch.manual_seed(1)
    np.random.seed(1)
    wanted = torch.rand(3), np.random.rand(3)
    torch.manual_seed(1)
    np.random.seed(1)
    collect(loader)
    torch.testing.assert_close(torch.rand(3), wanted[0], rtol=0, atol=0)
    np.testing.assert_array_equal(np.random.rand(3), wanted[1])
    with seeded(5):
        inside = torch.rand(2)
    with seeded(5):
        torch.testing.assert_close(torch.rand(2), inside, rtol=0, atol=0)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_evaluation_reads_each_image_once(folder, world):
    seen = []
    for rank in range(world):
        loader = build_data(config(folder), rank=rank, world=world, accumulation=1).val
        assert loader.size == 9
        seen += [label for _, labels in loader for label in labels.tolist()]
    assert sorted(seen) == [0] * 3 + [1] * 3 + [2] * 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_image_ends_the_run_with_its_name(folder, workers):
    bad = folder / "train" / "bee" / "3.png"
    bad.write_bytes(bad.read_bytes()[:200])
    loader = build_data(config(folder, data={"workers": workers})).train
    with pytest.raises(BadImage, match=r"^cannot read image [^\n]*bee/3\.png[^\n]*$"):
        collect(loader)


def test_a_bad_image_can_be_skipped(folder, caplog):
    data = build_data(config(folder, data={"on_bad_image": "skip"}))
    (folder / "train" / "bee" / "3.png").unlink()
    (folder / "val" / "ant" / "0.png").write_bytes(b"not an image")
    assert sum(len(labels) for _, labels in collect(data.train)) == 24
    assert sum(len(labels) for _, labels in data.val) == 8
    assert "bee/3.png" in caplog.text
    assert "ant/0.png" in caplog.text


class _Killer:
    """A source whose images kill the process that reads them."""

    labels = np.zeros(8, dtype=np.int64)

    def __len__(self):
        return 8

    def image(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(60)
def test_a_dead_worker_is_an_error_and_not_a_hang():
    fetch = WorkerFetch(SampleDataset(_Killer(), None, 3, 0, skip_bad=False), workers=1)
    with pytest.raises(RuntimeError, match="worker"):
        list(fetch(0, [np.arange(4)]))


@pytest.mark.parametrize("pinned", [False, True])
def test_memory_is_pinned_for_a_gpu_alone(folder, monkeypatch, pinned):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    data = build_data(config(folder), device=torch.device("cuda" if pinned else "cpu"))
    fetches = [part.fetch.fetch if pinned else part.fetch for part in (data.train, data.val)]
    assert [fetch.loader.pin_memory for fetch in fetches] == [pinned, pinned]


HANGING = """
import time
import numpy as np
from wbmm.data.loader import WorkerFetch

class Hangs:
    def __getitem__(self, key):
        time.sleep(600)  # as on a dead file system

next(WorkerFetch(Hangs(), workers=2)(0, [np.arange(2)] * 4))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_workers_of_a_killed_run_end():
    process = subprocess.Popen([sys.executable, "-c", HANGING])
    assert kill_and_count_orphans(process, workers=2) == 0

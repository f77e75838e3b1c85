"""Batches that a GPU finishes: the values of the path for CPUs, and the order of work on the two streams."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.data.helpers import collect, config, folder
from wbmm.data import loader
from wbmm.data.augment import FinishBytes
from wbmm.data.loader import Prefetcher
from wbmm.train.build import build_data

__all__ = ["folder"]

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def finished_here(data):
    """A run's data as for a GPU, but with the work that a GPU would do done on the CPU."""
    for part in (data.train, data.val):
        assert isinstance(part.fetch, Prefetcher)
        part.fetch.device = CPU
    return data


AUGMENTED = {"reprob": 0.5, "remode": "pixel", "scale": [0.5, 1.0]}


@pytest.mark.parametrize("remode", ["pixel", "rand", "const"])
@pytest.mark.parametrize("in_memory", [False, True], ids=["workers", "in memory"])
def test_a_batch_is_what_it_is_without(folder, in_memory, remode):
    changes = {"augment": {**AUGMENTED, "auto": None, "remode": remode}, "data": {"in_memory": in_memory}}
    cfg = config(folder, **changes)
    plain, ahead = build_data(cfg), finished_here(build_data(cfg, device=GPU))
    for epoch in range(2):
        got, wanted = collect(ahead.train, epoch), collect(plain.train, epoch)
        assert len(got) == len(wanted) == 6
        for batch, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(batch, other, rtol=0, atol=0)
    for batch, other in zip(ahead.val, plain.val, strict=True):
        torch.testing.assert_close(batch, other, rtol=0, atol=0)


def test_a_batch_travels_as_bytes(folder):
    cfg = config(folder, augment=AUGMENTED, data={"workers": 1})
    fetch = build_data(cfg, device=GPU).train.fetch
    images, labels, places, painted = next(iter(fetch.fetch(0, [np.arange(16)])))
    assert images.dtype == torch.uint8
    assert 0 < len(places) < 16
    assert len(painted) == sum(3 * height * width for *_, height, width in places)
    finished, same = FinishBytes(cfg.data)(images, labels, places, painted)
    assert finished.dtype == torch.float32
    assert same is labels


def test_a_batch_of_damaged_images_alone_stays_none():
    found = list(Prefetcher(lambda epoch, batches: iter([None, (1,), None]), lambda x: (x, x), CPU)(0, []))
    assert found == [None, (1, 1), None]


class Streams:
    """Stands in for torch.cuda: notes in what order things are asked of which stream."""

    def __init__(self, notes):
        self.notes, self.now = notes, "main"

    def Stream(self, device):
        return FakeStream("side", self.notes)

    @contextmanager
    def stream(self, stream):
        self.now = stream.name
        yield
        self.now = "main"

    def current_stream(self, device):
        return FakeStream(self.now, self.notes)


class FakeStream:
    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def record_event(self):
        self.notes.append(f"event on {self.name}")
        return "event"

    def wait_event(self, event):
        self.notes.append(f"{self.name} waits")


def test_a_batch_is_sent_on_its_own_stream_while_the_one_before_is_used(monkeypatch):
    notes = []
    streams = Streams(notes)
    for name in ("Stream", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(streams, name))
    monkeypatch.setattr(loader, "send", lambda tensor, device: notes.append(f"send on {streams.now}") or tensor)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: notes.append(f"kept for {stream.name}"))

    def finish(images, number):
        notes.append(f"finish {number} on {streams.now}")
        return images, images

    fetched = Prefetcher(lambda epoch, batches: ((torch.zeros(1), n) for n in batches), finish, GPU)(0, range(2))
    sent = ["send on side", "finish {} on side", "event on side"]
    taken = ["main waits", "kept for main", "kept for main"]
    next(fetched)
    assert notes == [note.format(number) for number in (0, 1) for note in sent] + taken
    notes.clear()
    assert len(list(fetched)) == 1
    assert notes == taken

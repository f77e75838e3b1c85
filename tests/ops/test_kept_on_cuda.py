"""What `Kept` asks of CUDA, told to a stand-in: events between streams, and nothing kept from a captured graph."""

from types import SimpleNamespace

import pytest
import torch

from wbmm.ops import kept as kept_module
from wbmm.ops.kept import Kept


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def record_event(self):
        self.log.append(f"{self.name} records")
        return f"event of {self.name}"

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")


@pytest.fixture
def cuda(monkeypatch):
    state = SimpleNamespace(log=[], capturing=False)
    state.stream = Stream("first", state.log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: state.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(kept_module, "_key", id)
    return state


def tensor(**methods):
    made = SimpleNamespace(device=torch.device("cuda"), **methods)
    made.detach = lambda: made
    return made


def test_another_stream_waits_for_the_one_that_builds(cuda):
    kept, weight = Kept().eval(), tensor()
    value = tensor(record_stream=lambda stream: cuda.log.append(f"memory held for {stream.name}"))
    assert kept.get("matrix", [weight], lambda: value) is value
    cuda.stream = Stream("second", cuda.log)
    assert kept.get("matrix", [weight], lambda: pytest.fail("it is kept")) is value
    assert cuda.log == ["first records", "second waits for event of first", "memory held for second"]


def test_nothing_is_kept_while_a_graph_is_captured(cuda):
    kept, weight = Kept().eval(), tensor()
    cuda.capturing = True
    kept.get("matrix", [weight], tensor)
    assert kept.is_empty()

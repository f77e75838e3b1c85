"""What backends keep for a layer in inference: matrices and packed weights, built once and never stale."""

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import WeakValueDictionary

import torch
import torch.nn as nn
from torch import Tensor

__all__ = ["Kept", "find_kept"]

Built = TypeVar("Built")
SAMPLES = 64
_numbers = itertools.count()
_living: "WeakValueDictionary[int, Kept]" = WeakValueDictionary()


def find_kept(number: int) -> "Kept | None":
    """The `Kept` of a number; None if its layer is gone."""
    return _living.get(number)


def _key(weight: Tensor) -> tuple:
    version = None if weight.is_inference() else weight._version
    return version, weight.data_ptr(), weight.dtype, weight.device, weight.shape, weight.stride()


def _find_memcmp() -> Callable[[int, int, int], int] | None:
    """The C library's comparison of memory; None where it cannot be found."""
    try:
        found = ctypes.CDLL(None).memcmp
    except (AttributeError, OSError, TypeError):  # Windows has no such handle
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return found


_memcmp = _find_memcmp()


def _in_memory(weight: Tensor) -> Tensor:
    """A view whose dimensions are in the order of their strides."""
    return weight.permute(sorted(range(weight.ndim), key=weight.stride, reverse=True))


def _whole(weight: Tensor) -> Callable[[], bool]:
    """A function that tells whether a tensor on a CPU has the content that it has now."""
    # Not by NumPy: a tensor that it has looked at cannot free its storage any more. `torch.equal` wakes all threads.
    kept = weight.clone()
    if _memcmp is None or not _in_memory(weight).is_contiguous():
        return lambda: torch.equal(kept, weight)
    compare, size = _memcmp, kept.nbytes
    return lambda: compare(kept.data_ptr(), weight.data_ptr(), size) == 0


def _samples(weight: Tensor) -> Callable[[], bool]:
    """The same from some of its entries."""
    in_memory = _in_memory(weight)
    if not in_memory.is_contiguous():  # no view can sample it
        return _whole(weight)
    some = in_memory.view(-1)[:: weight.numel() // SAMPLES + 1]
    kept = some.clone()
    return lambda: torch.equal(kept, some)


def _wait(ready: torch.cuda.Event, value: Tensor) -> None:
    """Has the current stream wait until a value is there; another stream may be building it."""
    stream = torch.cuda.current_stream(value.device)
    stream.wait_event(ready)
    value.record_stream(stream)  # or its memory could be given away while this stream still reads it


class Kept(nn.Module):
    """Values made from a layer's weights, each under a name. A child of the layer, without state and never called.

    The key is each weight's version counter, storage, strides, dtype and device. A write through `.data` (as some EMA
    hooks do) leaves the counter alone, so on a CPU, where it costs microseconds, contents are compared as well: tables
    whole, the large weights of linears and convolutions in some entries, so that a change of single entries of theirs
    is seen after the next `train()` or `eval()`. On a GPU that would wait for the device at every layer.

    On a GPU other streams wait for what one stream builds, and nothing is kept while a graph is captured.

    `train()`, `eval()` and moves of the layer drop everything, as do copies and pickles. In train mode nothing is kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[str, tuple] = {}
        self._take_number()

    def _take_number(self) -> None:
        """A number of its own, for operators that take no Python object."""
        self.number = next(_numbers)
        _living[self.number] = self

    def get(self, name: str, weights: Sequence[Tensor], build: Callable[[], Built], sampled: bool = False) -> Built:
        """What `build()` gave before if the weights are unchanged, else `build()`.

        Only where no gradients are asked for and nothing is traced: `build` is not part of a graph.
        """
        if self.training:
            return build()
        on_cuda = weights[0].device.type == "cuda"
        key = tuple(map(_key, weights))
        entry = self._entries.get(name)  # read once: replicas of nn.DataParallel share this object between threads
        if entry is not None and entry[0] == key and all(same() for same in entry[2]):
            if on_cuda:
                _wait(entry[4], entry[3])
            return entry[3]
        value = build()
        if on_cuda and torch.cuda.is_current_stream_capturing():
            return value  # it lies in the memory of the graph that is captured, which is written anew at every replay
        held = [weight.detach() for weight in weights]  # or another tensor could come to lie at the same address
        guard = _samples if sampled else _whole
        same = [guard(weight) for weight in held if weight.device.type == "cpu"]
        ready = torch.cuda.current_stream(weights[0].device).record_event() if on_cuda else None
        self._entries[name] = (key, held, same, value, ready)
        return value

    def is_empty(self) -> bool:
        return not self._entries

    def clear(self) -> None:
        self._entries = {}

    def train(self, mode: bool = True) -> "Kept":
        self.clear()
        return super().train(mode)

    def _apply(self, fn, recurse=True):
        self.clear()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_entries": {}}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._take_number()

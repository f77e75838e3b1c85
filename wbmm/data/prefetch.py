"""Batches on a GPU before they are asked for: bytes copied from page-locked memory, made the model's input there."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

__all__ = ["Prefetcher", "send"]

AHEAD = 1  # batches


class Prefetcher:
    """Sends each batch while the one before is worked on, on a stream of its own.

    Args:
        fetch: `fetch(epoch, index arrays)` gives batches as tuples of tensors and plain values, or None.
        finish: Makes (images, labels) of such a tuple, its tensors on the device.
        device: Where to. A CPU has no streams; there the batches are the same, one after the other.
    """

    def __init__(self, fetch: Callable, finish: Callable[..., tuple[Tensor, Tensor]], device: torch.device):
        self.fetch, self.finish, self.device = fetch, finish, device
        self._stream = None

    def __call__(self, epoch: int, batches: Iterable[np.ndarray]) -> Iterator[tuple[Tensor, Tensor] | None]:
        on_the_way: deque = deque()
        for batch in self.fetch(epoch, batches):
            on_the_way.append(self._start(batch))
            if len(on_the_way) > AHEAD:
                yield self._arrive(*on_the_way.popleft())
        while on_the_way:
            yield self._arrive(*on_the_way.popleft())

    def _start(self, batch: tuple | None) -> tuple[tuple[Tensor, Tensor] | None, torch.cuda.Event | None]:
        if batch is None or self.device.type == "cpu":
            return batch and self.finish(*batch), None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            parts = [send(part, self.device) if isinstance(part, Tensor) else part for part in batch]
            return self.finish(*parts), self._stream.record_event()

    def _arrive(self, batch: tuple[Tensor, Tensor] | None, sent: torch.cuda.Event | None):
        """Lets the stream that will compute wait for the batch; the host does not."""
        if sent is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(sent)
            for tensor in batch:
                tensor.record_stream(current)  # its memory is not given to another batch before that stream is done
        return batch


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; to a GPU through page-locked memory, so that the host need not wait."""
    if device.type == "cpu":
        return tensor
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)

"""OpenVINO on any number of images: one on all threads, several side by side."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import cycle

import torch
from torch import Tensor

from .runtime import openvino_model

__all__ = ["Streams"]


class Streams:
    """A model of OpenVINO's, image by image.

    The layers of one image stay in the caches of the core that computes it, and cores that each have an image of their
    own need not wait for each other at every layer: docs/speed.md. A batch that is too small for all cores runs one
    image after the other. Each of the two ways is compiled when it is first needed.

    Args:
        model: an `openvino.Model` whose batch size is 1 or free.
    """

    def __init__(self, model) -> None:
        shape = model.inputs[0].get_partial_shape()
        shape[0] = 1
        self.model = model.clone()
        self.model.reshape(shape)

    @cached_property
    def one(self) -> Callable:
        """For one image: all threads work on it."""
        return openvino_model(self.model)

    @cached_property
    def many(self) -> list:
        """Requests for several: OpenVINO's own choice of how many, and of threads for each."""
        compiled = openvino_model(self.model, hint="THROUGHPUT")
        count = compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")
        return [compiled.create_infer_request() for _ in range(count)]

    def __call__(self, images: Tensor) -> list[Tensor]:
        """Images `[B, C, H, W]` to the model's outputs, each with the batch first."""
        each = self._side_by_side if self._has_enough(len(images)) else self._in_turn
        return [torch.cat(parts) for parts in zip(*each(images.split(1)), strict=True)]

    def _has_enough(self, count: int) -> bool:
        """Whether so many images keep all cores busy side by side. One alone takes what is compiled already."""
        if count == 1:
            return "many" in self.__dict__ and "one" not in self.__dict__
        return count >= len(self.many)

    def _in_turn(self, images: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        for image in images:
            outputs = self.one([image.numpy()])
            yield [torch.from_numpy(outputs[i].copy()) for i in range(len(outputs))]

    def _side_by_side(self, images: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        running = deque()
        try:
            for image, request in zip(images, cycle(self.many)):
                if len(running) == len(self.many):  # this request is the one that has run for longest
                    yield _finish(running.popleft())
                request.start_async([image.numpy()])
                running.append(request)
            while running:
                yield _finish(running.popleft())
        finally:
            for request in running:  # after an error: a request that still runs could not be started again
                request.wait()


def _finish(request) -> list[Tensor]:
    """Waits for a request's outputs, and copies them: its next image overwrites them."""
    request.wait()
    return [torch.from_numpy(tensor.data.copy()) for tensor in request.output_tensors]

"""OpenVINO on any number of images: one on all threads, several side by side."""

from collections import deque
from collections.abc import Callable
from functools import cached_property
from itertools import cycle

import torch
from torch import Tensor

from .runtime import openvino_model

__all__ = ["Streams"]


class Streams:
    """A model of OpenVINO's, image by image.

    The layers of one image stay in the caches of the core that computes it, and cores that each have an image of their
    own need not wait for each other at every layer: a batch is faster so than in one piece (docs/speed.md). Each of the
    two ways is compiled when it is first needed.

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
        if len(images) == 1:
            outputs = self.one([images.numpy()])
            return [torch.from_numpy(outputs[i].copy()) for i in range(len(outputs))]
        results, running = [], deque()
        for image, request in zip(images.split(1), cycle(self.many)):
            if len(running) == len(self.many):  # this request is the one that has run for longest
                results.append(_finish(running.popleft()))
            request.start_async([image.numpy()])
            running.append(request)
        results += map(_finish, running)
        return [torch.cat(parts) for parts in zip(*results, strict=True)]


def _finish(request) -> list[Tensor]:
    """Waits for a request's outputs, and copies them: its next image overwrites them."""
    request.wait()
    return [torch.from_numpy(tensor.data.copy()) for tensor in request.output_tensors]

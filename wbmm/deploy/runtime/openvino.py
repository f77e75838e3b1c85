"""OpenVINO files: one image on all threads, several side by side."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from itertools import cycle
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from wbmm.extras import need
from wbmm.io.digest import verify_digest
from wbmm.io.reader import METADATA_KEY
from wbmm.io.screen import screen_openvino
from wbmm.models.state import CheckpointError

from .common import Runner, existing, input_sides, parse_card, unreadable

__all__ = ["Streams", "open_openvino", "openvino_model", "read_openvino"]


def _core():
    return _core_of(need("openvino"))


@cache
def _core_of(openvino: ModuleType):
    """OpenVINO's `Core`, one for the process.

    Each of them sets the stack that signals are handled on, and a later one restores that of an earlier one when it
    goes, whether that is still there or not: then the next signal, such as the end of a worker of a data loader, kills
    the process.
    """
    return openvino.Core()


def read_openvino(path: str | Path):
    """The `openvino.Model` of an .xml file."""
    core = _core()
    path = existing(path)
    if not Path(path).with_suffix(".bin").is_file():
        raise CheckpointError(f"{path}: the weights are missing, {Path(path).with_suffix('.bin').name} beside it")
    verify_digest(path)
    screen_openvino(path)
    try:
        return core.read_model(path)
    except Exception as error:
        raise unreadable(path, "OpenVINO", error) from None


def openvino_model(
    source, threads: int | None = None, precision: str = "f32", hint: str = "LATENCY", count: bool = False
):
    """A compiled OpenVINO model on the CPU.

    Args:
        source: an .xml file, or an `openvino.Model`.
        threads: PyTorch's number, if not given.
        precision: what it computes in, `f32` or `bf16`; INT8 layers stay what they are.
        hint: `LATENCY` for one request at a time, `THROUGHPUT` for several.
        count: measure the time of each node.
    """
    core = _core()
    model = read_openvino(source) if isinstance(source, (str, Path)) else source
    options = {
        "INFERENCE_NUM_THREADS": threads or torch.get_num_threads(),
        "PERFORMANCE_HINT": hint,
        "INFERENCE_PRECISION_HINT": precision,
        "PERF_COUNT": count,
    }
    try:
        return core.compile_model(model, "CPU", options)
    except Exception as error:
        raise unreadable(source if isinstance(source, (str, Path)) else "the model", "OpenVINO", error) from None


class Streams:
    """A model of OpenVINO's, image by image.

    The layers of one image stay in the caches of the core that computes it, and cores that each have an image of their
    own need not wait for each other at every layer: docs/speed.md. A batch that is too small for all cores runs one
    image after the other. Each of the two ways is compiled when it is first needed.

    Args:
        model: an `openvino.Model` whose batch size is 1 or free.
        precision: as of `openvino_model`.
    """

    def __init__(self, model, precision: str = "f32") -> None:
        self.precision = precision
        shape = model.inputs[0].get_partial_shape()
        shape[0] = 1
        self.model = model.clone()
        self.model.reshape(shape)

    @cached_property
    def one(self) -> Callable:
        """For one image: all threads work on it."""
        return openvino_model(self.model, precision=self.precision)

    @cached_property
    def many(self) -> list:
        """Requests for several: OpenVINO's own choice of how many, and of threads for each."""
        compiled = openvino_model(self.model, precision=self.precision, hint="THROUGHPUT")
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
                    yield _finish(running[0])
                    running.popleft()
                request.start_async([image.numpy()])
                running.append(request)
            while running:
                yield _finish(running[0])
                running.popleft()
        finally:
            for request in running:  # after an error: a request that still runs could not be started again
                request.wait()


def _finish(request) -> list[Tensor]:
    """Waits for a request's outputs, and copies them: its next image overwrites them."""
    request.wait()
    return [torch.from_numpy(tensor.data.copy()) for tensor in request.output_tensors]


def open_openvino(path: Path, device: str, precision: str = "f32") -> Runner:
    """An .xml file of `wbmm export`, on the CPU; image by image where its batch size allows.

    Args:
        precision: as of `openvino_model`.
    """
    if device != "cpu":
        raise ValueError(f"device {device!r}: OpenVINO files run on the CPU here")
    model = read_openvino(path)
    text = model.get_rt_info([METADATA_KEY]).value if model.has_rt_info([METADATA_KEY]) else None
    card = parse_card(path, text)
    shapes = [image.get_partial_shape() for image in model.inputs]
    batch, size = input_sides(
        path, card, [[side.get_length() if side.is_static else None for side in s] for s in shapes]
    )
    name = "OpenVINO" if precision == "f32" else f"OpenVINO, {precision}"
    if batch in (None, 1):
        return Runner(name, card, Streams(model, precision), None, size)
    compiled = openvino_model(model, precision=precision)

    def forward(images: Tensor) -> Sequence[Tensor]:
        outputs = compiled([images.numpy()])
        return [torch.from_numpy(outputs[i].copy()) for i in range(len(outputs))]

    return Runner(name, card, forward, batch, size)

"""`wbmm.optimize(model, images)`: the fastest way to run a model on this machine, found by trying.

Each way is built, compared with the model on the images, and timed in turn with the others. A way that cannot be had
here, or that computes something else, is left out, with the reason in the table.
"""

import copy
import itertools
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch._inductor.config
import torch.nn as nn
from torch import Tensor

from wbmm.extras import EXPORTERS, quiet
from wbmm.io.card import card_of
from wbmm.machine import machine_facts, measured_line
from wbmm.models.fuse import fuse
from wbmm.ops.compiled import as_convolutions
from wbmm.progress import progress_bar
from wbmm.text import first_line, render_table
from wbmm.timing import time_interleaved

from .export import export_model
from .export.verify import compare_outputs
from .runtime import open_runner

__all__ = ["Measured", "Optimized", "compile_frozen", "optimize"]

RUNTIMES = ("eager", "compiled", "openvino")
# Largest difference from PyTorch in float32, relative to the largest output where that is above 1.
TOLERANCES = {"float32": 1e-3, "bf16": 0.1}
PAUSE_S = 0.05  # the threads of one runtime spin for a while after a call, and would slow the next one down
LEAST_ROUNDS, MOST_ROUNDS = 5, 100

Forward = Callable[[Tensor], object]


@dataclass(frozen=True)
class Measured:
    """One way to run the model.

    Attributes:
        way: its name, such as `openvino, bf16`.
        seconds: of one call, the median; None if it was left out.
        difference: from the model in PyTorch in float32, relative to the largest output where that is above 1.
        why: it was left out; None if it was not.
    """

    way: str
    seconds: float | None = None
    difference: float | None = None
    why: str | None = None


class Optimized(nn.Module):
    """A model in the fastest form that was found. It takes images as the model did, any number of them, in float32.

    Images of another size than the example's run as well: in PyTorch where the chosen runtime takes one size alone.

    Attributes:
        way: the chosen one.
        measured: all that were tried, the fastest first.
    """

    def __init__(self, forward: Forward, fused: nn.Module, way: str, measured: list[Measured], size: torch.Size | None):
        super().__init__()
        self.fused, self.way, self.measured = fused, way, measured
        self._chosen, self._size = forward, size

    @torch.no_grad()
    def forward(self, images: Tensor) -> object:
        if self._size is not None and images.shape[2:] != self._size:
            return self.fused(images)
        return self._chosen(images)

    def train(self, mode: bool = True) -> "Optimized":
        if mode:
            raise ValueError("an optimized model is for inference: train the model that it was made of")
        return super().train(mode)

    def report(self) -> str:
        """The table of what was tried."""
        slowest = next(item.seconds for item in self.measured if item.way == "as given")
        rows = [_row(item, slowest, item.way == self.way) for item in self.measured]
        table = render_table(("way", "ms a call", "speed", "difference", ""), rows)
        return f"{table}\n\nSpeed is the ratio to the model as it was given. {measured_line(machine_facts())}"

    def extra_repr(self) -> str:
        return f"way={self.way!r}"


def _row(item: Measured, baseline: float, chosen: bool) -> list[str]:
    if item.seconds is None:
        return [item.way, "-", "-", "-", f"left out: {item.why}"]
    speed = f"{baseline / item.seconds:.2f}x"
    return [item.way, f"{1000 * item.seconds:.2f}", speed, f"{item.difference:.1e}", "chosen" if chosen else ""]


def optimize(
    model: nn.Module,
    images: Tensor,
    precisions: Sequence[str] = ("float32",),
    runtimes: Sequence[str] = RUNTIMES,
    seconds: float = 10.0,
    verbose: bool = True,
) -> Optimized:
    """The fastest way to run a model on this machine: fused, compiled or in OpenVINO, in the precisions allowed.

    Takes about a minute, most of it for compiling. The original is untouched.

    Args:
        model: a classifier or backbone of ours or of timm's, in float32 and eval mode, on its device.
        images: `[batch, channels, height, width]`, as many as one call will have: what is fastest for one image need
            not be for 16.
        precisions: what may be computed in, of `float32` and `bf16`. bfloat16 moves logits by about a hundredth.
        runtimes: what may run it, of `eager` PyTorch, `compiled` (torch.compile with frozen weights) and `openvino`.
        seconds: for timing, in all.
        verbose: print the table.

    Example:
        >>> fast = wbmm.optimize(model, torch.randn(1, 3, 224, 224), precisions=("float32", "bf16"))
        >>> logits = fast(images)
    """
    _check(model, images, precisions, runtimes, seconds)
    fused = fuse(model).to(memory_format=torch.channels_last)
    reference = _no_grad(fused)
    ways: dict[str, Forward] = {"as given": _no_grad(model)}
    found = {}
    with progress_bar(len(precisions) * len(runtimes) + 1, "forms of the model, then their times") as advance:
        for precision, runtime in itertools.product(precisions, runtimes):
            name = runtime if precision == "float32" else f"{runtime}, {precision}"
            try:
                ways[name], found[name] = _build(name, runtime, precision, fused, images, reference)
            except Exception as error:  # whatever a compiler may raise: the others are still there
                found[name] = Measured(name, why=first_line(error))
            advance(1)
        timings = _time(ways, images, seconds)
        advance(1)
    measured = [Measured("as given", timings["as given"], 0.0)]
    measured += [item if item.why else Measured(name, timings[name], item.difference) for name, item in found.items()]
    measured.sort(key=lambda item: math.inf if item.seconds is None else item.seconds)
    way = measured[0].way
    optimized = Optimized(ways[way], fused, way, measured, images.shape[2:] if way.startswith("openvino") else None)
    optimized.eval()
    if verbose:
        print(optimized.report())
    return optimized


def _check(
    model: nn.Module, images: Tensor, precisions: Sequence[str], runtimes: Sequence[str], seconds: float
) -> None:
    for name, given, known in (("precisions", precisions, TOLERANCES), ("runtimes", runtimes, RUNTIMES)):
        wrong = [item for item in ([given] if isinstance(given, str) else given) if item not in known]
        if isinstance(given, str) or wrong or not given:
            raise ValueError(f"{name} {given!r}: expected a tuple of some of {', '.join(known)}")
    if images.ndim != 4 or not images.numel() or images.dtype != torch.float32:
        raise ValueError(
            f"images of shape {tuple(images.shape)} and type {images.dtype}: expected [batch, channels, height, width] "
            "in float32"
        )
    if not seconds > 0:
        raise ValueError(f"seconds {seconds}: expected a number above 0")
    if model.training:
        raise ValueError("the model is in train mode: call model.eval() before wbmm.optimize(model, images)")
    first = next(model.parameters(), images)
    if first.dtype != torch.float32 or first.device != images.device:
        raise ValueError(
            f"the model is in {first.dtype} on {first.device}, the images are on {images.device}: expected both on one "
            "device and the model in float32; allow other types by precisions=(...)"
        )


def _build(
    name: str, runtime: str, precision: str, fused: nn.Module, images: Tensor, reference: Forward
) -> tuple[Forward, Measured]:
    """One way to run the model, and its difference from the reference; an error says why it cannot be had."""
    forward = _openvino(fused, images, precision) if runtime == "openvino" else _pytorch(runtime, precision, fused)
    with quiet(*EXPORTERS):
        compared = compare_outputs(name, "the example", images, reference, forward)
    if not compared.within(TOLERANCES[precision]):
        raise ValueError(f"its outputs differ by {compared.difference:.1e}; the largest is {compared.largest:.3g}")
    return forward, Measured(name, difference=compared.difference / max(1.0, compared.largest))


def _pytorch(runtime: str, precision: str, fused: nn.Module) -> Forward:
    net = fused if precision == "float32" else copy.deepcopy(fused).to(torch.bfloat16)
    call = compile_frozen(net) if runtime == "compiled" else _no_grad(net)
    if precision == "float32":
        return call
    return lambda images: _to_float(call(images.to(torch.bfloat16)))


def _to_float(outputs: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
    return outputs.float() if isinstance(outputs, Tensor) else [output.float() for output in outputs]


def _no_grad(net: nn.Module) -> Forward:
    return torch.no_grad()(lambda images: net(images))


def compile_frozen(net: nn.Module) -> Forward:
    """A model for inference by `torch.compile`, its weights frozen into the program, which lets it pack them.

    It is compiled anew for another image size, and once for other batch sizes.
    """
    compiled = torch.compile(net)

    @torch.no_grad()
    def forward(images: Tensor) -> object:
        torch._dynamo.mark_static(images, 2)
        torch._dynamo.mark_static(images, 3)
        with torch._inductor.config.patch(freezing=True), as_convolutions():
            return compiled(images)

    return forward


def _openvino(fused: nn.Module, images: Tensor, precision: str) -> Forward:
    if images.device.type != "cpu":
        raise ValueError(f"it runs on a CPU, and the images are on {images.device}")
    with tempfile.TemporaryDirectory() as folder, quiet(*EXPORTERS):
        path = Path(folder) / "model.xml"
        card = card_of(fused)
        card = card.replace(input_size=(card.input_size[0], *images.shape[2:]))
        export_model(fused, path, card, dynamic_batch=True)
        return open_runner(path, precision="f32" if precision == "float32" else precision)


def _time(ways: dict[str, Forward], images: Tensor, seconds: float) -> dict[str, float]:
    """Median seconds of each way, all in turn."""
    calls = {name: partial(forward, images) for name, forward in ways.items()}
    device = str(images.device)
    first = time_interleaved(calls, rounds=1, warmup=1, pause=PAUSE_S, device=device)
    each = sum(timing.median + PAUSE_S for timing in first.values())
    rounds = min(max(int(seconds / each), LEAST_ROUNDS), MOST_ROUNDS)
    timings = time_interleaved(calls, rounds, warmup=0, pause=PAUSE_S, device=device)
    return {name: timing.median for name, timing in timings.items()}

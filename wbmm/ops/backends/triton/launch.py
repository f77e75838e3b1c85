"""How this backend launches its kernels; on the meta device, where nothing runs, who listens is told what would."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import triton
from torch import Tensor
from torch.library import wrap_triton

__all__ = ["Launch", "launch", "listen"]


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel's name, the memory that it reads and writes, its multiply-adds."""

    kernel: str
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    macs: int


_listener: Callable[[Launch], None] | None = None


@contextmanager
def listen(note: Callable[[Launch], None]) -> Iterator[None]:
    """Calls `note` for each launch on the meta device."""
    global _listener
    before, _listener = _listener, note
    try:
        yield
    finally:
        _listener = before


def launch(
    kernel,
    grid,
    *arguments,
    writes: tuple[Tensor, ...],
    in_place: tuple[Tensor, ...] = (),
    macs: int = 0,
    wrapped: bool = False,
    **meta,
) -> None:
    """Launches a kernel.

    Args:
        arguments: of the kernel; the first is a tensor.
        writes: those that it writes only; it reads all others.
        in_place: those that it reads and writes.
        macs: multiply-adds, for who listens.
        wrapped: whether compilers should see the kernel, which they can only inside a `triton_op`.
        meta: constants of the kernel and options of its launch.
    """
    if arguments[0].device.type != "meta":
        # The interpreter's kernels are of another class, which compilers do not know.
        visible = wrapped and isinstance(kernel, triton.JITFunction | triton.runtime.Autotuner)
        (wrap_triton(kernel) if visible else kernel)[grid](*arguments, **meta)
    elif _listener is not None:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        reads = tuple(tensor for tensor in tensors if not any(tensor is other for other in writes))
        _listener(Launch(_name(kernel), reads, (*writes, *in_place), macs))


def _name(kernel) -> str:
    while not hasattr(kernel, "__name__"):  # a tuner holds the kernel
        kernel = kernel.fn
    return kernel.__name__

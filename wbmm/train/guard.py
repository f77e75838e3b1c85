"""What may go wrong in a step: a loss that is not finite, and a signal that asks the run to stop."""

import json
import os
import signal
import threading
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

__all__ = [
    "BufferSnapshot",
    "StopSignal",
    "clear_marker",
    "detach_worker",
    "nonfinite_gradients",
    "nonfinite_layers",
    "write_marker",
]

MARKER = "interrupted.json"


class StopSignal:
    """Remembers SIGTERM and SIGUSR1, so that the run can save at the next step boundary; restores the handlers."""

    def __init__(self):
        self.name: str | None = None
        self._previous: dict = {}

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGTERM, signal.SIGUSR1):
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number, _frame):
        self.name = signal.Signals(number).name


def detach_worker(_worker: int = 0):
    """For a data worker, at its start: launchers signal the whole process group, or every process of a job, and a
    worker that dies of it takes the run down before it has saved."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # macOS has none: there a SIGTERM to every single process ends the workers
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_obey_parent, daemon=True).start()


def _obey_parent():
    """Ends this worker on its own process's SIGTERM alone. It cannot be ignored: Python sends it to workers that are
    left at its exit, after an error for instance, and then waits for them."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def write_marker(folder: Path, **facts):
    """Leaves the file that says this run stopped on a signal and can be resumed; launchers look for it."""
    fresh = folder / f"{MARKER}.tmp"
    fresh.write_text(json.dumps(facts) + "\n", encoding="utf-8")
    os.replace(fresh, folder / MARKER)


def clear_marker(folder: Path):
    (folder / MARKER).unlink(missing_ok=True)


class BufferSnapshot:
    """The buffers of a model, to be put back: batch-norm statistics must not keep the NaN of a skipped step, nor move
    a second time when activation checkpointing runs a block again."""

    def __init__(self, model: nn.Module):
        self._buffers = list(model.buffers())
        self._copies = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def restore(self):
        for buffer, copy in zip(self._buffers, self._copies, strict=True):
            buffer.copy_(copy)


@torch.no_grad()
def nonfinite_layers(model: nn.Module, images: Tensor) -> list[str]:
    """Runs a forward pass and names the layers whose output is not finite, in the order they ran."""
    if not torch.isfinite(images).all():
        return ["the input images"]
    names: list[str] = []

    def watch(name: str):
        def hook(_module, _inputs, output):
            tensors = output if isinstance(output, list | tuple) else [output]
            if not all(torch.isfinite(item).all() for item in tensors if isinstance(item, Tensor)):
                names.append(name)

        return hook

    leaves = [(name, module) for name, module in model.named_modules() if name and not list(module.children())]
    handles = [module.register_forward_hook(watch(name)) for name, module in leaves]
    try:
        model.forward(images)  # not model(images): a compiled call would skip the hooks
    finally:
        for handle in handles:
            handle.remove()
    return names


def nonfinite_gradients(model: nn.Module) -> list[str]:
    """Names the parameters whose gradient is not finite."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all()
    ]

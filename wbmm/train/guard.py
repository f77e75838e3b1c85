"""What may go wrong in a run: losses that are not finite, signals that ask it to stop, two runs in one folder."""

import fcntl
import json
import os
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.data.loader import SIGNALS
from wbmm.io.atomic import write_text

__all__ = [
    "BufferSnapshot",
    "StopSignal",
    "clear_marker",
    "lock_folder",
    "nonfinite_layers",
    "read_marker",
    "write_marker",
]

MARKER = "interrupted.json"
ONE_PRESS_S = 0.5  # a launcher may pass on the Ctrl-C that the terminal has sent to all processes already
NOTHING_TO_SAVE = "Ctrl-C: stopped; there was nothing to save"


@contextmanager
def lock_folder(folder: Path, main: bool = True):
    """Holds the folder for this run; only the main process does. The system lets go of it however the process ends."""
    if not main:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115 (closed below; its errors are not those of the run)
    except OSError as error:
        raise ValueError(f"out={folder} cannot be written: {error.strerror or error}; choose another folder") from error
    with lock as file:
        try:
            # lockf, not flock: data workers must not inherit it, they outlive a killed run by some seconds
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ValueError(f"another process is training in {folder}; stop it, or choose another out=") from None
        except OSError:  # a file system without locks
            pass
        yield


class StopSignal:
    """Remembers Ctrl-C, SIGTERM and SIGUSR1, so that the run can save at the next step boundary.

    Ctrl-C raises KeyboardInterrupt when there is nothing to save yet, and when it is pressed a second time.

    Args:
        say: Whether to answer Ctrl-C with a line.

    Attributes:
        name: The signal that came.
        saves: Whether the run is at work, so that it saves and stops; set by the run.
    """

    def __init__(self, say: bool = True):
        self.name: str | None = None
        self.saves = False
        self._say, self._pressed = say, 0.0
        self._previous: dict = {}

    def __enter__(self) -> "StopSignal":
        for number in SIGNALS:
            # A shell starts jobs in the background with SIGINT ignored: Ctrl-C is not meant for them.
            if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number, _frame):
        # The second Ctrl-C comes as SIGTERM from torchrun.
        again = self.name == "SIGINT" and (number == signal.SIGINT or "TORCHELASTIC_RUN_ID" in os.environ)
        if again and self.saves:
            if time.monotonic() - self._pressed < ONE_PRESS_S:
                return
            raise KeyboardInterrupt(
                "Ctrl-C again: stopped at once, without saving; resume=auto continues from the last checkpoint"
            )
        if number == signal.SIGINT:
            if not self.saves:
                raise KeyboardInterrupt(NOTHING_TO_SAVE)
            self._pressed = time.monotonic()
            self._answer("Ctrl-C: saving after this step; press it again to stop now")
        self.name = signal.Signals(number).name

    def _answer(self, text: str):
        """Not with `print`, which may be at work where the signal came. A bar or `^C` may stand in the line."""
        if self._say:
            with suppress(OSError):
                os.write(2, f"{chr(10) if os.isatty(2) else ''}{text}\n".encode())


def write_marker(folder: Path, **facts):
    """Leaves the file that says this run stopped on a signal and can be resumed; launchers look for it."""
    write_text(folder / MARKER, json.dumps(facts) + "\n")


def read_marker(folder: Path) -> dict:
    """What `write_marker` left; empty if nothing did, or nothing that can be read."""
    with suppress(OSError, ValueError):
        facts = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return facts if isinstance(facts, dict) else {}
    return {}


def clear_marker(folder: Path):
    (folder / MARKER).unlink(missing_ok=True)


class BufferSnapshot:
    """The buffers of a model, to be put back: batch-norm statistics must not keep the NaN of a skipped step, nor move
    a second time when activation checkpointing runs a block again.

    Those in no state dict are constants and left out. The rest is copied into memory that is kept, one tensor a dtype,
    so that a few kernels do it however many buffers there are.
    """

    def __init__(self, model: nn.Module):
        saved = model.state_dict(keep_vars=True).keys()
        groups: dict[torch.dtype, list[Tensor]] = {}
        for name, buffer in model.named_buffers():
            if name in saved:
                groups.setdefault(buffer.dtype, []).append(buffer)
        self._groups = [(buffers, _Packed(buffers), _Packed(buffers)) for buffers in groups.values()]

    @torch.no_grad()
    def take(self) -> None:
        for buffers, copies, _ in self._groups:
            torch._foreach_copy_(copies.parts, buffers)

    @torch.no_grad()
    def restore(self) -> None:
        for buffers, copies, _ in self._groups:
            torch._foreach_copy_(buffers, copies.parts)

    @torch.no_grad()
    def restore_unless(self, kept: Tensor) -> None:
        """The same, decided on the device: `kept` is a truth value there."""
        for buffers, copies, now in self._groups:
            torch._foreach_copy_(now.parts, buffers)
            torch.where(kept, now.whole, copies.whole, out=now.whole)
            torch._foreach_copy_(buffers, now.parts)


class _Packed:
    """Copies of tensors of one dtype, side by side in one."""

    def __init__(self, tensors: list[Tensor]):
        self.whole = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        sizes = [tensor.numel() for tensor in tensors]
        parts = zip(self.whole.split(sizes), tensors, strict=True)
        self.parts = [part.view(tensor.shape) for part, tensor in parts]


@torch.no_grad()
def nonfinite_layers(model: nn.Module, images: Tensor) -> list[str]:
    """Runs a forward pass and names the layers whose output is not finite, in the order they ran.

    It runs on every process, whatever its images are: layers such as SyncBatchNorm wait for the other processes.
    """
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
    return names if torch.isfinite(images).all() else ["the input images"]

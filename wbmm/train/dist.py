"""Process groups: one process or many, each wait bounded in time, so that a dead rank ends the run."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as td
import torch.nn as nn
from torch import Tensor

__all__ = [
    "World",
    "all_sum",
    "broadcast_buffers",
    "broadcast_object",
    "check_complete",
    "gather_objects",
    "is_peer_failure",
    "pick_device",
    "setup",
    "sum_on_device",
]

NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

# What the backends say when another process is gone or stuck; their exception types do not tell it apart.
_PEER_FAILURES = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout", "nccl", "gloo")
_LOCAL_FAILURES = ("dataloader", "pin memory thread")  # of this process's own data workers, which time out and die too


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0

    def close(self):
        if td.is_initialized():
            td.destroy_process_group()


def setup(device: str = "auto", timeout: float = 600.0) -> World:
    """Reads torchrun's environment and joins the process group: nccl on CUDA, gloo on the CPU, none for one process."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    place = pick_device(device)
    if size > 1 and not td.is_initialized():
        _let_nccl_raise()
        options = {"device_id": place} if place.type == "cuda" else {}
        td.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout), **options)
    return World(rank, size, place)


def _let_nccl_raise() -> None:
    """Has NCCL's watchdog give up a stuck operation without ending the process, so that the error can be told.

    By default it ends the process from a thread of its own. 2 is torch's CleanUpOnly: the communicator is closed, what
    was under way ends with incomplete sums, which `check_complete` finds, and the next operation raises. torchrun sets
    1 where the user has not set anything. Other values are the user's.
    """
    if os.environ.get(NCCL_ERRORS, "1") == "1":
        os.environ[NCCL_ERRORS] = "2"


def pick_device(name: str) -> torch.device:
    """The device of this process; one that is not there is an error."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is not one that torch knows; valid: auto, cpu, cuda, cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported; valid: auto, cpu, cuda, cuda:0")
    if device.type == "cpu":
        return device
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device.index is not None and processes > 1:
        raise ValueError(
            f"device {name!r} would put all {processes} processes of this node on one GPU: use device=cuda, with which "
            "each takes its own"
        )
    if not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but torch finds no CUDA device here; use device=cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) if device.index is None else device.index)
    if device.index >= torch.cuda.device_count():
        raise ValueError(f"no CUDA device {device.index}: this node has {torch.cuda.device_count()}")
    torch.cuda.set_device(device)
    return device


def all_sum(values: list[float | Tensor], world: World) -> list[float]:
    """Sums each value over the processes."""
    *sums, processes = sum_on_device(values, world).tolist()
    check_complete(processes, world)
    return sums


def sum_on_device(values: list[float | Tensor], world: World) -> Tensor:
    """The sum of each value over the processes, and how many took part; without a wait for a GPU."""
    place = {"dtype": torch.float64, "device": world.device}
    # Not torch.tensor, which would copy a number from the host's memory and wait for that.
    numbers = (value.to(**place) if isinstance(value, Tensor) else torch.full((), value, **place) for value in values)
    total = torch.stack([*numbers, torch.ones((), **place)])
    if world.size > 1:
        td.all_reduce(total)
    return total


def check_complete(processes: float, world: World) -> None:
    """Raises unless all took part in a sum. NCCL, when it gives up on a process, leaves the others with a part."""
    if processes != world.size:
        raise RuntimeError(f"nccl gave up: a sum over {world.size} processes holds {processes:g}")


def broadcast_object(value, world: World):
    """Rank 0's `value`, on every rank."""
    if world.size == 1:
        return value
    holder = [value]
    td.broadcast_object_list(holder, src=0)
    return holder[0]


def gather_objects(value, world: World) -> list:
    """Every rank's `value`, on every rank."""
    if world.size == 1:
        return [value]
    values = [None] * world.size
    td.all_gather_object(values, value)
    return values


def broadcast_buffers(module: nn.Module, world: World):
    """Gives every rank rank 0's buffers (batch-norm statistics), the ones that are saved."""
    if world.size > 1:
        for buffer in module.buffers():
            td.broadcast(buffer, src=0)


def is_peer_failure(error: BaseException) -> bool:
    """Whether `error` comes from waiting for another process rather than from this one."""
    if isinstance(error, td.DistError):
        return True
    text = str(error).lower()
    local = any(part in text for part in _LOCAL_FAILURES)
    return isinstance(error, RuntimeError) and not local and any(part in text for part in _PEER_FAILURES)

"""Batches in a given order, from worker processes or another way to fetch samples, sent to a GPU ahead, and mixed."""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from timm.data.mixup import Mixup, mixup_target
from torch import Tensor
from torch.utils.data import DataLoader

from .augment import SampleDataset, send
from .order import MIX, Plan, hash64
from .settings import MixConfig
from .sources import BadImage

__all__ = [
    "SIGNALS",
    "BatchMixer",
    "EvalLoader",
    "Prefetcher",
    "TrainLoader",
    "WorkerFetch",
    "detach_worker",
    "end_with_parent",
    "starting_workers",
]

WORKER_TIMEOUT_S = 300  # of a worker that hangs, on a dead file system for instance
PREFETCHED = 1  # batches on their way to a GPU while one is worked on
PARENT_CHECK_S = 0.5
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # those that stop a run, which its data workers must outlive


class TrainLoader:
    """Training batches, one list of micro-batches an optimiser step.

    Args:
        plan: Which samples this rank reads, and when.
        fetch: `fetch(epoch, index arrays)` gives (images, labels) for each array, in order.
    """

    def __init__(self, plan: Plan, fetch):
        self.plan, self.fetch = plan, fetch
        self.steps_per_epoch = plan.steps

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[list[tuple[Tensor, Tensor]]]:
        if not 0 <= start_step <= self.steps_per_epoch:
            raise ValueError(f"start_step is {start_step}; an epoch has {self.steps_per_epoch} steps")
        batches = self.fetch(epoch, self.plan.batches(epoch, start_step))
        for _ in range(start_step, self.steps_per_epoch):
            yield [next(batches) for _ in range(self.plan.accumulation)]


class EvalLoader:
    """The share of the validation set of one rank: every image of the set is read by one rank, once.

    The last batch may be smaller and ranks may differ in their number of batches; nothing is padded.

    Attributes:
        size: Images in the whole set.
    """

    def __init__(self, size: int, batch: int, rank: int, world: int, fetch):
        self.size, self.batch, self.fetch = size, batch, fetch
        self.indices = np.arange(rank, size, world)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        chunks = (self.indices[start : start + self.batch] for start in range(0, len(self.indices), self.batch))
        yield from (batch for batch in self.fetch(0, chunks) if batch is not None)


class WorkerFetch:
    """Reads and transforms samples in worker processes (or in this one with `workers=0`).

    Args:
        dataset: Samples by (epoch, index).
        workers: How many processes.
        as_bytes: The samples are those of `ByteTransform`: hand out what `FinishBytes` takes, in page-locked memory
            for a copy to a GPU.
    """

    def __init__(self, dataset: SampleDataset, workers: int, as_bytes: bool = False):
        self.sampler = _Keys()
        self.loader = DataLoader(
            dataset,
            batch_sampler=self.sampler,
            num_workers=workers,
            collate_fn=_stack_bytes if as_bytes else _stack,
            pin_memory=as_bytes and torch.cuda.is_available(),
            persistent_workers=workers > 0,
            worker_init_fn=detach_worker,
            generator=torch.Generator(),  # its own: the loader draws a seed for its workers, which we do not use
            timeout=WORKER_TIMEOUT_S if workers else 0,
        )

    def __call__(self, epoch: int, batches: Iterable[np.ndarray]) -> Iterator[tuple[Tensor, Tensor]]:
        self.sampler.keys = ([(epoch, int(index)) for index in batch] for batch in batches)
        with starting_workers():
            return _in_one_line(iter(self.loader))


def _in_one_line(batches: Iterator) -> Iterator:
    """PyTorch puts the traceback into the message of a worker's error; of a bad image the last line says it all."""
    try:
        yield from batches
    except BadImage as error:
        text = str(error).rstrip().rpartition("\n")[2]
        raise BadImage(text.removeprefix(f"{BadImage.__module__}.BadImage: ")) from None


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
            if len(on_the_way) > PREFETCHED:
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


class _Keys:
    """The batch sampler of a loader whose workers live longer than an epoch: its list is set anew each time.

    It knows nothing of the loader's owner: in a cycle of references, DataLoader takes 5 s a worker to shut down.
    """

    keys: Iterable[list] = ()

    def __iter__(self):
        return iter(self.keys)


def _stack(samples: list):
    samples = [sample for sample in samples if sample is not None]
    if not samples:
        return None
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels, dtype=torch.int64)


def _stack_bytes(samples: list):
    samples = [sample for sample in samples if sample is not None]
    if not samples:
        return None
    pairs, labels = zip(*samples, strict=True)
    erased = [(index, *part) for index, (_, part) in enumerate(pairs) if part is not None]
    places = [(index, top, left, *part.shape[1:]) for index, top, left, part in erased]
    painted = torch.cat([part.flatten() for *_, part in erased]) if erased else torch.empty(0)
    return torch.stack([image for image, _ in pairs]), torch.tensor(labels, dtype=torch.int64), places, painted


@contextmanager
def starting_workers():
    """Around the start of data workers, which inherit that they get no signal before `detach_worker` has run.

    Ctrl-C in a terminal goes to all of its processes; workers never need it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def detach_worker(_worker: int = 0):
    """For a data worker, at its start: launchers signal the whole process group, or every process of a job, and a
    worker that dies of it takes the run down before it has saved."""
    end_with_parent()
    os.setpgid(0, 0)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        threading.Thread(target=_obey_parent, daemon=True).start()
    else:  # macOS has none: there a SIGTERM to every single process ends the workers
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def end_with_parent():
    """For a data worker, at its start: it ends within a second of a process that was killed.

    Otherwise it would sleep for ever with its memory where it cannot hand over what it has read, since the workers keep
    each other's pipes open. Not by `PR_SET_PDEATHSIG`: that means the thread that started the worker.
    """

    def watch(parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start()


def _obey_parent():
    """Ends this worker on its own process's SIGTERM alone. It cannot be ignored: Python sends it to workers that are
    left at its exit, after an error for instance, and then waits for them."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


class BatchMixer:
    """Mixes a batch and returns soft targets; with mixup and cutmix at 0, label smoothing alone.

    Args:
        mix: What is mixed, and how.
        num_classes: Width of the targets.
        seed: Of the run.
        rank: Of this process.
    """

    def __init__(self, mix: MixConfig, num_classes: int, seed: int, rank: int = 0):
        self.seed, self.rank, self.num_classes = seed, rank, num_classes
        self.smoothing = mix.label_smoothing
        self.mixup = None
        if (mix.mixup > 0 or mix.cutmix > 0) and mix.prob > 0:
            self.mixup = Mixup(
                mixup_alpha=mix.mixup,
                cutmix_alpha=mix.cutmix,
                prob=mix.prob,
                switch_prob=mix.switch_prob,
                mode=mix.mode,
                label_smoothing=mix.label_smoothing,
                num_classes=num_classes,
            )

    def __call__(
        self, images: torch.Tensor, targets: torch.Tensor, step: int, micro: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Images [B, C, H, W] (changed in place) and targets [B] to images and soft targets [B, num_classes]."""
        if self.mixup is None:
            return images, mixup_target(targets, self.num_classes, smoothing=self.smoothing)
        state = np.random.get_state()
        np.random.seed(int(hash64(self.seed, MIX, step, micro, self.rank)[0] >> np.uint64(32)))
        try:
            return self.mixup(images, targets)
        finally:
            np.random.set_state(state)

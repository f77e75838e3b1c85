"""Steps decided on the device, in each of two processes; `test_outcome.py` starts both with torchrun.

The runs follow each other in one process group, so that only one has to be started.
"""

import math
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from wbmm.train import dist, engine, outcome
from wbmm.train.config import load_config
from wbmm.train.fit import fit

RANK = int(os.environ["RANK"])
QUIET = ["log.every=1000"]


def poison(patch, steps, losses=()):
    """NaN images, or a NaN loss with good gradients, at the given steps, in the second process alone.

    The gradients of the images' NaN reach both processes. Of the loss's, the first only hears.
    """
    original, forward = engine.prepare, engine.forward

    def poisoned(run, batch, micro):
        images, targets = original(run, batch, micro)
        return (images * math.nan if RANK == 1 and run.position.step in steps else images), targets

    def lost(run, *args):
        loss = forward(run, *args)
        return loss + math.nan if RANK == 1 and run.position.step in losses else loss

    patch.setattr(engine, "prepare", poisoned)
    patch.setattr(engine, "forward", lost)


def count_reads(patch) -> list[str]:
    """What a step reads from tensors, but for the first, which is logged, and those at the end of an epoch."""
    found, inside = [], False

    def forbid(name):
        original = getattr(torch.Tensor, name)

        def read(tensor, *args, **kwargs):
            if inside:
                found.append(name)
            return original(tensor, *args, **kwargs)

        patch.setattr(torch.Tensor, name, read)

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
        forbid(name)
    step = engine.train_step

    def watched(run, *args):
        nonlocal inside
        inside = run.position.step % 8 not in (0, 1)
        step(run, *args)
        inside = False

    patch.setattr(engine, "train_step", watched)
    return found


def stop_at(patch, step):
    """SIGTERM to the second process alone."""
    original = engine.forward

    def interrupted(run, *args):
        if RANK == 1 and run.position.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(run, *args)

    patch.setattr(engine, "forward", interrupted)


def run(config: Path, name: str, *overrides: str):
    return fit(load_config(config, [f"out={config.parent / name}", *QUIET, *overrides]))


def main(config: Path) -> None:
    outcome.QUEUED = ("cuda", "cpu")
    dist.World.close = lambda world: None  # the group stays for the next run
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, {0, 2, 3, 9}, {6})
        reads = count_reads(patch)
        assert run(config, "device").status == "finished"
        assert not reads, f"a step reads from the device: {reads}"
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, {0, 2, 3, 9}, {6})
        patch.setattr(engine, "decides_on_device", lambda *_: False)
        assert run(config, "host").status == "finished"
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, {0, 2, 3, 9}, {6})
        stop_at(patch, 10)
        assert run(config, "stopped").status == "stopped"
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, {0, 2, 3, 9}, {6})
        assert run(config, "stopped", "resume=auto").status == "finished"
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, range(5, 100))
        with pytest.raises(FloatingPointError, match=r"step 7, .* the loss is nan, .*: the input images\. "):
            run(config, "bad", "max_skips=2")
    print(f"rank {RANK} is done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""What a conversion costs and gains: accuracy, agreement, size and latency, in one table."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from wbmm.bench.timing import time_interleaved
from wbmm.deploy.evaluate import Outputs, collect, top
from wbmm.deploy.runtime import open_runner
from wbmm.train.data.sources import Source

from .choose import quality

__all__ = ["HEADERS", "Measured", "Trial", "file_size", "measure"]

HEADERS = ("form", "file", "MB", "images", "top-1 %", "same top-1 as float32 %", "ms an image", "speed to float32")

PAUSE_S = 0.05  # the threads of one runtime spin for a while after a call, and would slow the next one down


@dataclass(frozen=True)
class Measured:
    """One form of a model.

    Attributes:
        file: its name.
        bytes: of the file.
        images: how many it was tried on.
        top1: per cent, None without labels.
        agreement: with the first form, per cent of images.
        noise: of the logits, relative to their spread.
        seconds: for one image; the median.
        speed: as a ratio to the first form.
    """

    file: str
    bytes: int
    images: int
    top1: float | None
    agreement: float
    noise: float
    seconds: float
    speed: float

    def row(self, label: str) -> list[str]:
        return [
            label,
            self.file,
            f"{self.bytes / 2**20:.2f}",
            str(self.images),
            "-" if self.top1 is None else f"{self.top1:.2f}",
            f"{self.agreement:.2f}",
            f"{1000 * self.seconds:.2f}",
            f"{self.speed:.2f}x",
        ]


def file_size(path: Path) -> int:
    """In bytes, an OpenVINO file with its weights."""
    weights = path.with_suffix(".bin")
    return path.stat().st_size + (weights.stat().st_size if path.suffix == ".xml" else 0)


@dataclass
class Trial:
    """The images that forms of a model are compared on.

    Attributes:
        labelled: a set to evaluate on, or None.
        others: `[N, C, H, W]`; compared on where there is no set, and timed with.
        workers, skip_bad: of reading the set.
    """

    labelled: Source | None
    others: Tensor
    workers: int = 0
    skip_bad: bool = False

    def outputs(self, path: Path) -> Outputs:
        runner = open_runner(path)
        if self.labelled is None:
            return Outputs(runner(self.others), torch.zeros(len(self.others), dtype=torch.int64), 0.0)
        return collect(runner, self.labelled, workers=self.workers, skip_bad=self.skip_bad, label=path.name)

    def accuracy(self, outputs: Outputs) -> float | None:
        return None if self.labelled is None else top(outputs, 1)


def measure(files: list[Path], trial: Trial, first: Outputs | None = None, rounds: int = 30) -> list[Measured]:
    """Runs files over the same images and times them in turn.

    Args:
        files: the first is what the others are compared with.
        first: its outputs, if they are known.
    """
    outputs = [first or trial.outputs(files[0]), *map(trial.outputs, files[1:])]
    image = trial.others[:1].contiguous()
    calls = {path: partial(open_runner(path), image) for path in files}
    timings = time_interleaved(calls, rounds=rounds, warmup=5, pause=PAUSE_S)
    rows = []
    for path, found in zip(files, outputs, strict=True):
        likeness = quality(found.logits, outputs[0].logits)
        seconds = timings[path].median
        rows.append(
            Measured(
                path.name,
                file_size(path),
                len(found.logits),
                trial.accuracy(found),
                likeness.agreement,
                likeness.noise,
                seconds,
                timings[files[0]].median / seconds,
            )
        )
    return rows

"""Forms of a model beside each other: size, accuracy, agreement and time of each file."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from wbmm.data.sources import Source
from wbmm.deploy.evaluate import Evaluation, collect, top
from wbmm.deploy.runtime import open_runner
from wbmm.io.files import file_size
from wbmm.timing import time_interleaved

from .choose import quality

__all__ = ["HEADERS", "ComparisonImages", "MeasuredFile", "measure_files"]

HEADERS = ("form", "file", "MB", "images", "top-1 %", "same top-1 as float32 %", "ms an image", "speed to float32")
PAUSE_S = 0.05  # the threads of one runtime spin for a while after a call, and would slow the next one down
DEVICE = "cpu"  # where OpenVINO and ONNX Runtime compute in INT8


@dataclass(frozen=True)
class MeasuredFile:
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


@dataclass
class ComparisonImages:
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

    def evaluate(self, path: Path) -> Evaluation:
        runner = open_runner(path, DEVICE)
        if self.labelled is None:
            return Evaluation(runner(self.others), torch.zeros(len(self.others), dtype=torch.int64), 0.0)
        return collect(runner, self.labelled, workers=self.workers, skip_bad=self.skip_bad, label=path.name)

    def accuracy(self, outputs: Evaluation) -> float | None:
        return None if self.labelled is None else top(outputs, 1)


def measure_files(
    files: list[Path], images: ComparisonImages, first: Evaluation | None = None, rounds: int = 30
) -> list[MeasuredFile]:
    """Runs files over the same images and times them in turn.

    Args:
        files: the first is what the others are compared with.
        first: its outputs, if they are known.
    """
    outputs = [first or images.evaluate(files[0]), *map(images.evaluate, files[1:])]
    image = images.others[:1].contiguous()
    calls = {path: partial(open_runner(path, DEVICE), image) for path in files}
    timings = time_interleaved(calls, rounds=rounds, warmup=5, pause=PAUSE_S, device=DEVICE)
    rows = []
    for path, found in zip(files, outputs, strict=True):
        likeness = quality(found.logits, outputs[0].logits)
        seconds = timings[path].median
        rows.append(
            MeasuredFile(
                path.name,
                file_size(path),
                len(found.logits),
                images.accuracy(found),
                likeness.agreement,
                likeness.noise,
                seconds,
                timings[files[0]].median / seconds,
            )
        )
    return rows

"""`wbmm eval`: accuracy of a file in any form, or of several beside each other; agreement, size and time of each."""

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from wbmm.data.classes import is_right
from wbmm.data.images import batches, match_classes, no_more_than, open_labelled
from wbmm.data.sources import Source, open_source
from wbmm.io.card import ModelCard
from wbmm.io.files import file_size
from wbmm.progress import progress_bar
from wbmm.text import render_table
from wbmm.timing import time_interleaved
from wbmm.train.config import load_config

from .export import add_runtime_argument, open_compiled
from .runtime import open_runner

__all__ = [
    "EXAMPLE",
    "FORM_HEADERS",
    "ComparisonImages",
    "Evaluation",
    "MeasuredFile",
    "Quality",
    "add_arguments",
    "add_data_arguments",
    "collect",
    "measure_files",
    "quality",
    "run",
    "top",
]

EXAMPLE = "wbmm eval runs/wbmm_t/best.pt wbmm_t.safetensors wbmm_t.onnx --data /data/imagenet"
HEADERS = ("file", "runs as", "images", "top-1 %", "top-5 %", "images/s")
COMPARED = ("same top-1 as the first %", "largest logit difference")
FORM_HEADERS = ("form", "file", "MB", "images", "top-1 %", "same top-1 as float32 %", "ms an image", "speed to float32")
PAUSE_S = 0.05  # the threads of one runtime spin for a while after a call, and would slow the next one down
WARMUP = 5  # rounds
DEVICE = "cpu"  # where OpenVINO and ONNX Runtime compute in INT8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models = "checkpoints, run folders, .onnx, .xml, .pt2, timm names"
    parser.add_argument("models", nargs="+", metavar="MODEL_OR_FILE", help=models)
    data = "split folders, class folders or a CSV file (default: the validation set of the run that the first is of)"
    parser.add_argument("--data", type=Path, metavar="DIR", help=data)
    add_data_arguments(parser)
    parser.add_argument("--limit", type=int, metavar="N", help="use this many images, equally many per class")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="the model's name, if a file does not say")
    parser.add_argument("--no-ema", dest="ema", action="store_false", help="the weights themselves, not their average")
    add_runtime_argument(parser)
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """What `wbmm eval` and `wbmm quantize` say about labelled images beside their folder."""
    kinds = "folder (default), idx, digits, tar, wds or hfds/NAME"
    parser.add_argument("--source", default="folder", help=f"how the data is stored: {kinds}")
    parser.add_argument("--split", default="val", help="which part of it to evaluate (default: val)")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1), help="processes that read images")
    parser.add_argument("--skip-bad", action="store_true", help="leave out images that cannot be read, and name them")


@dataclass
class Evaluation:
    """What a model said about a set.

    Attributes:
        logits: `[N, classes]`.
        labels: `[N]`.
        seconds: spent in the model, without reading.
        skipped: images that could not be read.
        indices: `[N]`, of the images in their source.
    """

    logits: Tensor
    labels: Tensor
    seconds: float
    skipped: int = 0
    indices: list[int] = field(default_factory=list)


def collect(runner, source, batch: int = 64, workers: int = 0, skip_bad: bool = False, label: str = "") -> Evaluation:
    """Runs a classifier over a whole set. A bad image is an error that names it, or is named and left out."""
    logits, labels, indices, seconds, skipped = [], [], [], 0.0, 0
    with progress_bar(len(source), label) as advance:
        for part in batches(source, runner.card, batch, workers):
            for error in part.errors.values():
                if not skip_bad:
                    raise ValueError(f"{error} (--skip-bad leaves such images out)")
                print(f"skipped: {error}", file=sys.stderr)
                skipped += 1
            if part.images is not None:
                if not logits:
                    runner(part.images)  # what is compiled or packed at the first call is not timed
                start = time.perf_counter()
                logits.append(runner(part.images).float().cpu())
                seconds += time.perf_counter() - start
                labels.append(part.labels)
                indices += part.indices
            advance(len(part.indices) + len(part.errors))
    if not logits:
        raise ValueError("none of the images can be read")
    outputs = Evaluation(torch.cat(logits), torch.cat(labels), seconds, skipped, indices)
    if not outputs.logits.isfinite().all():
        raise ValueError(f"{label}: the outputs are not finite for {_count_bad(outputs.logits)} images")
    return outputs


def _count_bad(logits: Tensor) -> int:
    return int((~logits.isfinite().all(1)).sum())


def top(outputs: Evaluation, k: int) -> float:
    """Top-k accuracy in per cent."""
    return 100 * is_right(outputs.logits, outputs.labels, k).double().mean().item()


def classifier(runner, name: str):
    """The runner, if it is of a classifier."""
    if runner.card.kind != "classifier" or not runner.card.num_classes:
        raise ValueError(f"{name} is not a classifier: {runner.card.describe()}")
    return runner


def run(args: argparse.Namespace) -> int:
    _check_numbers(args)
    runners = [
        classifier(open_compiled(name, args.device, args.model, args.ema, args.runtime), name) for name in args.models
    ]
    given = _own_data(args) or open_labelled(runners[0].card, args.data, args.source, args.split)
    sources, told = [], set()
    for name, runner in zip(args.models, runners, strict=True):
        sources.append(no_more_than(match_classes(runner.card, given), args.limit))
        if sources[-1].class_names != sources[0].class_names:
            raise ValueError(f"{name} has its classes in another order than {args.models[0]}: evaluate them apart")
        _say(f"{name}: {runner.card.describe()}", told)
        _say(f"transform: {runner.card.describe_transform()}", told)
    rows, reference = [], None
    for name, runner, source in zip(args.models, runners, sources, strict=True):
        outputs = collect(runner, source, args.batch, args.workers, args.skip_bad, Path(name).name)
        reference = reference or outputs
        rows.append([*_row(name, runner, outputs), *_compared(outputs, reference, runner.card)])
    headers = (*HEADERS, *COMPARED) if len(rows) > 1 else HEADERS
    print("\n" + render_table(headers, [row[: len(headers)] for row in rows], markdown=args.markdown))
    print(
        f"\nimages/s: the model alone, {args.batch} images at a time if the file takes them, one file after another; "
        "`wbmm bench` compares speed"
    )
    return 0


def _own_data(args: argparse.Namespace) -> Source | None:
    """The data of the run that the first model is of, where no other is named."""
    first = Path(args.models[0])
    config = (first if first.is_dir() else first.parent) / "config.yaml"
    if args.data is not None or args.source != "folder" or not config.is_file():
        return None
    data = load_config(config).data
    print(f"data: {args.split} of {data.root or data.source}, as in {config}")
    return open_source(
        data if args.split == "val" else replace(data, val_split=args.split), train=args.split == "train"
    )


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("batch", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value}: give 1 or more")
    if args.workers < 0:
        raise ValueError(f"--workers {args.workers}: give 0 or more")


def _say(line: str, told: set[str]) -> None:
    if line not in told:
        print(line)
        told.add(line)


def _row(name: str, runner, outputs: Evaluation) -> list[str]:
    count = len(outputs.labels)
    return [
        Path(name).name,
        runner.name + (f", batch {runner.batch}" if runner.batch else ""),
        f"{count}" + (f" ({outputs.skipped} skipped)" if outputs.skipped else ""),
        f"{top(outputs, 1):.2f}",
        f"{top(outputs, 5):.2f}" if runner.card.num_classes > 5 else "-",
        f"{count / outputs.seconds:.0f}" if outputs.seconds else "-",
    ]


def _compared(outputs: Evaluation, reference: Evaluation, card: ModelCard) -> list[str]:
    if outputs is reference:
        return ["-", "-"]
    if outputs.logits.shape != reference.logits.shape:
        raise ValueError(
            f"{card.describe()} gives {tuple(outputs.logits.shape)} outputs, the first file "
            f"{tuple(reference.logits.shape)}: they cannot be compared"
        )
    difference = (outputs.logits - reference.logits).abs().max().item()
    return [f"{quality(outputs.logits, reference.logits).agreement:.2f}", f"{difference:.1e}"]


@dataclass(frozen=True)
class Quality:
    """How near a quantised model is to its float one.

    Attributes:
        agreement: per cent of images with the same first class.
        noise: of the logits, relative to their spread over the classes; a mean over images.
    """

    agreement: float
    noise: float


USELESS = Quality(0.0, math.inf)


def quality(logits: Tensor, reference: Tensor) -> Quality:
    """Compares `[N, classes]` with the float model's."""
    if not logits.isfinite().all():
        return USELESS
    same = 100 * (logits.argmax(1) == reference.argmax(1)).double().mean().item()
    spread = (reference - reference.mean(1, keepdim=True)).norm(dim=1).clamp_min(1e-12)
    return Quality(same, ((logits - reference).norm(dim=1) / spread).mean().item())


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

    def evaluate(self, path: Path, precision: str = "f32") -> Evaluation:
        runner = open_runner(path, DEVICE, precision=precision)
        if self.labelled is None:
            return Evaluation(runner(self.others), torch.zeros(len(self.others), dtype=torch.int64), 0.0)
        return collect(runner, self.labelled, workers=self.workers, skip_bad=self.skip_bad, label=path.name)

    def accuracy(self, outputs: Evaluation) -> float | None:
        return None if self.labelled is None else top(outputs, 1)


def measure_files(
    files: list[Path],
    images: ComparisonImages,
    first: Evaluation | None = None,
    rounds: int = 30,
    precisions: Sequence[str] | None = None,
) -> list[MeasuredFile]:
    """Runs files over the same images and times them in turn.

    Args:
        files: the first is what the others are compared with.
        first: its outputs, if they are known.
        precisions: what each is computed in, as of `open_runner`; `f32` if not given.
    """
    forms = list(zip(files, precisions or ["f32"] * len(files), strict=True))
    outputs = [first or images.evaluate(*forms[0]), *(images.evaluate(*form) for form in forms[1:])]
    image = images.others[:1].contiguous()
    calls = {(path, used): partial(open_runner(path, DEVICE, precision=used), image) for path, used in forms}
    with progress_bar(rounds + WARMUP, "rounds of timing") as advance:
        timings = time_interleaved(calls, rounds, WARMUP, partial(advance, 1), PAUSE_S, DEVICE)
    rows = []
    for (path, used), found in zip(forms, outputs, strict=True):
        likeness = quality(found.logits, outputs[0].logits)
        seconds = timings[path, used].median
        rows.append(
            MeasuredFile(
                path.name,
                file_size(path),
                len(found.logits),
                images.accuracy(found),
                likeness.agreement,
                likeness.noise,
                seconds,
                timings[forms[0]].median / seconds,
            )
        )
    return rows

"""`wbmm eval`: accuracy of a file in any form, or of several beside each other, on labelled images."""

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wbmm.data.classes import is_right
from wbmm.data.images import batches, match_classes, no_more_than, open_labelled
from wbmm.io.card import ModelCard
from wbmm.progress import progress_bar
from wbmm.text import render_table

from .compiled import add_runtime_argument, open_compiled

__all__ = ["EXAMPLE", "Evaluation", "add_arguments", "add_data_arguments", "agreement", "collect", "run", "top"]

EXAMPLE = "wbmm eval runs/wbmm_t/best.pt wbmm_t.safetensors wbmm_t.onnx --data /data/imagenet"
HEADERS = ("file", "runs as", "images", "top-1 %", "top-5 %", "images/s")
COMPARED = ("same top-1 as the first %", "largest logit difference")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL_OR_FILE", help="checkpoints, .onnx, .xml, .pt2, timm names")
    parser.add_argument("--data", type=Path, metavar="DIR", help="the folder with the split folders or class folders")
    add_data_arguments(parser)
    parser.add_argument("--limit", type=int, metavar="N", help="so many images, equally many of each class")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="the model's name, where a file does not tell")
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
    """

    logits: Tensor
    labels: Tensor
    seconds: float
    skipped: int = 0


def collect(runner, source, batch: int = 64, workers: int = 0, skip_bad: bool = False, label: str = "") -> Evaluation:
    """Runs a classifier over a whole set. A bad image is an error that names it, or is named and left out."""
    logits, labels, seconds, skipped = [], [], 0.0, 0
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
            advance(len(part.indices) + len(part.errors))
    if not logits:
        raise ValueError("none of the images can be read")
    outputs = Evaluation(torch.cat(logits), torch.cat(labels), seconds, skipped)
    if not outputs.logits.isfinite().all():
        raise ValueError(f"{label}: the outputs are not finite for {_count_bad(outputs.logits)} images")
    return outputs


def _count_bad(logits: Tensor) -> int:
    return int((~logits.isfinite().all(1)).sum())


def top(outputs: Evaluation, k: int) -> float:
    """Top-k accuracy in per cent."""
    return 100 * is_right(outputs.logits, outputs.labels, k).double().mean().item()


def agreement(outputs: Evaluation, reference: Evaluation) -> float:
    """For how many images the first class is the same, in per cent."""
    return 100 * (outputs.logits.argmax(1) == reference.logits.argmax(1)).double().mean().item()


def classifier(runner, name: str):
    """The runner, if it is of a classifier."""
    if runner.card.kind != "classifier" or not runner.card.num_classes:
        raise ValueError(f"{name} is no classifier: {runner.card.describe()}")
    return runner


def run(args: argparse.Namespace) -> int:
    _check_numbers(args)
    runners = [
        classifier(open_compiled(name, args.device, args.model, args.ema, args.runtime), name) for name in args.models
    ]
    given = open_labelled(runners[0].card, args.data, args.source, args.split)
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
    return [f"{agreement(outputs, reference):.2f}", f"{difference:.1e}"]

"""`wbmm bench train`: speed of one training step (forward, loss, backward, AdamW) beside a baseline, and its memory.

`--preset paper` is the paper's ImageNet table: WBMM against UniRepLKNet, with the epoch that a step's time would give
on this machine beside the paper's time on eight A800.
"""

import argparse
from functools import partial

import torch

from wbmm.paper_tables import load_tables

from .memory import probe
from .results import Entry, Record, Result
from .setting import TRAINING_FORMS, TrainingStep, build, images_for
from .speed import Contest, Job, add_speed_arguments, check_numbers, contests, net_of, run_speed, time_each

__all__ = ["IMAGES", "epoch_seconds", "epoch_text", "measure", "paper_epochs", "run"]

EXAMPLE = "wbmm bench train --preset paper --sizes p t --out results/cpu"
DEFAULT = ("wbmm_t", "wbmm_t:plain-training", "unireplknet_t", "unireplknet_t:plain-training", "convnext_tiny")
PAIR = ("plain-training", "training")
IMAGES = 1_281_167  # of ImageNet-1K's training set
NOTE = (
    "a step is forward, cross entropy, backward and AdamW; channels-last, contiguous for the reference implementation "
    "unless a layout is said; ratios to the model of the column *ratio to* in the same interleaved run. Peak memory is "
    "of two steps in a process of their own. The epoch is extrapolated from the step: "
    f"{IMAGES:,} images, without reading or augmenting them. The paper's is of eight A800."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_speed_arguments(parser, DEFAULT, TRAINING_FORMS, ("paper",))
    parser.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        help="peak memory of a step, in a process of its own (default: with a preset)",
    )


def run(args: argparse.Namespace) -> int:
    check_numbers(args)
    groups = contests(args, DEFAULT, TRAINING_FORMS, PAIR)
    on_cuda = torch.device(args.device).type == "cuda"
    batches = args.batch or ([4] if args.quick else [128] if on_cuda and args.preset else [16])
    memory = bool(args.preset) if args.memory is None else args.memory
    return run_speed(args, "train", groups, batches, partial(measure, memory=memory), add_arguments, NOTE, _finish)


def measure(job: Job, memory: bool = False) -> dict[str, Result]:
    """Interleaved steps, and where asked for the peak of each."""
    images = torch.randn(job.batch, 3, *job.size)
    if job.args.compile:
        torch._dynamo.reset()  # or the second batch size would be compiled as a dynamic one

    def prepare(spec: str, layout: torch.memory_format) -> TrainingStep:
        model = build(spec, job.setting, job.size, layout)
        model = torch.compile(model) if job.args.compile else model
        return TrainingStep(model, images_for(spec, images, job.setting, layout), job.setting)

    found, _ = time_each(job, prepare, warmup=1)
    for spec, result in found.items():
        if memory and "seconds" in result:
            result["peak_mb"] = probe(spec, "step", job.size, job.batch, job.setting) / 2**20
    return found


def epoch_text(seconds: float) -> str:
    """Hours and minutes, or minutes and seconds of less than an hour."""
    seconds = round(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 60}:{seconds % 60:02d}"


def paper_epochs() -> dict[tuple[str, str], tuple[str, float]]:
    """The paper's time of an ImageNet epoch and GB, by (size, net)."""
    return {
        (row.model.rsplit("_", 1)[1], "UA" if row.large_kernel else net_of(row.model)): (
            row.paper["time"],
            float(row.paper["memory"]),
        )
        for name in ("imagenet", "base")
        for row in load_tables()[name].rows
    }


def _finish(record: Record, contest: Contest, entry: Entry) -> None:
    record["epoch"] = epoch_text(IMAGES / record["images_per_s"])
    paper = paper_epochs()
    own, other = ((contest.size, net_of(spec)) for spec in (record["model"], record["over"]))
    if own in paper and other in paper and (record["height"], record["width"]) == (224, 224):
        record["paper_epoch"], record["paper_memory_gb"] = paper[own]
        record["paper_ratio"] = epoch_seconds(paper[other][0]) / epoch_seconds(paper[own][0])


def epoch_seconds(text: str) -> int:
    """Of the paper's minutes and seconds."""
    minutes, seconds = text.split(":")
    return 60 * int(minutes) + int(seconds)

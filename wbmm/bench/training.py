"""`wbmm bench train`: speed of one training step (forward, loss, backward, AdamW) beside a baseline."""

import argparse

import torch
import torch.nn as nn

from .candidates import TRAINING_FORMS, TrainingStep, build, images_for
from .memory import probe
from .results import Record, add_speed_arguments, check_speed_arguments, finish, speed_record
from .setting import Setting

EXAMPLE = "wbmm bench train wbmm_t wbmm_t:plain-training unireplknet_t --batch 16 --memory"
DEFAULT = ("wbmm_t", "wbmm_t:plain-training", "unireplknet_t", "unireplknet_t:plain-training", "convnext_tiny")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_speed_arguments(parser, DEFAULT, TRAINING_FORMS, batch=[16])
    parser.add_argument("--memory", action="store_true", help="peak memory of a step, in a process of its own")


def run(args: argparse.Namespace) -> int:
    specs = check_speed_arguments(args, "train", TRAINING_FORMS)
    setting, size = Setting.from_args(args), tuple(args.size)
    models = {spec: build(spec, setting, size) for spec in specs}
    records = [record for batch in args.batch for record in measure(models, batch, args, setting)]
    if args.memory:
        for record in records:
            record["peak_mb"] = probe(record["model"], "step", size, record["batch"], setting) / 2**20
    note = (
        f"{size[0]}x{size[1]}, {'compiled' if args.compile else 'eager'}, {setting.describe()}; a step is forward, "
        "cross entropy, backward and AdamW; channels-last, contiguous for the reference implementation; ratios to "
        f"{args.baseline} in the same interleaved run of {args.rounds} rounds."
    )
    return finish(args, "train", records, setting, note)


def measure(models: dict[str, nn.Module], batch: int, args: argparse.Namespace, setting: Setting) -> list[Record]:
    """Interleaved steps at one batch size."""
    images = torch.randn(batch, 3, *args.size)
    if args.compile:
        torch._dynamo.reset()  # or the second batch size would be compiled as a dynamic one
        models = {spec: torch.compile(model) for spec, model in models.items()}
    steps = {spec: TrainingStep(model, images_for(spec, images, setting), setting) for spec, model in models.items()}
    timings = setting.time(steps, f"batch {batch}, rounds", args.rounds, warmup=1, pause=args.pause)
    return [speed_record(spec, batch, timing, timings[args.baseline]) for spec, timing in timings.items()]

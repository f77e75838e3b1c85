"""`wbmm bench train`: speed of one training step (forward, loss, backward, AdamW) beside a baseline."""

import argparse

import torch
import torch.nn as nn

from wbmm.timing import time_interleaved

from .candidates import TRAINING_FORMS, TrainingStep, build, images_for
from .memory import probe
from .results import Record, add_speed_arguments, check_speed_arguments, finish, progress, speed_record

EXAMPLE = "wbmm bench train wbmm_t wbmm_t:plain-training unireplknet_t --batch 16 --memory"
DEFAULT = ("wbmm_t", "wbmm_t:plain-training", "unireplknet_t", "unireplknet_t:plain-training", "convnext_tiny")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_speed_arguments(parser, DEFAULT, TRAINING_FORMS, batch=[16])
    parser.add_argument("--memory", action="store_true", help="peak memory of a step, in a process of its own")


def run(args: argparse.Namespace) -> int:
    specs = check_speed_arguments(args, "train", TRAINING_FORMS)
    models = {spec: build(spec, args.device, tuple(args.size)) for spec in specs}
    records = [record for batch in args.batch for record in measure(models, batch, args)]
    if args.memory:
        for record in records:
            peak = probe(record["model"], "step", tuple(args.size), record["batch"], args.device)
            record["peak_mb"] = peak / 2**20
    note = (
        f"{args.size[0]}x{args.size[1]}, float32, {'compiled' if args.compile else 'eager'}, {args.device}; a step is "
        "forward, cross entropy, backward and AdamW; channels-last, contiguous for the straightforward layout; ratios "
        f"to {args.baseline} in the same interleaved run of {args.rounds} rounds."
    )
    return finish(args, "train", records, note)


def measure(models: dict[str, nn.Module], batch: int, args: argparse.Namespace) -> list[Record]:
    """Interleaved steps at one batch size."""
    images = torch.randn(batch, 3, *args.size, device=args.device)
    if args.compile:
        torch._dynamo.reset()  # or the second batch size would be compiled with a free one
        models = {spec: torch.compile(model) for spec, model in models.items()}
    steps = {spec: TrainingStep(model, images_for(spec, images)) for spec, model in models.items()}
    timings = time_interleaved(steps, rounds=args.rounds, warmup=1, on_round=progress, pause=args.pause)
    return [speed_record(spec, batch, timing, timings[args.baseline]) for spec, timing in timings.items()]

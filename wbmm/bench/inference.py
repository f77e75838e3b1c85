"""`wbmm bench model`: inference speed of whole models beside a baseline, and their share of the machine's limit."""

import argparse
from functools import partial

import torch
import torch.nn as nn

from .candidates import FORMS, build, images_for
from .limit import add_shares, count_gmacs, product_calls
from .results import Record, add_speed_arguments, check_speed_arguments, finish, speed_record
from .setting import Setting

EXAMPLE = "wbmm bench model wbmm_t:compact wbmm_t:plain convnext_tiny --batch 1 16 --limit"
DEFAULT = (
    "wbmm_t:compact",
    "wbmm_t:dense",
    "wbmm_t:plain",
    "unireplknet_t:compact",
    "unireplknet_t:plain",
    "convnext_tiny",
    "convnextv2_tiny",
    "swin_tiny_patch4_window7_224",
    "inception_next_tiny",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_speed_arguments(parser, DEFAULT, tuple(FORMS), batch=[1, 16])
    parser.add_argument(
        "--limit", action="store_true", help="measure matrix products in the same run, and each model's share of them"
    )


def run(args: argparse.Namespace) -> int:
    specs = check_speed_arguments(args, "model", tuple(FORMS))
    setting, size = Setting.from_args(args), tuple(args.size)
    models = {spec: build(spec, setting, size) for spec in specs}
    gmacs = {spec: count_gmacs(model, size) for spec, model in models.items()} if args.limit else {}
    records, limits = [], []
    for batch in args.batch:
        found, text = measure(models, batch, args, setting, gmacs)
        records += found
        limits += [text] if text else []
    note = (
        f"{size[0]}x{size[1]}, {'compiled' if args.compile else 'eager'}, {setting.describe()}; channels-last, "
        f"contiguous for the reference implementation; ratios to {args.baseline} in the same interleaved run of "
        f"{args.rounds} rounds. {' '.join(limits)}"
    ).rstrip()
    return finish(args, "model", records, setting, note)


def measure(
    models: dict[str, nn.Module], batch: int, args: argparse.Namespace, setting: Setting, gmacs: dict[str, float]
) -> tuple[list[Record], str]:
    """Interleaved forward passes at one batch size; with `gmacs`, matrix products among them.

    Returns:
        A record a model, and a sentence about the limit.
    """
    images = torch.randn(batch, 3, *args.size)
    if args.compile:
        torch._dynamo.reset()  # or the second batch size would be compiled as a dynamic one
        models = {spec: torch.compile(model) for spec, model in models.items()}
    with torch.inference_mode():
        calls = {
            spec: partial(setting.forward, model, images_for(spec, images, setting)) for spec, model in models.items()
        }
        products = product_calls(models.values(), batch, args.size, setting) if gmacs else {}
        timings = setting.time({**calls, **products}, f"batch {batch}, rounds", args.rounds, pause=args.pause)
    base = timings[args.baseline]
    records = [speed_record(spec, batch, timings[spec], base) for spec in models]
    if not gmacs:
        return records, ""
    return records, add_shares(records, gmacs, {shape: timings[shape] for shape in products}, batch)

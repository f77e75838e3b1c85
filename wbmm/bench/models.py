"""`wbmm bench model`: inference speed of whole models beside a baseline."""

import argparse
import sys

import timm
import torch
import torch.nn as nn
from torch import Tensor

import wbmm
from wbmm.text import render_table

from .timing import Timing, time_interleaved

EXAMPLE = "wbmm bench model wbmm_t:compact convnext_tiny --batch 1 16"
HEADERS = ("model", "batch", "images/s (median)", "images/s (best)", "ratio of medians", "ratio of bests")
FORMS = ("training", "compact", "dense")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", default=["wbmm_t:compact"], help=f"NAME or NAME:FORM; {', '.join(FORMS)}")
    parser.add_argument("--baseline", default="convnext_tiny", help="ratios are to this model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--size", type=int, nargs=2, default=(224, 224), metavar=("H", "W"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--markdown", action="store_true")


def build(spec: str, device: str) -> nn.Module:
    """A model in eval mode and channels-last memory from `NAME` or `NAME:FORM`, with random weights."""
    name, _, form = spec.partition(":")
    form = form or "training"
    if form not in FORMS:
        raise ValueError(f"{spec!r}: form {form!r} is none of {', '.join(FORMS)}")
    if not timm.is_model(name):
        raise ValueError(f"{spec!r}: timm knows no model {name!r}; see `wbmm list` and timm.list_models()")
    model = timm.create_model(name).eval()
    if form != "training":
        model = wbmm.fuse(model, form)
    return model.to(device=device, memory_format=torch.channels_last)


def measure(models: dict[str, nn.Module], image: Tensor, rounds: int) -> dict[str, Timing]:
    """Interleaved forward passes without gradients."""

    def show() -> None:
        if sys.stderr.isatty():
            print(".", end="", file=sys.stderr, flush=True)

    with torch.inference_mode():
        calls = {name: lambda model=model: model(image) for name, model in models.items()}
        return time_interleaved(calls, rounds=rounds, on_round=show)


def run(args: argparse.Namespace) -> int:
    specs = list(dict.fromkeys([args.baseline, *args.models]))
    models = {spec: build(spec, args.device) for spec in specs}
    rows = []
    for batch in args.batch:
        image = torch.randn(batch, 3, *args.size, device=args.device).contiguous(memory_format=torch.channels_last)
        timings = measure(models, image, args.rounds)
        base = timings[args.baseline]
        rows += [
            [
                spec,
                str(batch),
                f"{batch / timing.median:.2f}",
                f"{batch / timing.best:.2f}",
                f"{base.median / timing.median:.2f}x",
                f"{base.best / timing.best:.2f}x",
            ]
            for spec, timing in timings.items()
        ]
    print(render_table(HEADERS, rows, markdown=args.markdown))
    threads = torch.get_num_threads()
    print(f"\n{args.size[0]}x{args.size[1]}, float32, channels-last, eager, {args.device}, {threads} threads, "
          f"torch {torch.__version__}; ratios to {args.baseline} in the same interleaved run")  # fmt: skip
    return 0

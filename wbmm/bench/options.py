"""Arguments that the benchmarks of speed share, and what they do with their records."""

import argparse
import sys
from collections.abc import Sequence

from .forms import split
from .report import Record, add_output_arguments, check_out, present

__all__ = ["add_speed_arguments", "check_speed_arguments", "finish", "progress"]


def add_speed_arguments(
    parser: argparse.ArgumentParser, models: Sequence[str], forms: Sequence[str], batch: list[int]
) -> None:
    parser.add_argument(
        "models",
        nargs="*",
        default=list(models),
        metavar="NAME[:FORM]",
        help=f"forms: {', '.join(forms)} (default: {' '.join(models)})",
    )
    parser.add_argument("--baseline", default="convnext_tiny", help="ratios are to this model (default: convnext_tiny)")
    parser.add_argument("--batch", type=int, nargs="+", default=batch)
    parser.add_argument("--size", type=int, nargs=2, default=(224, 224), metavar=("H", "W"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of rest before each call (default: 0)")
    parser.add_argument("--compile", action="store_true", help="torch.compile each model; compiling is not timed")
    parser.add_argument("--device", default="cpu")
    add_output_arguments(parser)


def check_speed_arguments(args: argparse.Namespace, bench: str, forms: tuple[str, ...]) -> list[str]:
    """The models to build, the baseline first, each once; an error before anything is built."""
    if min(*args.batch, args.rounds, *args.size) < 1 or args.pause < 0:
        raise ValueError(
            f"--batch {args.batch}, --size {tuple(args.size)}, --rounds {args.rounds}, --pause {args.pause}: expected "
            "at least 1, and no pause below 0"
        )
    specs = list(dict.fromkeys([args.baseline, *args.models]))
    for spec in specs:
        split(spec, forms)
    if args.out is not None:
        check_out(args.out, bench)
    return specs


def progress() -> None:
    """A dot a round, where somebody looks on."""
    if sys.stderr.isatty():
        print(".", end="", file=sys.stderr, flush=True)


def finish(args: argparse.Namespace, bench: str, records: Sequence[Record], note: str) -> int:
    """`present` with what the benchmarks of speed share."""
    setting = {
        "height": args.size[0],
        "width": args.size[1],
        "rounds": args.rounds,
        "baseline": args.baseline,
        "compiled": args.compile,
        "device": args.device,
    }
    return present(args, bench, records, setting, _argv(args), note)


def _argv(args: argparse.Namespace) -> list[str]:
    """The arguments that measure the same again."""
    argv = [*args.models, "--baseline", args.baseline, "--batch", *map(str, args.batch)]
    argv += ["--size", *map(str, args.size), "--rounds", str(args.rounds)]
    if args.pause:
        argv += ["--pause", str(args.pause)]
    if args.device != "cpu":
        argv += ["--device", args.device]
    for flag in ("compile", "limit", "memory"):
        argv += [f"--{flag}"] if getattr(args, flag, False) else []
    return argv

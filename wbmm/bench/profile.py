"""`wbmm bench profile`: where the time of a model goes, by operator, in eager PyTorch, in OpenVINO or in training."""

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import torch

from .candidates import FORMS, TRAINING_FORMS, TrainingStep, build, images_for, split
from .results import Record, add_output_arguments, check_out, present, progress

EXAMPLE = "wbmm bench profile wbmm_t:compact --runtime openvino --batch 1"
RUNTIMES = ("eager", "openvino", "training")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="NAME[:FORM]", help="default: wbmm_t:compact; for training, wbmm_t")
    parser.add_argument("--runtime", choices=RUNTIMES, default="eager")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--size", type=int, nargs=2, default=(224, 224), metavar=("H", "W"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--top", type=int, default=12, help="operators to list; the others are one row (default: 12)")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if min(args.batch, args.rounds, args.top, *args.size) < 1:
        raise ValueError(
            f"--batch {args.batch}, --size {tuple(args.size)}, --rounds {args.rounds}, --top {args.top}: each must be "
            "at least 1"
        )
    training = args.runtime == "training"
    args.model = args.model or ("wbmm_t" if training else "wbmm_t:compact")
    split(args.model, TRAINING_FORMS if training else tuple(FORMS))
    if args.out is not None:
        check_out(args.out, "profile")
    seconds, calls = {"eager": _eager, "training": _eager, "openvino": _openvino}[args.runtime](args)
    records = rows(seconds, calls, args.rounds, args.batch, args.top)
    note = (
        f"{args.model}, {args.runtime}, batch {args.batch}, {args.size[0]}x{args.size[1]}, float32, mean of "
        f"{args.rounds} rounds. What measures each operator slows the whole down: read shares here, speeds elsewhere."
    )
    setting = {"height": args.size[0], "width": args.size[1], "rounds": args.rounds, "runtime": args.runtime}
    argv = [args.model, "--runtime", args.runtime, "--batch", str(args.batch), "--size", *map(str, args.size)]
    argv += ["--rounds", str(args.rounds), "--top", str(args.top)]
    return present(args, "profile", records, setting, argv, note, "operator")


def rows(seconds: Counter, calls: Counter, rounds: int, batch: int, top: int) -> list[Record]:
    """The operators that take longest, and one row for all others.

    Args:
        seconds, calls: by operator, over all rounds.
    """
    whole = sum(seconds.values())
    listed = [name for name, _ in seconds.most_common(top)]
    others = [name for name in seconds if name not in listed]
    groups = [(name, [name]) for name in listed] + ([(f"{len(others)} others", others)] if others else [])
    return [
        {
            "model": label,
            "batch": batch,
            "calls": sum(calls[name] for name in names) / rounds,
            "ms": sum(seconds[name] for name in names) / rounds * 1e3,
            "part": sum(seconds[name] for name in names) / whole,
        }
        for label, names in groups
    ]


def _eager(args: argparse.Namespace) -> tuple[Counter, Counter]:
    """PyTorch's own profiler: the time of an operator without the operators that it calls."""
    from torch.profiler import ProfilerActivity, profile

    model = build(args.model, "cpu", tuple(args.size))
    images = images_for(args.model, torch.randn(args.batch, 3, *args.size))
    step = TrainingStep(model, images) if args.runtime == "training" else lambda: model(images)
    with torch.set_grad_enabled(args.runtime == "training"):
        step()
        step()
        with profile(activities=[ProfilerActivity.CPU]) as found:
            for _ in range(args.rounds):
                step()
                progress()
    seconds, calls = Counter(), Counter()
    for event in found.key_averages():
        seconds[event.key] += event.self_cpu_time_total * 1e-6
        calls[event.key] += event.count
    return seconds, calls


def _openvino(args: argparse.Namespace) -> tuple[Counter, Counter]:
    """OpenVINO's own counters, for one request of the whole batch with all threads."""
    from wbmm.deploy.export import export_model
    from wbmm.deploy.runtime import openvino_model, read_openvino
    from wbmm.io.card import card_of

    model = build(args.model, "cpu", tuple(args.size))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.xml"
        export_model(model, path, card_of(model), size=tuple(args.size), batch=args.batch)
        request = openvino_model(read_openvino(path), count=True).create_infer_request()
    images = torch.randn(args.batch, 3, *args.size).numpy()
    seconds, calls = Counter(), Counter()
    for i in range(args.rounds + 2):
        request.infer([images])
        progress()
        for node in request.profiling_info if i >= 2 else ():
            if node.real_time.total_seconds() > 0:
                seconds[f"{node.node_type}, {node.exec_type}"] += node.real_time.total_seconds()
                calls[f"{node.node_type}, {node.exec_type}"] += 1
    return seconds, calls

"""`wbmm bench profile`: where the time of a model goes, by operator, in eager PyTorch, in training or in OpenVINO."""

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from wbmm.deploy.runtime import openvino_model, read_openvino
from wbmm.io.card import card_of
from wbmm.progress import progress_bar

from .results import Record, add_output_arguments, check_out, present
from .runtime import converted_file
from .setting import FORMS, TRAINING_FORMS, Setting, TrainingStep, add_setting_arguments, build, images_for, split

EXAMPLE = "wbmm bench profile wbmm_t:compact --runtime openvino --batch 1"
RUNTIMES = ("eager", "openvino", "training")
HINTS = {"float32": "f32", "bfloat16": "bf16"}  # what OpenVINO calls them
WARMUP = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="NAME[:FORM]", help="default: wbmm_t:compact; for training, wbmm_t")
    parser.add_argument("--runtime", choices=RUNTIMES, default="eager")
    parser.add_argument(
        "--int8", action="store_true", help="of OpenVINO: the model in INT8 (--dtype bfloat16: in bf16)"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--size", type=int, nargs=2, default=(224, 224), metavar=("H", "W"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--top", type=int, default=12, help="operators to list; the others are one row (default: 12)")
    add_setting_arguments(parser)
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
    setting = Setting.from_args(args)
    _check_openvino(args, setting)
    seconds, calls = _openvino(args, setting) if args.runtime == "openvino" else _pytorch(args, setting)
    records = rows(seconds, calls, args.rounds, args.batch, args.top)
    note = (
        f"{args.model}, {args.runtime}, batch {args.batch}, {args.size[0]}x{args.size[1]}, "
        f"{'INT8, ' * args.int8}{setting.describe()}, mean of {args.rounds} rounds; time on the "
        f"{'GPU' if setting.on_cuda else 'CPU'}. What measures each operator slows the whole down: read "
        "shares here, speeds elsewhere."
    )
    columns = {"height": args.size[0], "width": args.size[1], "rounds": args.rounds, "runtime": args.runtime}
    columns["int8"] = args.int8
    columns |= setting.columns()
    argv = [args.model, "--runtime", args.runtime, "--batch", str(args.batch), "--size", *map(str, args.size)]
    argv += ["--rounds", str(args.rounds), "--top", str(args.top), *setting.argv(), *["--int8"] * args.int8]
    return present(args, "profile", records, columns, argv, note, "operator")


def _check_openvino(args: argparse.Namespace, setting: Setting) -> None:
    if args.runtime != "openvino":
        if args.int8:
            raise ValueError(f"--int8 is of --runtime openvino, not of {args.runtime}")
        return
    if setting.device != "cpu" or setting.autocast or setting.dtype not in HINTS:
        raise ValueError(f"{' '.join(setting.argv())}: OpenVINO is profiled on the CPU in {' or '.join(HINTS)}")


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


def _pytorch(args: argparse.Namespace, setting: Setting) -> tuple[Counter, Counter]:
    """Seconds and calls by operator, from PyTorch's profiler, over all rounds."""
    training = args.runtime == "training"
    model = build(args.model, setting, tuple(args.size))
    images = images_for(args.model, torch.randn(args.batch, 3, *args.size), setting)
    one_pass = TrainingStep(model, images, setting) if training else partial(setting.forward, model, images)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.on_cuda else [])]
    with setting.running(), torch.set_grad_enabled(training):
        for _ in range(WARMUP):
            one_pass()
        with profile(activities=activities) as found, progress_bar(args.rounds, "rounds") as advance:
            for _ in range(args.rounds):
                one_pass()
                advance(1)
            if setting.on_cuda:
                torch.cuda.synchronize(setting.device)
    return operator_times(found.key_averages(), setting.on_cuda)


def operator_times(events: Iterable, on_cuda: bool) -> tuple[Counter, Counter]:
    """Seconds and calls of each operator, without the operators that it calls.

    Args:
        events: averages of PyTorch's profiler.
        on_cuda: count the time of the kernels that an operator has launched, not the CPU's time of launching them.
    """
    seconds, calls, kernels = Counter(), Counter(), 0.0
    for event in events:
        if on_cuda and event.device_type != DeviceType.CPU:  # the same kernels, by their own names
            kernels += 0.0 if event.is_user_annotation else event.self_device_time_total * 1e-6
            continue
        taken = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        if taken or not on_cuda:
            seconds[event.key] += taken * 1e-6
            calls[event.key] += event.count
    outside = kernels - sum(seconds.values())
    if outside > 1e-3 * kernels:
        seconds["kernels outside operators"] = outside
    return seconds, calls


def _openvino(args: argparse.Namespace, setting: Setting) -> tuple[Counter, Counter]:
    """OpenVINO's own counters, for one request of the whole batch with all threads."""
    model = build(args.model, size=tuple(args.size))
    model.card = card_of(model)
    with tempfile.TemporaryDirectory() as folder:
        precision = "int8" if args.int8 else "float32"
        path = converted_file(model, "openvino", precision, tuple(args.size), Path(folder) / "model")
        network = read_openvino(path)
        network.reshape([args.batch, 3, *args.size])
        request = openvino_model(network, precision=HINTS[setting.dtype], count=True).create_infer_request()
    images = torch.randn(args.batch, 3, *args.size).numpy()
    seconds, calls = Counter(), Counter()
    for i in range(WARMUP + args.rounds):
        request.infer([images])
        for node in request.profiling_info if i >= WARMUP else ():
            if node.real_time.total_seconds() > 0:
                seconds[f"{node.node_type}, {node.exec_type}"] += node.real_time.total_seconds()
                calls[f"{node.node_type}, {node.exec_type}"] += 1
    return seconds, calls

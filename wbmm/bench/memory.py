"""`wbmm bench memory`: peak memory in inference and in a training step, each measured in a process of its own."""

import argparse
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import timm
import torch
import torch.nn as nn
from torch import Tensor

from wbmm.models.fuse import fuse
from wbmm.text import render_table

from .results import say
from .setting import CPU, Setting, TrainingStep, add_setting_arguments, build, images_for

EXAMPLE = "wbmm bench memory wbmm_t_hier --size 800 1333 --batch 1"
HEADERS = ("model", "input", "what", "peak, MiB", "ratio to training")
MODES = {
    "inference": "inference, fused",
    "training": "training step",
    "checkpointing": "training step, activation checkpointing",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", default=["wbmm_t_hier"], help="timm names; features alone, no classifier")
    parser.add_argument("--size", type=int, nargs=2, default=(800, 1333), metavar=("H", "W"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    add_setting_arguments(parser)
    parser.add_argument("--markdown", action="store_true")


def run(args: argparse.Namespace) -> int:
    if args.batch < 1 or min(args.size) < 1:
        raise ValueError(f"--size {args.size}, --batch {args.batch}: each must be at least 1")
    unknown = [name for name in args.models if not timm.is_model(name)]
    if unknown:
        raise ValueError(f"timm knows no model {unknown[0]!r}; see `wbmm list` and timm.list_models()")
    setting, rows = Setting.from_args(args), []
    for name in args.models:
        peaks = {mode: probe(name, mode, tuple(args.size), args.batch, setting) for mode in args.modes}
        base = peaks.get("training")
        for mode, peak in peaks.items():
            ratio = f"{peak / base:.2f}x" if base else "--"
            where = f"{args.batch}x3x{args.size[0]}x{args.size[1]}"
            rows.append([name, where, MODES[mode], f"{peak / 2**20:.0f}", ratio])
    print(render_table(HEADERS, rows, markdown=args.markdown))
    what = "allocated by PyTorch" if setting.on_cuda else "resident, above the process with its libraries"
    print(f"\n{setting.describe()}, each in a process of its own; {what}: weights, gradients and activations")
    return 0


def probe(
    name: str, mode: str, size: tuple[int, int], batch: int, setting: Setting = CPU, args: dict | None = None
) -> int:
    """Peak bytes of one pass in a fresh process.

    Args:
        name: timm name; with the mode `step`, NAME or NAME:FORM.
        mode: one of `MODES`; or `step`, the steps of `wbmm bench train`, classifier and optimiser included.
        args: of `timm.create_model`, for the mode `step`.
    """
    say(f"memory of {name}, {MODES.get(mode, mode)}, batch {batch}")
    arguments = json.dumps(
        {"name": name, "mode": mode, "size": size, "batch": batch, "args": args, "setting": setting.columns()}
    )
    command = [sys.executable, "-m", "wbmm.bench.memory", arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        reason = result.stderr.strip().splitlines()[-1:] or ["it was killed, for lack of memory perhaps"]
        raise ValueError(f"{name}, {MODES.get(mode, mode)}: the process ended with {result.returncode}: {reason[0]}")
    return int(result.stdout.strip().splitlines()[-1])


def resident() -> tuple[int, int]:
    """Bytes that this process holds now, and the most that it has held."""
    status = Path("/proc/self/status")
    if status.is_file():
        text = status.read_text()
        now, peak = (int(re.search(rf"{key}:\s+(\d+) kB", text)[1]) * 1024 for key in ("VmRSS", "VmHWM"))
        return now, peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS
    return peak, peak


def measure(name: str, mode: str, size: tuple[int, int], batch: int, setting: Setting, args: dict | None = None) -> int:
    """Peak bytes of one pass, in this process; the arguments are `probe`'s."""
    setting.apply()
    torch.nn.functional.conv2d(torch.zeros(1, 1, 3, 3), torch.zeros(1, 1, 3, 3))  # the libraries' own buffers
    before, _ = resident()
    with setting.running():
        one_pass = _one_pass(name, mode, torch.randn(batch, 3, *size), setting, args)
        if mode == "step" or setting.on_cuda:
            one_pass()  # makes the optimiser's state, the matrices that inference keeps and the libraries' workspaces
        if setting.on_cuda:
            torch.cuda.reset_peak_memory_stats(setting.device)
        one_pass()
    if setting.on_cuda:
        return torch.cuda.max_memory_allocated(setting.device)
    return resident()[1] - before


def _one_pass(name: str, mode: str, images: Tensor, setting: Setting, args: dict | None = None) -> Callable[[], None]:
    """What is measured, as a call."""
    if mode == "step" and args is not None:
        return TrainingStep(setting.place(timm.create_model(name, **args)), setting.place(images), setting)
    if mode == "step":
        model = build(name, setting, tuple(images.shape[2:]))
        return TrainingStep(model, images_for(name, images, setting), setting)
    model = timm.create_model(name, num_classes=0, global_pool="")
    model = fuse(model.eval()) if mode == "inference" else model.train()
    model, images = (setting.place(item, torch.contiguous_format) for item in (model, images))
    if mode == "inference":
        return _inference_pass(model, images, setting)
    model.set_grad_checkpointing(mode == "checkpointing")
    return _training_pass(model, images, setting)


def _inference_pass(model: nn.Module, images: Tensor, setting: Setting) -> Callable[[], None]:
    @torch.inference_mode()
    def one_pass() -> None:
        with setting.autocasting():
            model.forward_intermediates(images, intermediates_only=True)

    return one_pass


def _training_pass(model: nn.Module, images: Tensor, setting: Setting) -> Callable[[], None]:
    def one_pass() -> None:
        model.zero_grad()  # as a step of training begins
        with setting.autocasting():
            maps = model.forward_intermediates(images, intermediates_only=True)
        sum(part.float().mean() for part in maps).backward()

    return one_pass


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    print(measure(**arguments | {"setting": Setting(**arguments["setting"])}))

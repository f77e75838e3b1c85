"""`wbmm bench runtime`: one model in eager and compiled PyTorch, ONNX Runtime, OpenVINO and INT8, side by side."""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import timm
import torch
import torch.nn as nn

from wbmm.io.files import load_model
from wbmm.models.fuse import fuse
from wbmm.timing import time_interleaved

from .limit import add_shares, count_gmacs, product_calls
from .results import Record, add_output_arguments, check_out, present, speed_record

EXAMPLE = "wbmm bench runtime wbmm_t --batch 1 16"
RUNTIMES = ("eager", "compiled", "onnxruntime", "openvino", "int8")
PAUSE_S = 0.05  # the threads of one runtime spin for a while after a call, and would slow the next one down
CALIBRATION = 8  # images; how INT8 is calibrated changes its accuracy, not its speed

Call = Callable[[], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="wbmm_t", help="a model's name, or a checkpoint")
    parser.add_argument("--baseline", default="convnext_tiny", help="ratios are to this model in eager PyTorch")
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES, default=list(RUNTIMES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--size", type=int, nargs=2, metavar=("H", "W"), help="image size (default: the model's)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--limit", action="store_true", help="measure matrix products in the same run, and each runtime's share of them"
    )
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if min(*args.batch, args.rounds) < 1:
        raise ValueError(f"--batch {args.batch}, --rounds {args.rounds}: each must be at least 1")
    if args.out is not None:
        check_out(args.out, "runtime")
    models = {"": _fused(_open(args.model)), f"{args.baseline}, ": _open(args.baseline)}
    size = tuple(args.size or models[""].card.input_size[1:])
    rows, limits = [], []
    with tempfile.TemporaryDirectory() as folder:
        files = _files(models, args, size, Path(folder))
        for batch in args.batch:
            found, text = _measure(models, files, args, (batch, models[""].card.input_size[0], *size))
            rows += found
            limits += [text] if text else []
    note = (
        f"{models[''].card.describe()}; {size[0]}x{size[1]}, {_versions()}; ratios to {args.baseline} in eager PyTorch "
        f"in the same interleaved run of {args.rounds} rounds. {' '.join(limits)}"
    ).rstrip()
    setting = {"height": size[0], "width": size[1], "rounds": args.rounds, "baseline": args.baseline}
    return present(args, "runtime", rows, setting, _argv(args, size), note, "runtime")


def _argv(args: argparse.Namespace, size: tuple[int, int]) -> list[str]:
    """The arguments that measure the same again."""
    argv = [args.model, "--baseline", args.baseline, "--runtimes", *args.runtimes, "--batch", *map(str, args.batch)]
    argv += ["--size", *map(str, size), "--rounds", str(args.rounds)]
    return [*argv, "--limit"] if args.limit else argv


def _open(name: str) -> nn.Module:
    """A model in eval mode with its card; by a name its weights are random, which changes no speed."""
    from wbmm.io.card import card_of

    if Path(name).is_file():
        return load_model(name)
    if not timm.is_model(name):
        raise ValueError(f"{name!r} is neither a file nor a model that timm knows; see `wbmm list`")
    model = timm.create_model(name).eval()
    model.card = card_of(model)
    return model


def _fused(model: nn.Module) -> nn.Module:
    from wbmm.io.card import form_of

    fused = fuse(model)
    fused.card = model.card.replace(form=form_of(fused))
    return fused


def _files(models: dict[str, nn.Module], args: argparse.Namespace, size: tuple[int, int], folder: Path) -> dict:
    """(prefix, runtime) to the file that it runs, with a free batch size."""
    from wbmm.deploy.export import export_model
    from wbmm.deploy.quantize.with_openvino import OpenVino

    files = {}
    for number, (prefix, model) in enumerate(models.items()):
        wanted = [name for name in args.runtimes if not prefix or name == "openvino"]
        for name, suffix in (("onnxruntime", ".onnx"), ("openvino", ".xml")):
            if name in wanted or (name == "openvino" and "int8" in wanted):
                _say(f"exporting {prefix}{name}")
                path = folder / f"{number}{suffix}"
                export_model(model, path, model.card, size=size, dynamic_batch=True)
                files[prefix, name] = path
        if "int8" in wanted:
            _say("quantising")
            path = folder / f"{number}.int8.xml"
            images = torch.randn(CALIBRATION, model.card.input_size[0], *size)
            OpenVino(files[prefix, "openvino"], model.card).quantize(images, set(), path)
            files[prefix, "int8"] = path
    return {key: path for key, path in files.items() if key[1] in args.runtimes}


def _measure(
    models: dict[str, nn.Module], files: dict, args: argparse.Namespace, shape: tuple
) -> tuple[list[Record], str]:
    """Records of one batch size, and a sentence about the limit if that is asked for."""
    baseline = f"{args.baseline}, eager"
    calls = {baseline: _torch_call(models[f"{args.baseline}, "], shape)}
    if "eager" in args.runtimes:
        calls["eager"] = _torch_call(models[""], shape)
    if "compiled" in args.runtimes:
        _say("compiling")
        torch._dynamo.reset()
        calls["compiled"] = _torch_call(torch.compile(models[""]), shape)
    for (prefix, name), path in files.items():
        calls[f"{prefix}{name}"] = _onnx_call(path, shape) if name == "onnxruntime" else _openvino_call(path, shape)
    _say(f"batch {shape[0]}: {', '.join(calls)}")
    products = product_calls(models.values(), shape[0], shape[2:], "cpu") if args.limit else {}
    timings = time_interleaved({**calls, **products}, rounds=args.rounds, pause=PAUSE_S)
    records = [speed_record(name, shape[0], timings[name], timings[baseline]) for name in calls]
    if not args.limit:
        return records, ""
    counts = {prefix: count_gmacs(model, shape[2:]) for prefix, model in models.items()}
    own = {name: counts[f"{args.baseline}, " if name.startswith(f"{args.baseline}, ") else ""] for name in calls}
    own.pop("int8", None)  # it multiplies other numbers than the limit is of
    return records, add_shares(records, own, {shape: timings[shape] for shape in products}, shape[0])


def _torch_call(model: nn.Module, shape: tuple) -> Call:
    model = model.to(memory_format=torch.channels_last)
    image = torch.randn(shape).contiguous(memory_format=torch.channels_last)

    @torch.inference_mode()
    def call() -> object:
        return model(image)

    return call


def _onnx_call(path: Path, shape: tuple) -> Call:
    from wbmm.deploy.runtime import onnx_session

    session = onnx_session(path)
    feed = {session.get_inputs()[0].name: torch.randn(shape).numpy()}
    return lambda: session.run(None, feed)


def _openvino_call(path: Path, shape: tuple) -> Call:
    from wbmm.deploy.runtime import open_runner

    runner, images = open_runner(path), torch.randn(shape)
    return lambda: runner(images)


def _versions() -> str:
    from wbmm.machine import versions

    found = versions("onnxruntime", "openvino", "nncf")
    return ", ".join(f"{name} {found[name]}" for name in ("torch", "onnxruntime", "openvino", "nncf") if name in found)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)

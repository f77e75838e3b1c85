"""`wbmm bench runtime`: one model in eager and compiled PyTorch, ONNX Runtime, OpenVINO and INT8, side by side."""

import argparse
import importlib.util
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn as nn
from torch import Tensor

from wbmm.deploy.export import export_model
from wbmm.deploy.quantize.with_openvino import OpenVino
from wbmm.deploy.runtime import onnx_session, open_runner
from wbmm.extras import need
from wbmm.io.card import card_of, form_of
from wbmm.io.files import load_model
from wbmm.machine import versions
from wbmm.models.fuse import fuse

from .limit import add_shares, count_gmacs, product_calls
from .results import Record, add_output_arguments, check_out, present, say, speed_record
from .setting import Setting, add_setting_arguments

EXAMPLE = "wbmm bench runtime wbmm_t --batch 1 16"
RUNTIMES = ("eager", "compiled", "onnxruntime", "tensorrt", "openvino", "int8")
BY_PYTORCH = ("eager", "compiled")
BY_OPENVINO = ("openvino", "int8")  # on the CPU, wherever the others run
PROVIDERS = {"onnxruntime": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}  # on a GPU
PAUSE_S = 0.05  # the threads of one runtime spin for a while after a call, and would slow the next one down
CALIBRATION = 8  # images; how INT8 is calibrated changes its accuracy, not its speed

Call = Callable[[], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="wbmm_t", help="a model's name, or a checkpoint")
    parser.add_argument("--baseline", default="convnext_tiny", help="ratios are to this model in eager PyTorch")
    parser.add_argument(
        "--runtimes", nargs="+", choices=RUNTIMES, help="default: all that the device and --dtype allow"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--size", type=int, nargs=2, metavar=("H", "W"), help="image size (default: the model's)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--limit", action="store_true", help="measure matrix products in the same run, and each runtime's share of them"
    )
    add_setting_arguments(parser)
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if min(*args.batch, args.rounds) < 1:
        raise ValueError(f"--batch {args.batch}, --rounds {args.rounds}: each must be at least 1")
    if args.out is not None:
        check_out(args.out, "runtime")
    setting = Setting.from_args(args)
    runtimes = choose_runtimes(args.runtimes, setting)
    models = {"": fused_with_card(open_named(args.model)), f"{args.baseline}, ": open_named(args.baseline)}
    size = tuple(args.size or models[""].card.input_size[1:])
    rows, limits = [], []
    with tempfile.TemporaryDirectory() as folder:
        files = _export(models, runtimes, size, Path(folder))
        models = {prefix: setting.place(model) for prefix, model in models.items()}
        for batch in args.batch:
            calls = _calls(models, runtimes, files, (batch, models[""].card.input_size[0], *size), setting)
            found, text = _measure(calls, models, args, batch, size, setting)
            rows += found
            limits += [text] if text else []
    note = (
        f"{models[''].card.describe()}; {size[0]}x{size[1]}, {setting.describe()}, {_versions()}; ratios to "
        f"{args.baseline} in eager PyTorch in the same interleaved run of {args.rounds} rounds. {' '.join(limits)}"
    ).rstrip()
    columns = {"height": size[0], "width": size[1], "rounds": args.rounds, "baseline": args.baseline}
    argv = [args.model, "--baseline", args.baseline, "--runtimes", *runtimes, "--batch", *map(str, args.batch)]
    argv += ["--size", *map(str, size), "--rounds", str(args.rounds), *setting.argv(), *["--limit"] * args.limit]
    return present(args, "runtime", rows, columns | setting.columns(), argv, note, "runtime")


def choose_runtimes(asked: list[str] | None, setting: Setting) -> list[str]:
    """Those asked for, or all that the setting allows; an error if one of those asked for cannot run so."""
    for name in asked or ():
        why = _refusal(name, setting)
        if why is not None:
            raise ValueError(f"--runtimes {name}: {why}")
    return asked or [name for name in RUNTIMES if _refusal(name, setting) is None and _is_default(name, setting)]


def _refusal(runtime: str, setting: Setting) -> str | None:
    """Why a runtime cannot compute as the setting says; None if it can."""
    if setting.dtype != "float32" and runtime not in BY_PYTORCH:
        return f"files are exported in float32; with --dtype {setting.dtype}, expected {' or '.join(BY_PYTORCH)}"
    if runtime == "tensorrt" and not setting.on_cuda:
        return "it runs on a GPU: add --device cuda"
    if runtime == "tensorrt" and setting.precision == "ieee":
        return "it computes in TF32, and ONNX Runtime offers no option against that: use --precision tf32"
    return None


def _is_default(runtime: str, setting: Setting) -> bool:
    """On a CPU all runtimes are; on a GPU PyTorch, and what the installed ONNX Runtime has for it."""
    if not setting.on_cuda or runtime in BY_PYTORCH:
        return True
    if runtime in BY_OPENVINO or importlib.util.find_spec("onnxruntime") is None:
        return False
    return PROVIDERS[runtime] in need("onnxruntime").get_available_providers()


def open_named(name: str) -> nn.Module:
    """A model in eval mode with its card; by a name its weights are random, which changes no speed."""
    if Path(name).is_file():
        return load_model(name)
    if not timm.is_model(name):
        raise ValueError(f"{name!r} is neither a file nor a model that timm knows; see `wbmm list`")
    model = timm.create_model(name).eval()
    model.card = card_of(model)
    return model


def fused_with_card(model: nn.Module) -> nn.Module:
    fused = fuse(model)
    fused.card = model.card.replace(form=form_of(fused))
    return fused


def _export(
    models: dict[str, nn.Module], runtimes: list[str], size: tuple[int, int], folder: Path
) -> dict[tuple[str, str], Path]:
    """(prefix, runtime) to the file that it runs, with a dynamic batch size; the baseline has OpenVINO's alone."""
    files = {}
    for number, (prefix, model) in enumerate(models.items()):
        wanted = [name for name in runtimes if name not in BY_PYTORCH and (not prefix or name == "openvino")]
        suffixes = {".xml" if name in BY_OPENVINO else ".onnx" for name in wanted}
        paths = {suffix: folder / f"{number}{suffix}" for suffix in sorted(suffixes)}
        for path in paths.values():
            say(f"exporting {prefix}{path.suffix}")
            export_model(model, path, model.card, size=size, dynamic_batch=True)
        for name in wanted:
            files[prefix, name] = paths[".xml" if name in BY_OPENVINO else ".onnx"]
        if "int8" in wanted:
            say("quantising")
            files[prefix, "int8"] = folder / f"{number}.int8.xml"
            images = torch.randn(CALIBRATION, model.card.input_size[0], *size)
            OpenVino(paths[".xml"], model.card).quantize(images, set(), files[prefix, "int8"])
    return files


def _calls(
    models: dict[str, nn.Module],
    runtimes: list[str],
    files: dict[tuple[str, str], Path],
    shape: tuple[int, int, int, int],
    setting: Setting,
) -> dict[str, Call]:
    """What is timed at one batch size, by the name of its row; the baseline in eager PyTorch comes first."""
    net, (prefix, baseline) = models[""], list(models.items())[1]
    calls = {f"{prefix}eager": torch_call(baseline, shape, setting)}
    if "eager" in runtimes:
        calls["eager"] = torch_call(net, shape, setting)
    if "compiled" in runtimes:
        torch._dynamo.reset()
        calls["compiled"] = torch_call(torch.compile(net), shape, setting)
    for (prefix, name), path in files.items():
        if name in BY_OPENVINO:
            label = f"{prefix}{name}, on the CPU" if setting.on_cuda else f"{prefix}{name}"
            calls[label] = partial(open_runner(path), torch.randn(shape))
        else:
            calls[f"{prefix}{name}"] = onnx_call(path, name, shape, setting)
    return calls


def _measure(
    calls: dict[str, Call],
    models: dict[str, nn.Module],
    args: argparse.Namespace,
    batch: int,
    size: tuple[int, int],
    setting: Setting,
) -> tuple[list[Record], str]:
    """Records of one batch size, and a sentence about the limit if that is asked for."""
    say(f"batch {batch}: {', '.join(calls)}")
    products = product_calls(models.values(), batch, size, setting) if args.limit else {}
    timings = setting.time({**calls, **products}, f"batch {batch}, rounds", args.rounds, pause=PAUSE_S)
    baseline = timings[next(iter(calls))]
    records = [speed_record(name, batch, timings[name], baseline) for name in calls]
    if not args.limit:
        return records, ""
    counts = {prefix: count_gmacs(model, size) for prefix, model in models.items()}
    # The limit is of this device and type: INT8 multiplies other numbers, and OpenVINO runs on the CPU.
    own = {
        name: counts[f"{args.baseline}, " if name.startswith(f"{args.baseline}, ") else ""]
        for name in calls
        if name != "int8" and not name.endswith("on the CPU")
    }
    return records, add_shares(records, own, {shape: timings[shape] for shape in products}, batch)


def torch_call(model: nn.Module, shape: tuple[int, int, int, int], setting: Setting) -> Call:
    images = setting.place(torch.randn(shape))

    @torch.inference_mode()
    def call() -> object:
        return setting.forward(model, images)

    return call


def onnx_call(path: Path, runtime: str, shape: tuple[int, int, int, int], setting: Setting) -> Call:
    """On a GPU, from and to its memory, as PyTorch is timed."""
    tensorrt, tf32 = runtime == "tensorrt", setting.precision == "tf32"
    session = onnx_session(path, setting.device, tensorrt=tensorrt, tf32=tf32)
    name, images = session.get_inputs()[0].name, torch.randn(shape)
    if not setting.on_cuda:
        feed = {name: images.numpy()}
        return lambda: session.run(None, feed)
    images, gpu = images.to(setting.device), torch.device(setting.device).index or 0
    binding = session.io_binding()
    binding.bind_input(name, "cuda", gpu, np.float32, shape, images.data_ptr())
    for output in session.get_outputs():
        binding.bind_output(output.name, "cuda", gpu)
    return partial(_run_bound, session, binding, images)


def _run_bound(session: object, binding: object, images: Tensor) -> None:
    """`images` are where the binding points to; they are passed so that they stay alive."""
    session.run_with_iobinding(binding)


def _versions() -> str:
    found = versions("onnxruntime", "openvino", "nncf")
    return ", ".join(f"{name} {found[name]}" for name in ("torch", "onnxruntime", "openvino", "nncf") if name in found)

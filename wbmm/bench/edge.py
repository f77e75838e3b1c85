"""`wbmm bench model --preset edge`: the paper's table of an edge device, through the runtimes that are installed.

On a CPU that is INT8 by OpenVINO and by ONNX Runtime, on a GPU half precision by PyTorch, ONNX Runtime and TensorRT.
Both nets run in the same cell, fused, from files of the same exporter.
"""

import argparse
import importlib.util
import shlex
import tempfile
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import torch

from wbmm.deploy.runtime import open_runner
from wbmm.extras import need

from .results import (
    Cell,
    Entry,
    Record,
    Result,
    RunLog,
    check_out,
    plan_text,
    present,
    run_cells,
    speed_record,
    typed_argv,
)
from .runtime import FORMATS, PAUSE_S, PROVIDERS, converted_file, fused_with_card, onnx_call, open_named, torch_call
from .setting import Setting
from .speed import QUICK, SIZES, net_of, paper_model_speeds

__all__ = ["EDGE_RUNTIMES", "add_arguments", "available", "measure", "run"]

# name of a row's runtime: on which device, the packages that it needs, and the paper's column
EDGE_RUNTIMES = {
    "openvino-int8": ("cpu", ("openvino", "nncf"), "Orin Nano CPU"),
    "onnxruntime-int8": ("cpu", ("onnx", "onnxruntime"), "Orin Nano CPU"),
    "torch-fp16": ("cuda", (), "Orin Nano GPU"),
    "onnxruntime-fp16": ("cuda", ("onnx", "onnxruntime"), "Orin Nano GPU"),
    "tensorrt-fp16": ("cuda", ("onnx", "onnxruntime"), "Orin Nano GPU"),
}
PX, BATCHES = (224, 512), {"cpu": (1, 4), "cuda": (4, 16)}
NOTE = (
    "Fused, both nets in the same interleaved run; ratios are WBMM over UniRepLKNet. INT8 is post-training, static and "
    "per channel, calibrated on noise, which changes accuracy and not speed. The paper's are of a Jetson Orin Nano."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runtimes", nargs="+", choices=EDGE_RUNTIMES, help="of --preset edge (default: those that can run here)"
    )


def available(runtime: str, setting: Setting) -> str | None:
    """None, or why a runtime cannot be used here."""
    device, packages, _ = EDGE_RUNTIMES[runtime]
    if device != torch.device(setting.device).type:
        return f"it is for --device {device}"
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        return f"it needs {missing[0]}: pip install 'wbmm[export]'"
    provider = PROVIDERS.get(runtime.removesuffix("-fp16")) if device == "cuda" and packages else None
    if provider and provider not in need("onnxruntime").get_available_providers():
        return f"this onnxruntime has no {provider}"
    return None


def run(args: argparse.Namespace, add_all: Callable[[argparse.ArgumentParser], None]) -> int:
    setting = Setting.from_args(args)
    if args.out is not None:
        check_out(args.out, "edge")
    argv = typed_argv(add_all, args)
    for name in args.runtimes or ():
        why = available(name, setting)
        if why is not None:
            raise ValueError(f"--runtimes {name}: {why}")
    runtimes = args.runtimes or [name for name in EDGE_RUNTIMES if available(name, setting) is None]
    if not runtimes:
        raise ValueError("--preset edge: no runtime for it is installed; pip install 'wbmm[export]'")
    rounds = min(args.rounds, QUICK["rounds"]) if args.quick else args.rounds
    device = "cuda" if setting.on_cuda else "cpu"
    cells = [
        _cell(runtime, size, side, batch, rounds, setting)
        for runtime in runtimes
        for size in args.sizes or (QUICK["sizes"] if args.quick else SIZES)
        for side in args.px or (QUICK["px"] if args.quick else PX)
        for batch in args.batch or BATCHES[device]
    ]
    cells.sort(key=lambda cell: cell.work)
    log = RunLog(args.out, "edge", shlex.join(["wbmm", "bench", "model", *argv]), args.device, args.fresh)
    if args.dry_run:
        print(plan_text(cells, log))
        return 0
    records = [record for entry in run_cells(cells, log, args.budget) for record in _records(entry)]
    return present(args, "edge", records, {"rounds": rounds, **setting.columns()}, argv, NOTE)


def _cell(runtime: str, size: str, side: int, batch: int, rounds: int, setting: Setting) -> Cell:
    values = {"runtime": runtime, "size": size, "height": side, "width": side, "batch": batch, "device": setting.device}
    names = [f"{family}_{size}" for family in ("wbmm", "unireplknet")]
    weight = {"p": 1.5, "n": 2.7, "t": 4.8, "s": 9, "b": 16}[size]
    return Cell(
        values, names, partial(measure, names, runtime, side, batch, rounds, setting), weight * batch * side * side
    )


def measure(names: list[str], runtime: str, side: int, batch: int, rounds: int, setting: Setting) -> dict[str, Result]:
    """Both nets in turn."""
    shape = (batch, 3, side, side)
    calls = {name: _call(name, runtime, shape, setting) for name in names}
    timings = setting.time(calls, f"{runtime}, {side}x{side}, batch {batch}, rounds", rounds, pause=PAUSE_S)
    return {name: {"seconds": list(timing.seconds)} for name, timing in timings.items()}


def _call(name: str, runtime: str, shape: tuple[int, int, int, int], setting: Setting) -> Callable[[], object]:
    if runtime == "torch-fp16":
        half = Setting(setting.device, "float16", precision=setting.precision)
        return torch_call(half.place(fused_with_card(open_named(name))), shape, half)
    path = _file(name, runtime, shape[2])
    if runtime == "openvino-int8":
        return partial(open_runner(path), torch.randn(shape))
    return onnx_call(path, runtime.removesuffix("-fp16").removesuffix("-int8"), shape, setting)


@lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()


@lru_cache
def _file(name: str, runtime: str, side: int) -> Path:
    """The exported and converted file of a net, with a dynamic batch size."""
    engine, precision = runtime.split("-")
    path = Path(_folder().name) / f"{name}-{side}"
    return converted_file(fused_with_card(open_named(name)), FORMATS[engine], precision, (side, side), path)


def _records(entry: Entry) -> list[Record]:
    paper, cell = paper_model_speeds("edge"), entry.cell
    machine, base = EDGE_RUNTIMES[cell["runtime"]][2], f"unireplknet_{cell['size']}"
    found = []
    for name in entry.results:
        record = speed_record(f"{name}, {cell['runtime']}", cell["batch"], entry.timing(name), entry.timing(base))
        record |= {"image": f"{cell['height']}x{cell['width']}", "size": cell["size"], "runtime": cell["runtime"]}
        own, other = (
            paper.get((machine, cell["size"], net_of(n), cell["height"], cell["batch"])) for n in (name, base)
        )
        if own and other:
            record |= {"paper_images_per_s": own, "paper_ratio": own / other}
        found.append(record)
    return found

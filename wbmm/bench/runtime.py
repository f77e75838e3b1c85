"""`wbmm bench runtime`: models side by side in every runtime and precision, as one interleaved run."""

import argparse
import copy
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn as nn
from torch import Tensor

from wbmm.data.images import match_classes, no_more_than, open_labelled
from wbmm.deploy.evaluate import collect, quality, top
from wbmm.deploy.export import export_model
from wbmm.deploy.optimize import compile_frozen
from wbmm.deploy.quantize.convert import BACKENDS, float_layers, read_calibration
from wbmm.deploy.runtime import Runner, onnx_session, open_runner, torch_runner
from wbmm.extras import need
from wbmm.io.card import card_of, form_of
from wbmm.io.files import load_model, run_checkpoint
from wbmm.machine import versions
from wbmm.models.fuse import fuse
from wbmm.models.wbmm import WBMM

from .limit import add_shares, count_gmacs, product_calls
from .results import Record, add_output_arguments, check_out, data_name, present, say, speed_record
from .setting import Setting, add_setting_arguments

EXAMPLE = "wbmm bench runtime wbmm_t --runtimes openvino --precisions float32 bf16 int8 --batch 1"
RUNTIMES = ("eager", "compiled", "onnxruntime", "tensorrt", "openvino")
PRECISIONS = ("float32", "bf16", "int8")
BY_PYTORCH = ("eager", "compiled")
FORMATS = {"openvino": "openvino", "onnxruntime": "onnx", "tensorrt": "onnx"}  # runtime: its files
PROVIDERS = {"onnxruntime": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}  # on a GPU
PAUSE_S = 0.05  # the threads of one runtime spin for a while after a call, and would slow the next one down
CALIBRATION = 8  # images of noise, without --data: how INT8 is calibrated changes its accuracy, not its speed

Call = Callable[[], object]


@dataclass(frozen=True)
class Way:
    """A runtime and what it computes in, one of `PRECISIONS`."""

    runtime: str
    precision: str

    def __str__(self) -> str:
        return self.runtime if self.precision == "float32" else f"{self.runtime}, {self.precision}"

    def setting(self, setting: Setting) -> Setting:
        """The setting in which PyTorch computes so."""
        return replace(setting, dtype="bfloat16") if self.precision == "bf16" else setting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", default=["wbmm_t"], metavar="MODEL", help="names or checkpoints")
    parser.add_argument(
        "--baseline", default="convnext_tiny", help="ratios are to this model in the same runtime and precision"
    )
    parser.add_argument(
        "--runtimes",
        nargs="+",
        choices=RUNTIMES,
        help="compiled is torch.compile with frozen weights (default: all that the device and --dtype allow)",
    )
    parser.add_argument(
        "--precisions",
        nargs="+",
        choices=PRECISIONS,
        default=["float32"],
        help="each in the runtimes that have it: bf16 in PyTorch and OpenVINO, int8 in OpenVINO and ONNX Runtime",
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--size", type=int, nargs=2, metavar=("H", "W"), help="image size (default: the model's)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="labelled images: accuracy, agreement with float32, and calibration"
    )
    parser.add_argument("--n", type=int, default=128, help="images of --data to calibrate INT8 on (default: 128)")
    parser.add_argument("--images", type=int, metavar="N", help="images of --data to evaluate on (default: all)")
    parser.add_argument(
        "--limit", action="store_true", help="measure matrix products in the same run, and each runtime's share of them"
    )
    add_setting_arguments(parser)
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if min(*args.batch, args.rounds, args.n, args.images or 1) < 1:
        raise ValueError(
            f"--batch {args.batch}, --rounds {args.rounds}, --n {args.n}, --images {args.images}: each must be at "
            "least 1"
        )
    if args.out is not None:
        check_out(args.out, "runtime")
    setting = Setting.from_args(args)
    ways = choose_ways(args.runtimes, args.precisions, setting)
    models = {name: fused_with_card(open_named(name)) for name in dict.fromkeys([*args.models, args.baseline])}
    size = tuple(args.size or models[args.models[0]].card.input_size[1:])
    rows, limits = [], []
    with tempfile.TemporaryDirectory() as folder:
        contest = RuntimeContest(models, ways, size, setting, Path(folder), args.data, args.n)
        facts = contest.accuracy(args.images) if args.data else {}
        for batch in args.batch:
            found, text = _measure(contest, args, batch)
            rows += [record | facts.get(key, {}) for key, record in found.items()]
            limits += [text] if text else []
    columns = {"height": size[0], "width": size[1], "rounds": args.rounds, "baseline": args.baseline}
    note = _note(args, models, size, setting, limits)
    return present(args, "runtime", rows, columns | setting.columns(), _argv(args, ways, size, setting), note)


def _note(
    args: argparse.Namespace, models: dict[str, nn.Module], size: tuple[int, int], setting: Setting, limits: list[str]
) -> str:
    data = f"; accuracy and agreement with float32 in PyTorch on {data_name(args.data)}" if args.data else ""
    return (
        f"{'; '.join(model.card.describe() for model in models.values())}; {size[0]}x{size[1]}, {setting.describe()}, "
        f"{_versions()}; ratios to {args.baseline} in the same runtime and precision, all in one interleaved run of "
        f"{args.rounds} rounds{data}. {' '.join(limits)}"
    ).rstrip()


def _argv(args: argparse.Namespace, ways: Sequence[Way], size: tuple[int, int], setting: Setting) -> list[str]:
    runtimes, precisions = (dict.fromkeys(getattr(way, key) for way in ways) for key in ("runtime", "precision"))
    argv = [*args.models, "--baseline", args.baseline, "--runtimes", *runtimes, "--precisions", *precisions]
    argv += ["--batch", *map(str, args.batch), "--size", *map(str, size), "--rounds", str(args.rounds)]
    if args.data:
        argv += ["--data", data_name(args.data), "--n", str(args.n)]
        argv += ["--images", str(args.images)] if args.images else []
    return [*argv, *setting.argv(), *["--limit"] * args.limit]


def choose_ways(asked: list[str] | None, precisions: Sequence[str], setting: Setting) -> list[Way]:
    """The runtimes asked for, or all that the setting allows, in each precision that they have.

    Raises:
        ValueError: a runtime that was asked for has none of the precisions, or nothing is left.
    """
    found = []
    for runtime in asked or [name for name in RUNTIMES if _is_default(name, setting)]:
        ways = [Way(runtime, precision) for precision in precisions]
        reasons = {way: _refusal(way, setting) for way in ways}
        if asked and all(reasons.values()):
            raise ValueError(f"--runtimes {runtime}: {reasons[ways[0]]}")
        for way, why in reasons.items():
            if why is not None and (asked or way.runtime in BY_PYTORCH):
                say(f"left out: {way}: {why}")
        found += [way for way in ways if reasons[way] is None]
    if not found:
        raise ValueError(f"--precisions {' '.join(precisions)}: no runtime here has any of them")
    return found


def _refusal(way: Way, setting: Setting) -> str | None:
    """Why a runtime cannot compute so; None if it can."""
    runtime, precision = way.runtime, way.precision
    if runtime in BY_PYTORCH:
        return "INT8 needs openvino or onnxruntime" if precision == "int8" else None
    if setting.dtype != "float32":
        return f"files are exported in float32; with --dtype {setting.dtype}, expected {' or '.join(BY_PYTORCH)}"
    if runtime == "tensorrt" and not setting.on_cuda:
        return "it runs on a GPU: add --device cuda"
    if runtime == "tensorrt" and setting.precision == "ieee":
        return "it computes in TF32, and ONNX Runtime offers no option against that: use --precision tf32"
    if precision == "bf16" and runtime != "openvino":
        return "ONNX Runtime has no bf16 on a CPU, and no option for it on a GPU"
    if precision == "int8" and runtime == "tensorrt":
        return "INT8 is for openvino and onnxruntime here"
    return None


def _is_default(runtime: str, setting: Setting) -> bool:
    """On a CPU all runtimes are; on a GPU PyTorch, and what the installed ONNX Runtime has for it."""
    if not setting.on_cuda or runtime in BY_PYTORCH:
        return _refusal(Way(runtime, "float32"), setting) is None
    if runtime == "openvino" or importlib.util.find_spec("onnxruntime") is None:
        return False
    if _refusal(Way(runtime, "float32"), setting) is not None:
        return False
    return PROVIDERS[runtime] in need("onnxruntime").get_available_providers()


def open_named(name: str) -> nn.Module:
    """A model in eval mode with its card; by a name without weights they are random, which changes no speed."""
    if (path := run_checkpoint(name)).is_file():
        return load_model(path)
    if not timm.is_model(name):
        raise ValueError(f"{name!r} is neither a file nor a model that timm knows; see `wbmm list`")
    model = timm.create_model(name).eval()
    model.card = card_of(model)
    return model


def fused_with_card(model: nn.Module) -> nn.Module:
    fused = fuse(model)
    fused.card = model.card.replace(form=form_of(fused), dtype="float32")
    return fused


def converted_file(
    model: nn.Module, format: str, precision: str, size: tuple[int, int], path: Path, images: Tensor | None = None
) -> Path:
    """The file of a model in a precision, with a dynamic batch size; `path` without suffix is that in float32.

    Args:
        images: to calibrate INT8 on; noise, if not given.
    """
    cls = BACKENDS[format]
    source = path.with_name(f"{path.name}{cls.suffix}")
    if not source.exists():
        say(f"exporting {model.card.model}, {size[0]}x{size[1]}, {cls.suffix}")
        export_model(model, source, model.card, size=size, dynamic_batch=True)
    if precision in ("float32", "bf16"):
        return source
    target = path.with_name(f"{path.name}.{precision}{cls.suffix}")
    if not target.exists():
        say(f"converting {model.card.model}, {cls.suffix}: {precision}")
        backend = cls(source, model.card)
        if precision == "int8":
            noise = torch.randn(CALIBRATION, model.card.input_size[0], *size)
            kept = float_layers(backend) if isinstance(model, WBMM) else set()  # others: as NNCF does by itself
            backend.quantize(noise if images is None else images, kept, target)
        else:
            backend.convert(precision, target)
    return target


class RuntimeContest:
    """Models that take turns in several ways, from files that are made when they are needed.

    Args:
        models: by name, fused, with their cards.
        ways: in which each of them runs.
        size: (height, width) of the images.
        folder: where files are written.
        data: labelled images to calibrate on and to evaluate on; noise is calibrated on without them.
        count: of images to calibrate on.
    """

    def __init__(
        self,
        models: dict[str, nn.Module],
        ways: Sequence[Way],
        size: tuple[int, int],
        setting: Setting,
        folder: Path,
        data: Path | None = None,
        count: int = 128,
    ) -> None:
        self.models, self.ways, self.size, self.setting = models, ways, size, setting
        self.folder, self.data, self.count = folder, data, count
        self.keys = [(name, way) for way in ways for name in models]

    def file(self, name: str, way: Way) -> Path:
        model, images = self.models[name], None
        if way.precision == "int8" and self.data is not None:
            images = read_calibration(self._card(name), self.data, "folder", "train", self.count).images
        path = self.folder / f"{list(self.models).index(name)}"
        return converted_file(model, FORMATS[way.runtime], way.precision, self.size, path, images)

    def _card(self, name: str):
        card = self.models[name].card
        return card.replace(input_size=(card.input_size[0], *self.size))

    def _placed(self, name: str, way: Way) -> nn.Module:
        """A copy for PyTorch: files are exported from the model itself, in float32."""
        return way.setting(self.setting).place(copy.deepcopy(self.models[name]))

    def runner(self, name: str, way: Way) -> Runner:
        """What computes so, for accuracy; on the CPU where a file is to be run."""
        if way.runtime in BY_PYTORCH:
            return _torch_runner(self._placed(name, way), self._card(name), way.setting(self.setting))
        return open_runner(self.file(name, way), precision="bf16" if way.precision == "bf16" else "f32")

    def accuracy(self, limit: int | None) -> dict[tuple[str, Way], Record]:
        """Top-1 of each, and its agreement with the model in float32 in PyTorch."""
        found = {}
        for name, model in self.models.items():
            card = self._card(name)
            source = no_more_than(match_classes(card, open_labelled(card, self.data)), limit)
            reference = collect(torch_runner(model, card), source, label=f"{name}, float32")
            for way in self.ways:
                outputs = collect(self.runner(name, way), source, label=f"{name}, {way}")
                same = quality(outputs.logits, reference.logits).agreement
                found[name, way] = {"images": len(outputs.labels), "accuracy": top(outputs, 1), "agreement": same}
        return found

    def calls(self, batch: int) -> dict[tuple[str, Way], Call]:
        """What is timed at one batch size, by model and way."""
        if any(way.runtime == "compiled" for way in self.ways):
            torch._dynamo.reset()
        return {(name, way): self._call(name, way, batch) for name, way in self.keys}

    def _call(self, name: str, way: Way, batch: int) -> Call:
        shape = (batch, self.models[name].card.input_size[0], *self.size)
        if way.runtime in BY_PYTORCH:
            net = self._placed(name, way)
            return torch_call(
                compile_frozen(net) if way.runtime == "compiled" else net, shape, way.setting(self.setting)
            )
        if way.runtime == "openvino":
            return partial(self.runner(name, way), torch.randn(shape))
        return onnx_call(self.file(name, way), way.runtime, shape, self.setting)


def _torch_runner(model: nn.Module, card, setting: Setting) -> Runner:
    """PyTorch in the numbers of a setting, from and to float32 on the CPU."""

    @torch.inference_mode()
    def forward(images: Tensor) -> list[Tensor]:
        return [setting.forward(model, setting.place(images)).float().cpu()]

    return Runner("PyTorch", card, forward)


def _measure(
    contest: RuntimeContest, args: argparse.Namespace, batch: int
) -> tuple[dict[tuple[str, Way], Record], str]:
    """Records of one batch size, and a sentence about the limit if that is asked for."""
    setting, models, size = contest.setting, contest.models, contest.size
    calls = contest.calls(batch)
    labels = {key: _label(*key, setting) for key in calls}
    say(f"batch {batch}: {'; '.join(labels.values())}")
    products = product_calls(models.values(), batch, size, setting) if args.limit else {}
    timings = setting.time({**calls, **products}, f"batch {batch}, rounds", args.rounds, pause=PAUSE_S)
    records = {
        (name, way): speed_record(labels[name, way], batch, timings[name, way], timings[args.baseline, way])
        | {"runtime": way.runtime, "computed_in": way.precision}
        for name, way in calls
    }
    if not args.limit:
        return records, ""
    counts = {name: count_gmacs(model, size) for name, model in models.items()}
    # The limit is of this device and type: other precisions multiply other numbers, and OpenVINO runs on the CPU.
    own = {
        labels[name, way]: counts[name]
        for name, way in calls
        if way.precision == "float32" and not (setting.on_cuda and way.runtime == "openvino")
    }
    return records, add_shares(records.values(), own, {shape: timings[shape] for shape in products}, batch)


def _label(name: str, way: Way, setting: Setting) -> str:
    place = ", on the CPU" if setting.on_cuda and way.runtime == "openvino" else ""
    return f"{Path(name).name}, {way}{place}"


def torch_call(model: Callable[[Tensor], object], shape: tuple[int, int, int, int], setting: Setting) -> Call:
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

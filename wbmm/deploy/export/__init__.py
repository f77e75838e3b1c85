"""Model files for ONNX, OpenVINO and torch.export.

Build, fuse, compare, export, run the file, compare again; only then does it get its name. `compiled_runner` does it
behind the scenes and hands back a model that OpenVINO runs.
"""

import argparse
import copy
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.extras import need
from wbmm.io.atomic import atomic_model_path, check_model_target
from wbmm.io.card import ModelCard, card_of, form_of
from wbmm.io.files import file_size
from wbmm.io.pt2 import check_operators, save_program
from wbmm.layers import DenseWBMM2d
from wbmm.machine import versions
from wbmm.models.fuse import fuse
from wbmm.ops.modules import WindowLayer
from wbmm.ops.profile import Profile, use_profile
from wbmm.text import first_line

from ..runtime import Runner, open_runner, torch_runner
from .graph import Features, Graph, capture, make_opaque, replace_pooling
from .to_onnx import onnx_program, save_onnx
from .to_openvino import openvino_from_onnx, rewrite_for_openvino, save_openvino
from .verify import MIN_SIDE, Comparison, ExportError, Shapes, check_tolerance, compare_outputs, sample

__all__ = [
    "FORMATS",
    "RUNTIMES",
    "ExportError",
    "ExportReport",
    "Exportable",
    "add_runtime_argument",
    "as_exportable",
    "compiled_runner",
    "export_model",
    "export_to_file",
    "open_compiled",
]

PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("onnx", "onnxscript", "openvino")}

FORMATS = {"onnx": ".onnx", "openvino": ".xml", "torchexport": ".pt2"}

TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2


@dataclass
class Exportable:
    """What is to be exported.

    Attributes:
        net: from normalised images to a tensor or several; in eval mode, in any form.
        card: its description.
        output_names: one a tensor.
        smallest: the shortest side of an image whose last map is more than one pixel.
        compare: how the outputs of two forms are compared.
        boxes: it has a detector's operators on boxes, which are ONNX's (`graph.py`).
    """

    net: nn.Module
    card: ModelCard
    output_names: list[str]
    smallest: int = MIN_SIDE
    compare: Callable[..., Comparison] = compare_outputs
    boxes: bool = False


@dataclass(frozen=True)
class ExportReport:
    """What was written, and what was compared before it was."""

    path: Path
    bytes: int
    card: ModelCard
    shapes: Shapes
    comparisons: list[Comparison]


def as_exportable(model: nn.Module, card: ModelCard | None = None, features: bool = False) -> Exportable:
    """A model of timm's: its logits, or with `features` the maps of its stages."""
    card = card or card_of(model)
    if features or card.kind == "features":
        count = len(getattr(model, "feature_info", ())) or 4
        names = [f"stage{i + 1}" for i in range(count)]
        return Exportable(Features(model), card.replace(kind="features"), names)
    return Exportable(model, card, ["logits"])


def export_model(model: nn.Module, path: str | Path, card: ModelCard | None = None, **options) -> ExportReport:
    """`export_to_file` for a model of timm's, in eval mode."""
    return export_to_file(as_exportable(model, card, options.pop("features", False)), path, **options)


def check_format(path: str | Path, format: str | None, force: bool = False) -> str:
    """The format of a file by its name, before any work is done: its packages and its folder are there."""
    path = Path(path)
    format = format or next((name for name, suffix in FORMATS.items() if suffix == path.suffix), None)
    if format not in FORMATS:
        raise ValueError(f"{path}: say which format it is, one of {', '.join(FORMATS)}")
    if path.suffix != FORMATS[format]:
        raise ValueError(f"{path}: a file for {format} ends with {FORMATS[format]}")
    for package in PACKAGES.get(format, ()):
        need(package)
    check_model_target(path, force)
    return format


def export_to_file(
    exportable: Exportable,
    path: str | Path,
    format: str | None = None,
    size: tuple[int, int] | None = None,
    batch: int = 1,
    dynamic_batch: bool = False,
    dynamic_size: bool = False,
    with_preprocess: bool = False,
    form: str | None = None,
    half: bool = False,
    tolerance: float | None = None,
    force: bool = False,
) -> ExportReport:
    """Writes a file for a runtime, after running it there and comparing.

    Args:
        exportable: what to export.
        path: ends with .onnx, .xml (OpenVINO) or .pt2 (torch.export); an existing one stays unless `force` is given.
        format: `onnx`, `openvino` or `torchexport`; by the path if not given.
        size: (height, width), the card's if not given.
        batch: batch size, where it is not dynamic.
        dynamic_batch, dynamic_size: whether the file takes any batch size, any image size.
        with_preprocess: take bytes and normalise inside the graph.
        form: `compact` or `dense`.
        half: store weights in float16 (OpenVINO).
        tolerance: of differences, relative to the largest output where that is above 1.

    Raises:
        ExportError: the file computes something else. No file is left.
    """
    path = Path(path)
    format = check_format(path, format, force)
    if half and format != "openvino":
        raise ValueError(f"half precision is for openvino files here, not for {format}")
    if exportable.boxes and (format == "torchexport" or batch > 1 or dynamic_batch):
        raise ValueError(
            "a whole detector takes one image at a time, for onnx or openvino; backbone and neck (--neck) can do more"
        )
    if tolerance is None:
        tolerance = HALF_TOLERANCE if half else TOLERANCE
    size = tuple(size or exportable.card.input_size[1:])
    channels = exportable.card.input_size[0]
    net = exportable.net.float().eval()
    shapes = Shapes(channels, size, batch, dynamic_batch, dynamic_size, max(exportable.smallest, _smallest(net)))

    fused = fuse(net, form or ("dense" if form_of(net) == "dense" else "compact"))
    card = exportable.card.replace(
        form=form_of(fused),
        input_size=(channels, *size),
        input="uint8" if with_preprocess else "normalized",
        dtype="float16" if half else "float32",
        versions=versions(*PACKAGES.get(format, ())),
    )
    comparisons = _compare_forms(net, fused, card, shapes, exportable.compare)
    check_tolerance(comparisons, tolerance)
    with use_profile(Profile()):  # what was tuned for this processor must not change the file
        graph = _graph(fused, card, exportable.output_names, format, dynamic_size)
        write = _prepare(graph, shapes, format, half)
    with atomic_model_path(path, force) as temporary:
        try:
            write(temporary)
        except Exception as error:  # a full disk: an OSError, or a RuntimeError of torch's or OpenVINO's
            raise OSError(0, first_line(error)) from error
        comparisons += _run_and_compare(temporary, card, fused, shapes, exportable.compare)
        check_tolerance(comparisons, tolerance)
    return ExportReport(path, file_size(path), card, shapes, comparisons)


def _smallest(net: nn.Module) -> int:
    """The shortest side where the size is dynamic. A map that is mirrored must be larger than what is added to it."""
    mirrored = [
        max(module.window)
        for module in net.modules()
        if isinstance(module, WindowLayer | DenseWBMM2d) and module.padding_mode == "reflect"
    ]
    return max([MIN_SIDE, *(window // 2 * 32 + 1 for window in mirrored)])


def _compare_forms(
    net: nn.Module, fused: nn.Module, card: ModelCard, shapes: Shapes, compare: Callable[..., Comparison]
) -> list[Comparison]:
    """The model as it was given beside its fused form, unless it was fused already."""
    if form_of(net) == form_of(fused):
        return []
    what = f"{form_of(net)} and {card.form} form"
    images = _images(shapes.trials()[:2], card.replace(input="normalized"))
    return [compare(what, name, x, net, fused) for name, x in images]


def _graph(fused: nn.Module, card: ModelCard, output_names: list[str], format: str, dynamic_size: bool) -> Graph:
    """What is traced: a copy of the fused model, rewritten for the format."""
    net = copy.deepcopy(fused)
    if dynamic_size:
        replace_pooling(net)
    if format == "openvino":
        rewrite_for_openvino(net)
    elif format == "onnx":
        make_opaque(net)
    return Graph(net, card, output_names).eval()


def _prepare(graph: Graph, shapes: Shapes, format: str, half: bool) -> Callable[[Path], None]:
    """Everything but writing: a function that writes."""
    program = capture(graph, shapes, graph.card)
    if format == "torchexport":
        check_operators(program, graph.card)
        return lambda path: save_program(program, graph.card, path)
    converted = onnx_program(program, graph.output_names, shapes.dims(), format == "openvino")
    if format == "onnx":
        return lambda path: save_onnx(converted, graph.card, path)
    model = openvino_from_onnx(converted)
    return lambda path: save_openvino(model, graph.card, path, half)


def _run_and_compare(
    path: Path, card: ModelCard, fused: nn.Module, shapes: Shapes, compare: Callable[..., Comparison]
) -> Sequence[Comparison]:
    """The file in its own runtime, beside the model in PyTorch on images normalised the ordinary way."""
    runner = open_runner(path)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (card.mean, card.std))

    def reference(x: Tensor) -> Tensor | Sequence[Tensor]:
        return fused((x / 255 - mean) / std if card.input == "uint8" else x)

    what = f"{card.form} form and {runner.name}"
    return [compare(what, name, x, reference, runner) for name, x in _images(shapes.trials(), card)]


def _images(trials: Sequence[tuple[int, int, int, int]], card: ModelCard) -> Iterator[tuple[str, Tensor]]:
    """Images of several kinds at the first shape, noise at the others."""
    for i, shape in enumerate(trials):
        for name, x in sample(shape, card).items():
            if i == 0 or name == "noise":
                yield name, x


RUNTIMES = ("pytorch", "openvino")
_logger = logging.getLogger(__name__)


def add_runtime_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runtime",
        choices=RUNTIMES,
        default="pytorch",
        help="what runs checkpoints: openvino compiles them first, and is the faster on a CPU (default: pytorch)",
    )


def open_compiled(source: str | Path, device: str, model: str | None, ema: bool, runtime: str) -> Runner:
    """`open_runner`, with checkpoints and timm's models in another runtime; exported files have their own."""
    runner = open_runner(source, device, model, ema)
    return runner if runner.net is None else compiled_runner(runner.net, runtime, runner.card, device)


def compiled_runner(
    model: nn.Module, runtime: str = "openvino", card: ModelCard | None = None, device: str = "cpu"
) -> Runner:
    """A model ready to run in a runtime.

    The first call of a process takes some seconds: the model is fused, exported for the image size of its card and any
    batch, run there and compared.

    Args:
        model: a classifier of timm's or ours, in eval mode, in any form.
        runtime: one of `RUNTIMES`.
        card: its description, if it has another one than its own.
        device: `openvino` is for `cpu`.
    """
    if runtime not in RUNTIMES:
        raise ValueError(f"runtime {runtime!r}: expected one of {', '.join(RUNTIMES)}")
    card = card or card_of(model)
    if runtime == "openvino":
        try:
            return _by_openvino(model, card, device)
        except Exception as error:  # whatever a compiler may raise: the model still runs
            _logger.warning("runtime 'openvino' is not available: %s. PyTorch runs the model.", first_line(error))
    return torch_runner(model, card, device)


def _by_openvino(model: nn.Module, card: ModelCard, device: str) -> Runner:
    if device != "cpu":
        raise ValueError(f"it runs on the CPU here, and the device is {device!r}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.xml"
        export_model(model, path, card, dynamic_batch=True)
        return open_runner(path)

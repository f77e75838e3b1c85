"""From any file to one in fewer bits: calibrate, export, choose, convert, run, compare.

Only then does the file get its name.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wbmm.data.images import batches, find_images, open_labelled
from wbmm.data.sources import FileSource, Source, Subset
from wbmm.extras import need
from wbmm.io.atomic import atomic_model_path, check_model_target
from wbmm.io.card import ModelCard
from wbmm.io.files import describe_source, load_model, round_weights, save_model, write_weights
from wbmm.models.fuse import fuse
from wbmm.progress import progress_bar

from ..evaluate import classifier, quality
from ..export import export_model
from ..runtime import EXPORTED, open_runner
from .choose import Layer, LayerChoice, choose_layers, match_layers, try_layers, write_converted
from .with_onnx import Onnx
from .with_openvino import OpenVino

__all__ = [
    "BACKENDS",
    "PRECISIONS",
    "Calibration",
    "Converted",
    "QuantizeError",
    "Safetensors",
    "check_request",
    "convert_precision",
    "float_file",
    "float_layers",
    "read_calibration",
    "target_of",
]


@dataclass
class Calibration:
    """Images as the model takes them.

    Attributes:
        images: `[n, C, H, W]`, for the ranges of activations.
        others: `[m, C, H, W]`, to choose layers on; the same ones where there are no others.
        apart: whether they are others.
        what: the others in words.
    """

    images: Tensor
    others: Tensor
    apart: bool
    what: str = ""

    def __post_init__(self) -> None:
        self.what = self.what or ("images that were not calibrated on" if self.apart else "the images calibrated on")

    def describe(self) -> str:
        return f"calibrated on {len(self.images)} images; layers chosen on {len(self.others)}, {self.what}"


def read_calibration(card: ModelCard, root: Path | None, source: str, split: str, count: int) -> Calibration:
    """Up to `count` images to calibrate on and as many others, spread evenly over what there is.

    Labels do not matter: a folder may hold images in any arrangement. If it has a folder `train`, that is taken, since
    what a model is evaluated on should not calibrate it. A bad image is named and left out.
    """
    if count < 1:
        raise ValueError(f"--n {count}: give 1 or more images")
    found = _open(card, root, source, split)
    if len(found) < count:
        print(f"note: {len(found)} images to calibrate on, not {count} (--n): that is all there is", file=sys.stderr)
    images = _read(card, Subset(found, _spread(len(found), 2 * count)))
    first = _spread(len(images), count)
    rest = np.setdiff1d(np.arange(len(images)), first)
    if len(rest) < count / 2:  # too few to decide anything on
        return Calibration(images[first], images[first], False)
    return Calibration(images[first], images[rest], True)


def _spread(size: int, count: int) -> np.ndarray:
    """At most `count` of `size` indices, evenly spread: sets are sorted by class."""
    return np.unique(np.linspace(0, size - 1, min(count, size)).round().astype(int))


def _open(card: ModelCard, root: Path | None, source: str, split: str) -> Source:
    if source != "folder":
        return open_labelled(card, root, source, split)
    if root is None:
        raise ValueError("give images to calibrate on: --calib DIR")
    if not root.is_dir():
        raise ValueError(f"--calib {root}: there is no such folder")
    return FileSource(find_images([root / split if (root / split).is_dir() else root]))


def _read(card: ModelCard, source: Source) -> Tensor:
    images = []
    with progress_bar(len(source), "calibration images") as advance:
        for part in batches(source, card, batch=16):
            for error in part.errors.values():
                print(f"skipped: {error}", file=sys.stderr)
            if part.images is not None:
                images.append(part.images)
            advance(len(part.indices) + len(part.errors))
    if not images:
        raise ValueError("none of the images to calibrate on can be read")
    return torch.cat(images)


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Safetensors:
    """What can be done with a model in a safetensors file.

    Args:
        path: the file.
        card: its card.
    """

    suffix = ".safetensors"
    runtime = "PyTorch"
    packages = ("safetensors",)

    def __init__(self, path: Path, card: ModelCard) -> None:
        self.path, self.card = path, card

    def convert(self, precision: str, path: Path) -> None:
        """Writes the weights rounded to fp16 or bf16."""
        dtype = DTYPES[precision]
        state_dict = round_weights(load_model(self.path).state_dict(), dtype, "take --precision bf16")
        write_weights(state_dict, self.card.replace(dtype=str(dtype).removeprefix("torch.")), path, force=True)


BACKENDS = {"openvino": OpenVino, "onnx": Onnx, "safetensors": Safetensors}
PRECISIONS = ("int8", "fp16", "bf16")
LEAST_AGREEMENT = 50.0  # per cent; a file below it is deleted


class QuantizeError(ValueError):
    """A converted file does not do what the model does; it was deleted."""


@dataclass
class Converted:
    """What was written.

    Attributes:
        path: the file.
        card: what it says.
        layers: that could be quantised; none for fp16 and bf16.
        choice: which of them were not; None for fp16 and bf16.
    """

    path: Path
    card: ModelCard
    layers: list[Layer]
    choice: LayerChoice | None


def check_request(format: str, precision: str, full_range: bool = False) -> None:
    """Raises for what a format does not have, and for packages that are missing."""
    if full_range and precision != "int8":
        raise ValueError(f"--full-range is about the weights of int8, not of {precision}")
    if precision == "bf16" and format == "openvino":
        raise ValueError(
            "OpenVINO has no files in bf16: a processor that can (AVX-512 BF16, AMX) computes any float32 file in bf16 "
            "if told so when it is loaded (INFERENCE_PRECISION_HINT). For weights in bf16: --format safetensors"
        )
    if precision == "bf16" and format == "onnx":
        raise ValueError(
            "ONNX Runtime cannot run bf16 on a CPU, so such a file could not be checked. For weights in bf16: "
            "--format safetensors"
        )
    if precision == "int8" and format == "safetensors":
        raise ValueError("INT8 needs a runtime that computes in it: --format openvino or --format onnx")
    for package in BACKENDS[format].packages:
        need(package)


def target_of(source: Path, output: Path | None, format: str, precision: str, force: bool = False) -> Path:
    """The file to write, checked."""
    suffix = BACKENDS[format].suffix
    output = output or source.with_name(f"{source.stem}.{precision}{suffix}")
    if output.suffix != suffix:
        raise ValueError(f"{output}: a file for {format} ends with {suffix}")
    if output.resolve() == source.resolve():
        raise ValueError(f"{output} is the input itself")
    check_model_target(output, force)
    return output


def float_file(
    source: Path, format: str, folder: Path, model: str | None = None, ema: bool = True, dynamic_batch: bool = False
) -> tuple[Path, ModelCard]:
    """The model in float32 in a file of the format, and its card: `source` itself, or exported to `folder`."""
    suffix = BACKENDS[format].suffix
    if source.suffix in EXPORTED:
        if source.suffix != suffix:
            raise ValueError(f"{source}: --format {format} takes a checkpoint or a file that ends with {suffix}")
        card = classifier(open_runner(source, model=model), str(source)).card
        _demand_float(source, card)
        return source, card.replace(source=describe_source(source))
    net = load_model(source, model, ema)
    if net.card.form != "training":  # a training form in float16, as in models/, is only stored so
        _demand_float(source, net.card)
    if net.card.kind != "classifier":
        raise ValueError(f"{source} is not a classifier, so there is no agreement to measure: {net.card.describe()}")
    path = folder / f"{source.stem}{suffix}"
    card = net.card.replace(source=describe_source(source), dtype="float32")
    if format == "safetensors":
        fused = fuse(net)
        fused.card = card
        save_model(fused, path)
    else:
        with progress_bar(None, f"exporting {source.name} to {format}"):
            export_model(net, path, card, dynamic_batch=dynamic_batch)
    return path, open_runner(path).card


def float_layers(backend, layers: Sequence[Layer] | None = None) -> set[str]:
    """The names of the layers that INT8 makes no faster in the runtime of a backend."""
    return {layer.name for layer in layers or backend.layers() if layer.group in backend.float_groups}


def _demand_float(path: Path, card: ModelCard) -> None:
    if card.dtype != "float32":
        raise ValueError(f"{path} is in {card.dtype} already: give the file in float32 that it was made from")


def convert_precision(
    backend,
    precision: str,
    output: Path,
    calibration: Calibration,
    keep: Sequence[str] | None = None,
    target: float = 99.0,
    look: bool = False,
    force: bool = False,
) -> Converted:
    """Writes `output`, after running it and comparing it with the float model.

    Args:
        backend: of `BACKENDS`, for the float file.
        precision: of `PRECISIONS`.
        calibration: images.
        keep: groups or names of layers that stay in float in any case; those that `float_layers` finds, if not given.
        target: agreement in per cent below which more of them do.
        look: measure each group by itself in any case.

    Raises:
        QuantizeError: the file computes something else. No file is left.
    """
    reference = open_runner(backend.path)(calibration.others)
    layers: list[Layer] = []
    choice = None
    if precision == "int8":
        layers = backend.layers()
        if not layers:
            raise ValueError(f"{backend.path}: there is no layer to quantise")
        kept = float_layers(backend, layers) if keep is None else match_layers(layers, keep)
        with progress_bar(None, f"INT8 files tried in {backend.runtime}") as advance:
            attempt = try_layers(backend, calibration.images, calibration.others, reference, advance)
            choice = choose_layers(layers, attempt, target, kept, look)
    with atomic_model_path(output, force) as temporary, progress_bar(None, f"writing and checking {output.name}"):
        write_converted(backend, precision, temporary, calibration.images, choice.keep if choice else set())
        card = _verify(temporary, calibration.others, reference)
    return Converted(output, card, layers, choice)


def _verify(path: Path, images: Tensor, reference: Tensor) -> ModelCard:
    """Runs a file; it must give finite numbers and mostly the same classes."""
    try:
        runner = open_runner(path)
        logits = runner(images)
    except ValueError as error:
        raise QuantizeError(f"the converted file cannot be run and was deleted: {error}") from None
    if not logits.isfinite().all():
        raise QuantizeError("the converted file gives numbers that are not finite; it was deleted")
    same = quality(logits, reference).agreement
    if same < LEAST_AGREEMENT:
        raise QuantizeError(
            f"the converted file agrees with float32 on {same:.1f} % of {len(images)} images, less than "
            f"{LEAST_AGREEMENT:.0f} %; it was deleted"
        )
    return runner.card

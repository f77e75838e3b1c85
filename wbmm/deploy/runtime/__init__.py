"""What runs a model file: PyTorch, ONNX Runtime, OpenVINO or torch.export, a file each; `open_runner` chooses."""

import difflib
from collections.abc import Sequence
from pathlib import Path

import timm
import torch
import torch.nn as nn
from torch import Tensor

from wbmm.io.card import ModelCard, card_of, check_model_name, form_of
from wbmm.io.files import SUFFIXES, load_model, run_checkpoint
from wbmm.models.hub import local_weights
from wbmm.models.state import CheckpointError
from wbmm.text import first_line

from .common import Runner, open_program, unreadable
from .onnxruntime import onnx_session, open_onnx
from .openvino import open_openvino, openvino_model, read_openvino

__all__ = [
    "EXPORTED",
    "Runner",
    "onnx_session",
    "open_runner",
    "openvino_model",
    "pretrained",
    "read_openvino",
    "torch_runner",
]


EXPORTED = {".onnx": open_onnx, ".xml": open_openvino, ".pt2": open_program}


def open_runner(
    source: str | Path, device: str = "cpu", model: str | None = None, ema: bool = True, precision: str = "f32"
) -> Runner:
    """A model that is ready to run, from any file or name.

    Args:
        source: an .onnx, .xml (OpenVINO) or .pt2 (torch.export) file of `wbmm export`, a checkpoint, the folder of a
            training run, or the name of a model with pretrained weights.
        device: `cpu`, `cuda` or, for another GPU than the first, `cuda:1`. OpenVINO files run on the CPU alone.
        model: the model's name, where a checkpoint does not tell.
        ema: a checkpoint's moving average, where it has one.
        precision: what OpenVINO computes an .xml file in, `f32` or `bf16`; INT8 layers stay what they are.
    """
    path = Path(source)
    if path.is_dir() and not timm.is_model(str(source)):
        path = run_checkpoint(path)
    if precision != "f32" and path.suffix != ".xml":
        raise ValueError(f"precision {precision!r} is for OpenVINO files (.xml), not for {path.name}")
    if path.suffix in EXPORTED:
        runner = _open_exported(path, device, precision)
        check_model_name(runner.card, model)
        return runner
    if path.is_file():
        net = load_model(path, model, ema)
        return torch_runner(net, net.card, device)
    name = str(source)
    if timm.is_model(name.partition(".")[0]):
        return torch_runner(pretrained(name), device=device)
    if path.suffix in SUFFIXES or len(path.parts) > 1:
        raise CheckpointError(f"{path}: there is no such file")
    near = difflib.get_close_matches(name, timm.list_models(), n=2)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise CheckpointError(f"{name}: neither a file nor a model that timm knows{hint}")


def _open_exported(path: Path, device: str, precision: str) -> Runner:
    options = {"precision": precision} if path.suffix == ".xml" else {}
    try:
        return EXPORTED[path.suffix](path, device, **options)
    except ValueError:
        raise
    except Exception as error:  # a file that is odd in a way nobody thought of
        raise unreadable(path, path.suffix, error) from error


def torch_runner(model: nn.Module, card: ModelCard | None = None, device: str = "cpu") -> Runner:
    """A PyTorch model as a runner."""
    card = card or card_of(model)
    model = model.to(device).eval()
    features = card.kind == "features"

    @torch.inference_mode()
    def forward(images: Tensor) -> Sequence[Tensor]:
        images = images.to(device)
        outputs = model.forward_intermediates(images, intermediates_only=True) if features else (model(images),)
        return [output.float().cpu() for output in outputs]

    return Runner(f"PyTorch, {form_of(model)}", card, forward, net=model)


def pretrained(name: str) -> nn.Module:
    """A model of timm's with its pretrained weights, or an error that says why they cannot be had.

    Weights that come with the project need no network; their file also has the names of the classes.
    """
    if "." in name and (local := local_weights(name)) is not None:
        return load_model(local)
    try:
        return timm.create_model(name, pretrained=True)
    except CheckpointError:  # which says what to do
        raise
    except Exception as error:  # no weights known, no network, a hub's own errors
        raise CheckpointError(
            f"{name}: its pretrained weights are not available ({first_line(error)}); give a file"
        ) from None

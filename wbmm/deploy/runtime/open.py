"""Opens any model file and chooses what runs it."""

import difflib
from pathlib import Path

import timm

from wbmm.io.card import check_model_name
from wbmm.io.files import SUFFIXES, load_model
from wbmm.models.state import CheckpointError

from .onnxruntime import open_onnx
from .openvino import open_openvino
from .pytorch import pretrained, torch_runner
from .runner import Runner, unreadable
from .torchexport import open_program

__all__ = ["EXPORTED", "open_runner"]

EXPORTED = {".onnx": open_onnx, ".xml": open_openvino, ".pt2": open_program}


def open_runner(source: str | Path, device: str = "cpu", model: str | None = None, ema: bool = True) -> Runner:
    """A model that is ready to run, from any file or name.

    Args:
        source: an .onnx, .xml (OpenVINO) or .pt2 (torch.export) file of `wbmm export`, a checkpoint, or the name of a
            model with pretrained weights.
        device: `cpu` or `cuda`.
        model: the model's name, where a checkpoint does not tell.
        ema: a checkpoint's moving average, where it has one.
    """
    path = Path(source)
    if path.suffix in EXPORTED:
        runner = _open_exported(path, device)
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


def _open_exported(path: Path, device: str) -> Runner:
    try:
        return EXPORTED[path.suffix](path, device)
    except ValueError:
        raise
    except Exception as error:  # a file that is odd in a way nobody thought of
        raise unreadable(path, path.suffix, error) from error

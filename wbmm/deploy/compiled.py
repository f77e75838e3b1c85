"""A PyTorch model in a compiled runtime; in PyTorch, with a logged reason, where that cannot be had."""

import argparse
import logging
import tempfile
from pathlib import Path

import torch.nn as nn

from wbmm.deploy.export import export_model
from wbmm.io.card import ModelCard, card_of
from wbmm.text import first_line

from .runtime import Runner, open_runner, torch_runner

__all__ = ["RUNTIMES", "add_runtime_argument", "compiled_runner", "open_compiled"]

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

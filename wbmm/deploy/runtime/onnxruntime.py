"""ONNX files, run by ONNX Runtime."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from wbmm.deploy.packages import need
from wbmm.io.digest import verify_digest
from wbmm.io.reader import METADATA_KEY
from wbmm.io.screen import screen_onnx

from .runner import Runner, existing, input_sides, parse_card, unreadable

__all__ = ["onnx_session", "open_onnx"]


def onnx_session(path: str | Path, device: str = "cpu", threads: int | None = None):
    """An ONNX Runtime session on `cpu` or `cuda`, with PyTorch's number of threads."""
    runtime = need("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 4  # errors come as exceptions
    runtime.disable_telemetry_events()
    provider = "CUDAExecutionProvider" if device.startswith("cuda") else "CPUExecutionProvider"
    if provider not in runtime.get_available_providers():
        raise ValueError(
            f"device {device!r}: this onnxruntime has no {provider}; for NVIDIA, pip install onnxruntime-gpu"
        )
    path = existing(path)
    verify_digest(path)
    screen_onnx(path)
    try:
        return runtime.InferenceSession(path, options, providers=[provider])
    except Exception as error:  # onnxruntime's classes share no base
        raise unreadable(path, "ONNX", error) from None


def open_onnx(path: Path, device: str) -> Runner:
    """An .onnx file of `wbmm export`."""
    session = onnx_session(path, device)
    card = parse_card(path, session.get_modelmeta().custom_metadata_map.get(METADATA_KEY))
    images = [(image.name, image.shape) for image in session.get_inputs()]
    batch, size = input_sides(path, card, [[side if isinstance(side, int) else None for side in s] for _, s in images])
    name = images[0][0]

    def forward(images: Tensor) -> Sequence[Tensor]:
        return [torch.from_numpy(output) for output in session.run(None, {name: images.numpy()})]

    return Runner("ONNX Runtime", card, forward, batch, size)

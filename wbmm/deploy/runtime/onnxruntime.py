"""ONNX files, run by ONNX Runtime."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from wbmm.extras import need
from wbmm.io.digest import verify_digest
from wbmm.io.reader import METADATA_KEY
from wbmm.io.screen import screen_onnx

from .common import Runner, existing, input_sides, parse_card, unreadable

__all__ = ["onnx_session", "open_onnx"]


def onnx_session(
    path: str | Path,
    device: str = "cpu",
    threads: int | None = None,
    tensorrt: bool = False,
    tf32: bool | None = None,
):
    """An ONNX Runtime session.

    Args:
        path: an .onnx file.
        device: `cpu`, `cuda` or, for another GPU than the first, `cuda:1`.
        threads: of the CPU; PyTorch's number, if not given.
        tensorrt: let TensorRT run what it can on the GPU, and CUDA the rest.
        tf32: whether CUDA may compute float32 in TF32; ONNX Runtime's default, if not given.
    """
    runtime = need("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 4  # errors come as exceptions
    runtime.disable_telemetry_events()
    providers = _providers(device, tensorrt, tf32)
    wanted = providers[0][0]
    if wanted not in runtime.get_available_providers():
        raise ValueError(
            f"device {device!r}: this onnxruntime has no {wanted}; for NVIDIA, pip install onnxruntime-gpu"
        )
    path = existing(path)
    verify_digest(path)
    screen_onnx(path)
    try:
        session = runtime.InferenceSession(path, options, providers=providers)
    except Exception as error:  # onnxruntime's classes share no base
        raise unreadable(path, "ONNX", error) from None
    if wanted not in session.get_providers():  # without the libraries of a GPU it takes the CPU, and says nothing
        raise ValueError(f"device {device!r}: onnxruntime could not load {wanted}; are CUDA and cuDNN installed?")
    return session


def _providers(device: str, tensorrt: bool, tf32: bool | None) -> list[tuple[str, dict]]:
    """What ONNX Runtime shall run a file with, the first choice first."""
    if not device.startswith("cuda"):
        return [("CPUExecutionProvider", {})]
    gpu = {"device_id": torch.device(device).index or 0}
    cuda = ("CUDAExecutionProvider", gpu if tf32 is None else {**gpu, "use_tf32": int(tf32)})
    return [("TensorrtExecutionProvider", gpu), cuda] if tensorrt else [cuda]


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

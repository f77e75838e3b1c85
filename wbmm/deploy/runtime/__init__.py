"""What runs a model file: PyTorch, ONNX Runtime, OpenVINO or torch.export, a file each; `open_runner` chooses."""

from .onnxruntime import onnx_session
from .open import EXPORTED, open_runner, torch_runner
from .openvino import openvino_model, read_openvino
from .runner import Runner

__all__ = ["EXPORTED", "Runner", "onnx_session", "open_runner", "openvino_model", "read_openvino", "torch_runner"]

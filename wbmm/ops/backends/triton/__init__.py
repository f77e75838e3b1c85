"""NVIDIA GPUs: kernels in Triton. `docs/gpu.md` says what of them is verified, and how."""

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from wbmm.ops.backends import Backend, Call
from wbmm.ops.tables import Window
from wbmm.ops.windows import crop, pad_to_windows

__all__ = ["Triton"]

LEAST_CAPABILITY = (8, 0)  # of the GPU: TF32 and bfloat16
LARGEST_SIDE = 56  # of a window; the kernels are compiled up to here in the tests
MOST_ELEMENTS = 2**31  # offsets are 32-bit numbers
TYPES = (torch.float32, torch.float16, torch.bfloat16)


def is_interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU, statement by statement: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _package_obstacle() -> str | None:
    if find_spec("triton") is None:
        return "the package triton is missing: pip install triton (PyTorch's CUDA builds bring it)"
    return None


@cache
def _gpu_obstacle(device: torch.device) -> str | None:
    """What a GPU lacks. Asked once: the driver's answer takes longer than a launch."""
    if torch.version.hip is not None:
        return "it was written for NVIDIA GPUs, and this PyTorch is built for AMD's"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, has = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, capability))
        return f"it needs a GPU of compute capability {least} or later, and this one has {has}"
    return None


class Triton(Backend):
    """NVIDIA GPUs from Ampere on. With TRITON_INTERPRET=1 it can also be asked for on a CPU."""

    name = "triton"
    operators = frozenset(("windowed",))

    def can_run(self, call: Call) -> str | None:
        device = call.x.device
        if device.type != "cuda" and not (device.type == "cpu" and is_interpreted()):
            return f"it runs on an NVIDIA GPU, and the map is on {device.type}"
        why = _package_obstacle()
        if why is None and device.type == "cuda":
            why = _gpu_obstacle(device)
        if why is not None:
            return why
        for tensor in (call.x, *call.weights):
            if tensor.dtype not in TYPES:
                return f"it computes in float32, float16 and bfloat16, not in {tensor.dtype}"
            if tensor.device != device:
                return f"the map is on {device}, a weight on {tensor.device}"
        return getattr(self, f"_{call.operator}_obstacle")(call)

    @staticmethod
    def _windowed_obstacle(call: Call) -> str | None:
        if call.weights[0].ndim == 3:
            return "it works on tables, and this layer holds the matrix itself"
        wh, ww = call.window
        if max(wh, ww) > LARGEST_SIDE:
            return f"its windows have at most {LARGEST_SIDE} positions a side, and this one is {wh}x{ww}"
        batch, channels, height, width = call.x.shape
        if batch * channels * (height + wh) * (width + ww) >= MOST_ELEMENTS:
            return f"it counts the elements of a map in 32 bits, and this one has shape {tuple(call.x.shape)}"
        return None

    def better_elsewhere(self, call: Call) -> str | None:
        return "Triton's interpreter is slow, and only for tests" if call.x.device.type == "cpu" else None

    def windowed(
        self,
        x: Tensor,
        tables: list[Tensor],
        window: Window,
        bias: Tensor | None,
        shortcuts: int,
        padding_mode: str,
        grad: bool,
        kept: object,
    ) -> Tensor:
        from .windowed import table_product

        # Zeros are what the kernel has outside a map; other values have to be there.
        padded = x if padding_mode == "zeros" else pad_to_windows(x, window, padding_mode)
        local_table = tables[1] if len(tables) > 1 else None
        return crop(table_product(padded, tables[0], local_table, bias, list(window), shortcuts), *x.shape[-2:])

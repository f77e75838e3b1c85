"""NVIDIA GPUs: kernels in Triton. `docs/gpu.md` says what of them is verified, and how."""

import os
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.ops import reference
from wbmm.ops.backends import Backend, Call
from wbmm.ops.obstacles import changed_module
from wbmm.ops.tables import Window
from wbmm.ops.windows import crop, pad_to_windows

__all__ = ["Triton"]

LEAST_CAPABILITY = (8, 0)  # of the GPU: TF32 and bfloat16
LARGEST_SIDE = 56  # of a window; the kernels are compiled up to here in the tests
MOST_ELEMENTS = 2**31  # offsets are 32-bit numbers
MOST_SAMPLES = 65535  # what CUDA has in the third direction of a grid
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
    operators = frozenset(("windowed", "gated_ffn"))

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

    @staticmethod
    def _gated_ffn_obstacle(call: Call) -> str | None:
        x, weight = call.x, call.weights[0]
        if not torch.is_autocast_enabled(x.device.type) and weight.dtype is not x.dtype:
            return f"the map is {x.dtype}, a weight {weight.dtype}"
        if x.shape[0] > MOST_SAMPLES:
            return f"it takes at most {MOST_SAMPLES} samples, and there are {x.shape[0]}"
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
        with torch.cuda.device_of(x):  # Triton launches on the current device
            out = table_product(padded, tables[0], local_table, bias, list(window), shortcuts)
        return crop(out, *x.shape[-2:])

    def gated_ffn(
        self,
        x: Tensor,
        fc1: nn.Linear,
        grn: tuple[Tensor, Tensor | None, float],
        fc2: nn.Linear,
        gate: Tensor | None,
        norm: nn.Module | None,
        scale: Tensor | None,
        shortcut: Tensor | None,
        grad: bool,
        kept: object,
    ) -> Tensor:
        with torch.cuda.device_of(x):  # Triton launches on the current device
            return self._gated_ffn(x, fc1, grn, fc2, gate, norm, scale, shortcut, grad)

    @staticmethod
    def _gated_ffn(x, fc1, grn, fc2, gate, norm, scale, shortcut, grad: bool) -> Tensor:
        from .ffn import ffn, finish

        device, (gamma, beta, eps) = x.device.type, grn
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        rows = reference.to_rows(x, gate)
        size, rows = rows.shape[:3], rows.flatten(1, 2).to(dtype).contiguous()
        with torch.autocast(device, enabled=False):
            b1 = fc1.weight.new_zeros(fc1.out_features) if fc1.bias is None else fc1.bias
            beta = torch.zeros_like(gamma) if beta is None else beta
            w1, w2 = fc1.weight.to(dtype), fc2.weight.to(dtype)
            out = ffn(rows, w1, b1, gamma.flatten(), beta.flatten(), w2, eps)
        affine = None if grad else _folded(norm, scale, fc2.bias)
        if affine is not None:
            for other in (scale, shortcut):
                dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
            shortcut = None if shortcut is None else shortcut.permute(0, 2, 3, 1).flatten(1, 2).contiguous()
            return reference.from_rows(finish(out, *affine, shortcut, dtype).unflatten(1, size[1:]))
        out = out if fc2.bias is None else out + fc2.bias.to(dtype)
        out = reference.from_rows(out.unflatten(1, size[1:]))
        return reference.finish(out if norm is None else norm(out), scale, shortcut)


def _folded(
    norm: nn.Module | None, scale: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None] | None:
    """`scale * norm(y + bias)` as a factor and a bias of y; None if the norm is more than that."""
    factor = None
    if norm is not None:
        if changed_module(norm=(norm, nn.BatchNorm2d)) or norm.training or norm.running_var is None:
            return None
        factor = (norm.running_var + norm.eps).rsqrt()
        bias = -norm.running_mean if bias is None else bias - norm.running_mean
        if norm.affine:
            factor = factor * norm.weight
        bias = bias * factor if norm.bias is None else torch.addcmul(norm.bias, bias, factor)
    if scale is not None:
        factor = scale if factor is None else factor * scale
        bias = None if bias is None else bias * scale
    return factor, bias

"""NVIDIA GPUs: kernels in Triton. `docs/gpu.md` says what of them is verified, and how."""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn as nn
from timm.layers import DropPath
from torch import Tensor

from wbmm.ops import reference
from wbmm.ops.backends import Backend, Call
from wbmm.ops.obstacles import changed_module
from wbmm.ops.tables import Window
from wbmm.ops.windows import crop, pad_to_windows

from .trial import first_use

__all__ = ["Triton"]

LEAST_CAPABILITY = (8, 0)  # of the GPU: TF32 and bfloat16
LARGEST_SIDE = 56  # of a window; the kernels are compiled up to here in the tests
MOST_ELEMENTS = 2**31  # offsets are 32-bit numbers
MOST_PROGRAMS = 65535  # what CUDA has in the second and the third direction of a grid
BLOCK = 64  # positions that one program of the feed-forward part has
TYPES = (torch.float32, torch.float16, torch.bfloat16)


def is_interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU, statement by statement: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def no_autocast(x: Tensor) -> AbstractContextManager:
    """Autocast switched off, if there is one for the device."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


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
        # On the meta device nothing runs: `dispatch.rehearse` asks what would.
        if device.type not in ("cuda", "meta") and not (device.type == "cpu" and is_interpreted()):
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
        why = getattr(self, f"_{call.operator}_obstacle")(call)
        return first_use(call) if why is None else why

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
        if reference.autocast_type(x.device) is None and weight.dtype is not x.dtype:
            return f"the map is {x.dtype}, a weight {weight.dtype}"
        if x.shape[0] > MOST_PROGRAMS:
            return f"it takes at most {MOST_PROGRAMS} samples, and there are {x.shape[0]}"
        positions = x.shape[2] * x.shape[3]
        if positions > MOST_PROGRAMS * BLOCK:
            return f"its maps have at most {MOST_PROGRAMS * BLOCK} positions, and this one has {positions}"
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
        drop_path: nn.Module | None,
        grad: bool,
        kept: object,
    ) -> Tensor:
        from .ffn import ffn

        gamma, beta, eps = grn
        dtype = reference.autocast_type(x.device) or x.dtype
        rows = reference.to_rows(x, gate)
        size, rows = rows.shape[1:3], rows.flatten(1, 2).to(dtype).contiguous()
        with torch.cuda.device_of(x), no_autocast(x):  # Triton launches on the current device
            b1 = fc1.weight.new_zeros(fc1.out_features) if fc1.bias is None else fc1.bias
            beta = torch.zeros_like(gamma) if beta is None else beta
            w1, w2 = fc1.weight.to(dtype), fc2.weight.to(dtype)
            out = ffn(rows, w1, b1, gamma.flatten(), beta.flatten(), w2, eps)
            return _finished(out, size, fc2.bias, norm, scale, shortcut, drop_path)


def _finished(
    y: Tensor,
    size: torch.Size,
    bias: Tensor | None,
    norm: nn.Module | None,
    scale: Tensor | None,
    shortcut: Tensor | None,
    drop_path: nn.Module | None,
) -> Tensor:
    """`shortcut + drop_path(scale * norm(y + bias))` as a map: in one pass, but for modules that have to be called.

    Args:
        y: `[B, P, C]`; size: (H, W), P = HW.
    """
    from .residual import finish

    if norm is not None and bias is not None:
        y, bias = y + bias.to(y.dtype), None
    weight = statistics = None
    of_batch, eps = False, 0.0
    if norm is not None and _is_plain_norm(norm, y):
        weight, bias, eps = norm.weight, norm.bias, norm.eps
        statistics, of_batch = _statistics(norm, y)
    elif norm is not None:
        y = reference.to_rows(norm(reference.from_rows(y.unflatten(1, size))), None).flatten(1, 2).contiguous()
    added, called, keep = shortcut, None, None
    if drop_path is not None and not changed_module(drop_path=(drop_path, DropPath)):
        keep = _keep(drop_path, y, scale)
    elif drop_path is not None and changed_module(drop_path=(drop_path, nn.Identity)):
        added, called = None, drop_path
    dtype = y.dtype
    for other in (scale, added):
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    rows = None if added is None else added.permute(0, 2, 3, 1).flatten(1, 2).contiguous()
    out = finish(y, weight, bias, scale, rows, keep, statistics, eps, of_batch, dtype)
    out = reference.from_rows(out.unflatten(1, size))
    return out if called is None else reference.finish(out, None, shortcut, called)


def _is_plain_norm(norm: nn.Module, y: Tensor) -> bool:
    """Whether the kernels compute what this norm computes; otherwise it is called.

    Among those that are called are batch norms over several processes, those that average over all batches so far,
    which needs a number from the device, and one value a channel, which is an error.
    """
    if changed_module(norm=(norm, nn.BatchNorm2d)):
        return False
    learns = norm.training and norm.track_running_stats
    return not (learns and norm.momentum is None) and y.shape[0] * y.shape[1] > 1


def _statistics(norm: nn.BatchNorm2d, y: Tensor) -> tuple[tuple[Tensor, Tensor], bool]:
    """Mean and variance that a batch norm uses, and whether they are of this batch; in training it learns from them."""
    from .residual import batch_statistics

    if not norm.training and norm.running_mean is not None and norm.running_var is not None:
        return (norm.running_mean, norm.running_var), False
    mean, variance = batch_statistics(y)
    if norm.training and norm.track_running_stats:
        count = y.shape[0] * y.shape[1]
        with torch.no_grad():
            norm.num_batches_tracked.add_(1)
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), norm.momentum)
            norm.running_var.lerp_((variance * (count / (count - 1))).to(norm.running_var.dtype), norm.momentum)
    return (mean, variance), True


def _keep(drop_path: DropPath, y: Tensor, scale: Tensor | None) -> Tensor | None:
    """The factor `[B]` of each sample, drawn by the module itself, in the type of the map that it would get."""
    if not drop_path.training or not drop_path.drop_prob:
        return None
    dtype = y.dtype if scale is None else torch.promote_types(y.dtype, scale.dtype)
    return drop_path(y.new_ones((y.shape[0], 1, 1, 1), dtype=dtype)).flatten()

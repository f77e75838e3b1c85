"""All that was tuned for a CPU: oneDNN with packed weights, cache-sized blocks, backward passes written out."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from wbmm.ops import reference
from wbmm.ops.backends import LARGE_MATRIX, Backend, Call
from wbmm.ops.backends.onednn.ffn import ffn_training
from wbmm.ops.backends.onednn.windowed import (
    is_convolvable,
    pack_conv,
    pack_kernel,
    packed_conv2d,
    table_to_kernel,
    windowed_convolution,
    windowed_training,
)
from wbmm.ops.tables import Window, scales_of
from wbmm.ops.windows import crop, pad_to_windows

from .ffn import ffn_inference
from .linear import computes, missing_call, pack_weight, takes_onednn

__all__ = ["OneDNN"]

_TRAINED = (torch.float32, torch.float64)


class OneDNN(Backend):
    """CPUs. float32 takes oneDNN on x86; other types and processors the same code with PyTorch's products."""

    name = "onednn"
    operators = frozenset(("windowed", "gated_ffn", "conv2d"))

    def can_run(self, call: Call) -> str | None:
        x = call.x
        if x.device.type != "cpu":
            return f"it runs on a CPU, and the map is on {x.device.type}"
        if torch.is_autocast_enabled("cpu"):
            return "it does not know autocast"
        if missing_call() is not None:
            return f"this PyTorch has no torch.ops.mkldnn.{missing_call()}"
        if not torch.backends.mkldnn.enabled:
            return "torch.backends.mkldnn is switched off"
        dtype = x.dtype
        for weight in call.weights:
            if weight.dtype is not dtype:
                return f"the map is {dtype}, a weight {weight.dtype}"
        if call.grad and dtype not in _TRAINED:
            return f"its backward passes are for float32 and float64, not {dtype}"
        return getattr(self, f"_{call.operator}_obstacle")(call)

    @staticmethod
    def _windowed_obstacle(call: Call) -> str | None:
        return "it works on tables, and this layer holds the matrix itself" if call.weights[0].ndim == 3 else None

    @staticmethod
    def _gated_ffn_obstacle(call: Call) -> str | None:
        return None

    @staticmethod
    def _conv2d_obstacle(call: Call) -> str | None:
        if not computes(call.x.dtype):
            return f"it packs float32, and bfloat16 where the processor computes it, on x86: not {call.x.dtype} here"
        return None

    def better_elsewhere(self, call: Call) -> str | None:
        if call.operator == "conv2d":
            return "in training PyTorch's convolution is oneDNN's as well" if call.grad else None
        if call.operator != "windowed":
            return None
        convolves = computes(call.x.dtype)
        small = not all(map(is_convolvable, scales_of(call.tables, call.window)))
        if not call.grad:
            if not convolves:
                return f"oneDNN does not convolve {call.x.dtype} here: a product is faster"
            return "windows below 7x7 are faster as products" if small else None
        if (small or not convolves or call.tables > 1) and call.matrix_bytes() > LARGE_MATRIX:
            return "it would need the whole matrix, which is large"
        return None

    def windowed(self, x, tables, window, bias, shortcuts, padding_mode, grad, kept) -> Tensor:
        if grad:
            out = windowed_training(x, tables, window, shortcuts, padding_mode)
            return out if bias is None else out + bias[:, None, None]
        pack = kept is not None and takes_onednn(tables[0])

        def build() -> list[tuple[Tensor, Tensor | None, Window]]:
            scales = scales_of(len(tables), window)
            kernels = [table_to_kernel(table, scale) for table, scale in zip(tables, scales, strict=True)]
            if shortcuts:
                kernels[0] = kernels[0].clone()
                kernels[0][:, 0, kernels[0].shape[2] // 2, kernels[0].shape[3] // 2] += shortcuts
            packed = [pack_kernel(*pair) if pack else None for pair in zip(kernels, scales, strict=True)]
            return list(zip(kernels, packed, scales, strict=True))

        kernels = build() if kept is None else kept.get(f"kernels+{shortcuts}", tables, build)
        # Zeros around a window that the edge cuts are what a convolution has there anyway.
        padded = x if padding_mode == "zeros" else pad_to_windows(x, window, padding_mode)
        out = None
        for kernel, packed, scale in kernels:
            part = windowed_convolution(padded, kernel, scale, bias, packed)
            out, bias = part if out is None else out.add_(part), None
        return crop(out, *x.shape[-2:])

    def gated_ffn(self, x, fc1, grn, fc2, gate, norm, scale, shortcut, drop_path, grad, kept) -> Tensor:
        gamma, beta, eps = grn
        if grad:
            gate = x.new_ones(x.shape[:2]) if gate is None else gate
            beta = torch.zeros_like(gamma) if beta is None else beta
            out = ffn_training(x.permute(0, 2, 3, 1), gate, fc1.weight, fc1.bias, gamma, beta, fc2.weight, eps)
            out = reference.from_rows(out if fc2.bias is None else out + fc2.bias)
            if scale is not None and type(norm) is nn.BatchNorm2d and norm.affine:
                # In the norm's weight and bias the scale costs no pass over the map.
                weights = {"weight": norm.weight * scale, "bias": norm.bias * scale}
                return reference.finish(torch.func.functional_call(norm, weights, (out,)), None, shortcut, drop_path)
            return reference.finish(out if norm is None else norm(out), scale, shortcut, drop_path)
        inside = shortcut if norm is None and scale is None and drop_path is None else None
        out = self.ffn(x, gate, inside, fc1.weight, fc1.bias, grn, fc2.weight, fc2.bias, kept)
        if inside is not None:
            return out
        return reference.finish(out if norm is None else norm(out), scale, shortcut, drop_path)

    def ffn(self, x, gate, shortcut, w1, b1, grn, w2, b2, kept) -> Tensor:
        """Both linears with what stands between them, without gradients; `grn` is its gamma, its beta and its eps."""
        gamma, beta, eps = grn
        pack, rows = kept is not None and takes_onednn(w1), x.shape[2] * x.shape[3]

        def build() -> tuple[Tensor, Tensor, Tensor | None]:
            bias = None if beta is None else F.linear(beta.flatten(), w2, b2)
            return *(pack_weight(weight, rows) if pack else weight for weight in (w1, w2)), bias

        watched = [weight for weight in (w1, w2, beta, b2) if weight is not None]
        first, second, bias = build() if kept is None else kept.get("linears", watched, build, sampled=True)
        bias = b2 if beta is None else bias  # with GRN's beta
        return ffn_inference(x, gate, shortcut, first, b1, gamma.flatten(), second, bias, eps)

    def conv2d(self, x, weight, bias, stride, padding, dilation, groups, grad, kept) -> Tensor:
        if grad or kept is None:
            return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
        geometry = padding, stride, dilation, groups
        packed = kept.get("weight", (weight,), lambda: pack_conv(weight, geometry, x.shape), sampled=True)
        return packed_conv2d(x, packed, bias, geometry)

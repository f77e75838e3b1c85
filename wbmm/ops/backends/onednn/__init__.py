"""All that was tuned for a CPU: oneDNN with packed weights, cache-sized blocks, backward passes written out."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from wbmm.ops import reference
from wbmm.ops.backends import LARGE_MATRIX, Backend, Call
from wbmm.ops.obstacles import changed_module
from wbmm.ops.profile import thresholds
from wbmm.ops.tables import Window, scales_of
from wbmm.ops.windows import crop, pad_to_windows

from .ffn import ffn_inference, ffn_training
from .linear import computes, missing_call, pack_weight, takes_onednn
from .windowed import (
    is_convolvable,
    pack_conv,
    pack_kernel,
    packed_conv2d,
    table_to_kernel,
    windowed_convolution,
    windowed_training,
)

__all__ = ["OneDNN"]

_TRAINED = (torch.float32, torch.float64)


class OneDNN(Backend):
    """CPUs. float32, and bfloat16 where the processor has it, take oneDNN on x86; other types and processors the same
    code with PyTorch's products. Under autocast the map and the weights are converted here, the weights once."""

    name = "onednn"
    operators = frozenset(("windowed", "gated_ffn", "squeeze_excite", "conv2d"))

    def can_run(self, call: Call) -> str | None:
        x = call.x
        if x.device.type != "cpu":
            return f"it runs on a CPU, and the map is on {x.device.type}"
        if missing_call() is not None:
            return f"this PyTorch has no torch.ops.mkldnn.{missing_call()}"
        if not torch.backends.mkldnn.enabled:
            return "torch.backends.mkldnn is switched off"
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        why = self._type_obstacle(call) if autocast is None else self._autocast_obstacle(call, autocast)
        if why is None and call.operator == "windowed":
            return self._windowed_obstacle(call)
        return self._conv2d_obstacle(call) if why is None and call.operator == "conv2d" else why

    @staticmethod
    def _type_obstacle(call: Call) -> str | None:
        dtype = call.x.dtype
        for weight in call.weights:
            if weight.dtype is not dtype:
                return f"the map is {dtype}, a weight {weight.dtype}"
        if call.grad and dtype not in _TRAINED and not computes(dtype):
            return f"its backward passes are for float32, float64 and bfloat16 in hardware, not {dtype}"
        return None

    @staticmethod
    def _autocast_obstacle(call: Call, autocast: torch.dtype) -> str | None:
        if not computes(autocast):
            return f"autocast asks for {autocast}, which oneDNN does not compute on this processor"
        for tensor in (call.x, *call.weights):
            if tensor.dtype not in (torch.float32, autocast):
                return f"autocast leaves {tensor.dtype} alone"
        return None

    @staticmethod
    def _windowed_obstacle(call: Call) -> str | None:
        return "it works on tables, and this layer holds the matrix itself" if call.weights[0].ndim == 3 else None

    @staticmethod
    def _conv2d_obstacle(call: Call) -> str | None:
        if not computes(computing_type(call.x)):
            return f"it packs float32, and bfloat16 where the processor computes it, on x86: not {call.x.dtype} here"
        return None

    def better_elsewhere(self, call: Call) -> str | None:
        if call.operator == "conv2d":
            return "in training PyTorch's convolution is oneDNN's as well" if call.grad else None
        if call.operator == "squeeze_excite":
            return "in training its small products are PyTorch's as well" if call.grad else None
        dtype = computing_type(call.x)
        if call.grad:
            chosen, rows = thresholds(dtype), call.x.shape[0] * call.x.shape[2] * call.x.shape[3]
            least = chosen.ffn_training_rows if call.operator == "gated_ffn" else chosen.windowed_training_rows
            if rows < least:
                return f"below {least} rows autograd trains faster"
        return self._better_product(call, dtype) if call.operator == "windowed" else None

    @staticmethod
    def _better_product(call: Call, dtype: torch.dtype) -> str | None:
        """Whether windows are better multiplied with their matrix, or that in tiles."""
        convolves = computes(dtype)
        small = not all(is_convolvable(scale, dtype) for scale in scales_of(call.tables, call.window))
        if not call.grad:
            if not convolves:
                return f"oneDNN does not convolve {dtype} here: a product is faster"
            side = thresholds(dtype).least_side
            return f"windows below {side}x{side} are faster as products" if small else None
        if (small or not convolves or call.tables > 1) and call.matrix_bytes() > LARGE_MATRIX:
            return "it would need the whole matrix, which is large"
        return None

    def windowed(self, x, tables, window, bias, shortcuts, padding_mode, grad, kept) -> Tensor:
        dtype = computing_type(x)
        x = x.to(dtype)
        with _without_autocast():
            if grad:
                out = windowed_training(x, [table.to(dtype) for table in tables], window, shortcuts, padding_mode)
                return out if bias is None else out + bias[:, None, None].to(dtype)
            bias = None if bias is None else bias.to(dtype)
            inside = shortcuts if x.element_size() >= 4 else 0  # beside the 1 of a shortcut bfloat16 would lose bits
            shortcuts -= inside
            kernels = self._kernels(tables, window, inside, dtype, kept)
            # Zeros around a window that the edge cuts are what a convolution has there anyway.
            padded = x if padding_mode == "zeros" else pad_to_windows(x, window, padding_mode)
            out = None
            for kernel, packed, scale in kernels:
                part = windowed_convolution(padded, kernel, scale, bias, packed)
                out, bias = part if out is None else out.add_(part), None
            out = crop(out, *x.shape[-2:])
            return out.add_(x, alpha=shortcuts) if shortcuts else out

    @staticmethod
    def _kernels(tables, window, shortcuts, dtype, kept) -> list[tuple[Tensor, Tensor | None, Window]]:
        """The kernel of each table with the shortcuts in it, the same packed, and its window."""

        def build() -> list[tuple[Tensor, Tensor | None, Window]]:
            scales = scales_of(len(tables), window)
            kernels = [table_to_kernel(table, scale) for table, scale in zip(tables, scales, strict=True)]
            if shortcuts:
                kernels[0] = kernels[0].clone()
                kernels[0][:, 0, kernels[0].shape[2] // 2, kernels[0].shape[3] // 2] += shortcuts
            kernels = [kernel.to(dtype) for kernel in kernels]
            pack = kept is not None and takes_onednn(kernels[0])
            packed = [pack_kernel(*pair) if pack else None for pair in zip(kernels, scales, strict=True)]
            return list(zip(kernels, packed, scales, strict=True))

        return build() if kept is None else kept.get(f"kernels+{shortcuts} {dtype}", tables, build)

    def gated_ffn(self, x, fc1, grn, fc2, gate, norm, scale, shortcut, drop_path, grad, kept) -> Tensor:
        gamma, beta, eps = grn
        dtype = computing_type(x)
        if grad:
            gate = x.new_ones(x.shape[:2]) if gate is None else gate
            beta = torch.zeros_like(gamma) if beta is None else beta
            with _without_autocast():
                given = (x.permute(0, 2, 3, 1), gate, fc1.weight, fc1.bias, gamma, beta, fc2.weight)
                out = ffn_training(*(tensor.to(dtype) for tensor in given), eps)  # type: ignore[call-arg]
                out = reference.from_rows(out if fc2.bias is None else out + fc2.bias.to(dtype))
            plain = changed_module(norm=(norm, nn.BatchNorm2d)) is None
            if scale is not None and plain and norm.affine:
                # In the norm's weight and bias the scale costs no pass over the map.
                weights = {"weight": norm.weight * scale, "bias": norm.bias * scale}
                return reference.finish(torch.func.functional_call(norm, weights, (out,)), None, shortcut, drop_path)
            return reference.finish(out if norm is None else norm(out), scale, shortcut, drop_path)
        fits = shortcut is not None and shortcut.dtype is dtype
        inside = shortcut if fits and norm is None and scale is None and drop_path is None else None
        gate = None if gate is None else gate.to(dtype)
        with _without_autocast():
            out = self.ffn(x.to(dtype), gate, inside, fc1.weight, fc1.bias, grn, fc2.weight, fc2.bias, kept)
        if inside is not None:
            return out
        return reference.finish(out if norm is None else norm(out), scale, shortcut, drop_path)

    def ffn(self, x, gate, shortcut, w1, b1, grn, w2, b2, kept) -> Tensor:
        """Both linears with what stands between them, without gradients; `grn` is its gamma, its beta and its eps.

        Computed in the type of `x`; weights of another are converted once, where they are kept.
        """
        gamma, beta, eps = grn
        dtype, rows = x.dtype, x.shape[2] * x.shape[3]

        def build() -> tuple[Tensor | None, ...]:
            pack = kept is not None and takes_onednn(x)
            bias = b2 if beta is None else F.linear(beta.flatten(), w2, b2)  # with GRN's beta
            first, second = w1.to(dtype), w2.to(dtype)
            packed = (pack_weight(weight, rows) if pack else weight for weight in (first, second))
            rest = (None if small is None else small.to(dtype) for small in (b1, gamma.flatten(), bias))
            return *packed, second, *rest

        converted = () if w1.dtype is dtype else (b1, gamma)  # else they are used as they are
        watched = [weight for weight in (w1, w2, beta, b2, *converted) if weight is not None]
        made = build() if kept is None else kept.get(f"linears {dtype}", watched, build, sampled=True)
        first, second, unpacked, bias1, gamma, bias2 = made
        return ffn_inference(x, gate, shortcut, first, bias1, gamma, second, bias2, eps, unpacked=unpacked)

    def squeeze_excite(self, x, fc1, fc2, grad, kept) -> Tensor:
        """Pooling sums half precision in float32 without a copy, and two products of a few rows want no oneDNN."""
        if grad:
            return reference.squeeze_excite(x, fc1, fc2)
        dtype = computing_type(x)
        pooled = F.avg_pool2d(x, x.shape[-2:]).flatten(1)
        weights: Any = (fc1.weight, fc1.bias, fc2.weight, fc2.bias)
        if weights[0].element_size() < 4:
            given = [weight for weight in weights if weight is not None]

            def build() -> list[Tensor | None]:
                return [None if weight is None else weight.float() for weight in weights]

            weights = build() if kept is None else kept.get("gate", given, build, sampled=True)
        with _without_autocast():
            hidden = F.linear(pooled.to(weights[0].dtype), *weights[:2]).relu_()
            return F.linear(hidden, *weights[2:]).sigmoid_().to(dtype)

    def conv2d(self, x, weight, bias, stride, padding, dilation, groups, grad, kept) -> Tensor:
        if grad or kept is None:
            return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
        dtype = computing_type(x)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        geometry = padding, stride, dilation, groups
        packed = kept.get(
            f"weight {dtype}", (weight,), lambda: pack_conv(weight.to(dtype), geometry, x.shape), sampled=True
        )
        return packed_conv2d(x, packed, bias, geometry)


def _without_autocast() -> AbstractContextManager:
    """Switches autocast off where it is on: to enter it costs as much as a small operator."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


def computing_type(x: Tensor) -> torch.dtype:
    """On a CPU: autocast's type where it is on, else the map's own."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype

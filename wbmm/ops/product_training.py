"""The windowed product in training, with a backward pass written out.

Autograd would hand the batched products of the backward pass windows whose strides come from a permuted map, which on a
CPU run as a loop over channels. Here the gradient is cut into windows of its own, as the map was.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .windows import Window, is_channels_last, merge_windows, pad_to_windows, partition_windows

__all__ = ["product_training"]


def product_training(x: Tensor, matrix: Tensor, window: Window, shortcuts: int) -> Tensor:
    """`windowed_product` with gradients, in eager mode and with zero padding; see there."""
    return _WindowedProduct.apply(x, matrix, window, shortcuts)


class _WindowedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, matrix, window, shortcuts):
        windows = partition_windows(pad_to_windows(x, window), window)
        ctx.save_for_backward(windows, matrix)
        ctx.window, ctx.shortcuts = window, shortcuts
        out = torch.baddbmm(windows, windows, matrix, beta=shortcuts)
        return merge_windows(out, (x.shape[0], *x.shape[-2:]), window, is_channels_last(x))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        windows, matrix = ctx.saved_tensors
        batch, _, height, width = grad.shape
        channels_last = is_channels_last(grad)
        grad = partition_windows(pad_to_windows(grad, ctx.window), ctx.window)
        dx = dmatrix = None
        if ctx.needs_input_grad[1]:
            dmatrix = torch.bmm(windows.transpose(1, 2), grad)
        if ctx.needs_input_grad[0]:
            dx = torch.baddbmm(grad, grad, matrix.transpose(1, 2), beta=ctx.shortcuts)
            dx = merge_windows(dx, (batch, height, width), ctx.window, channels_last)
        return dx, dmatrix, None, None

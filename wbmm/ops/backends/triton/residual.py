"""The end of the feed-forward part in Triton: batch norm, layer scale, drop path and shortcut in one pass.

With `z = (y - mean) * r`, r one over the standard deviation of each channel, and `keep` a factor of each sample, the
result is `shortcut + keep * scale * (weight * z + bias)`. Its gradient is `g`, and `q = keep * g`.

| pass | reads | writes |
| --- | --- | --- |
| moments, in training | y | mean and squared deviations of blocks of positions |
| finish | y, the shortcut | the result |
| backward, sums | y, g | sums of `q` and of `q * z` over blocks of positions |
| backward, finish | y, g | dy |

y is kept for the backward pass, nothing else of its size. Sums over a map are taken in two stages without atomics, in
float32. Moments are joined by the formula for groups: the variance of a channel whose mean is far from zero would
be lost in a plain sum of squares.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from wbmm.ops.backends import gradients_with_graph

from .ffn import META, block, grid_of
from .launch import launch

__all__ = ["batch_statistics", "finish"]


@triton.jit
def moments_kernel(y, means, deviations, positions, channels, BP: tl.constexpr, BF: tl.constexpr):
    """The mean of each channel over blocks of positions, and the sum of squared differences from it."""
    o_f, m_f, o_h, m_h = block(positions, channels, BP, BF)
    b_y = tl.load(y + o_h, mask=m_h, other=0).to(tl.float32)
    count = tl.minimum(BP, positions - tl.program_id(1) * BP).to(tl.float32)
    b_mean = tl.sum(b_y, 0) / count
    b_d = tl.where(m_h, b_y - b_mean[None, :], 0)
    o_s = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * channels + o_f
    tl.store(means + o_s, b_mean, mask=m_f)
    tl.store(deviations + o_s, tl.sum(b_d * b_d, 0), mask=m_f)


@triton.jit
def finish_kernel(
    y,
    mean,
    factor,
    bias,
    keep,
    shortcut,
    out,
    positions,
    channels,
    MEAN: tl.constexpr,
    FACTOR: tl.constexpr,
    BIAS: tl.constexpr,
    KEEP: tl.constexpr,
    SHORTCUT: tl.constexpr,
    BP: tl.constexpr,
    BF: tl.constexpr,
):
    """`shortcut + keep * (factor * (y - mean) + bias)`: keep is of each sample, the others of each channel."""
    o_f, m_f, o_h, m_h = block(positions, channels, BP, BF)
    b_y = tl.load(y + o_h, mask=m_h, other=0).to(tl.float32)
    if MEAN:
        b_y -= tl.load(mean + o_f, mask=m_f, other=0).to(tl.float32)[None, :]
    if FACTOR:
        b_y *= tl.load(factor + o_f, mask=m_f, other=0).to(tl.float32)[None, :]
    if BIAS:
        b_y += tl.load(bias + o_f, mask=m_f, other=0).to(tl.float32)[None, :]
    if KEEP:
        b_y *= tl.load(keep + tl.program_id(2)).to(tl.float32)
    if SHORTCUT:
        b_y += tl.load(shortcut + o_h, mask=m_h, other=0).to(tl.float32)
    tl.store(out + o_h, b_y.to(out.dtype.element_ty), mask=m_h)


@triton.jit
def sums_kernel(
    grad,
    y,
    mean,
    rstd,
    keep,
    sums,
    products,
    positions,
    channels,
    NORM: tl.constexpr,
    KEEP: tl.constexpr,
    BP: tl.constexpr,
    BF: tl.constexpr,
):
    """Sums of `q = keep * grad` and of `q * z` over blocks of positions; without a norm, z is y."""
    o_f, m_f, o_h, m_h = block(positions, channels, BP, BF)
    b_q = tl.load(grad + o_h, mask=m_h, other=0).to(tl.float32)
    b_z = tl.load(y + o_h, mask=m_h, other=0).to(tl.float32)
    if KEEP:
        b_q *= tl.load(keep + tl.program_id(2)).to(tl.float32)
    if NORM:
        b_z -= tl.load(mean + o_f, mask=m_f, other=0)[None, :]
        b_z *= tl.load(rstd + o_f, mask=m_f, other=0)[None, :]
    o_s = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * channels + o_f
    tl.store(sums + o_s, tl.sum(b_q, 0), mask=m_f)
    tl.store(products + o_s, tl.sum(b_q * b_z, 0), mask=m_f)  # q is 0 where there is no position


@triton.jit
def finish_backward_kernel(
    grad,
    y,
    mean,
    slope,
    level,
    factor,
    keep,
    dy,
    positions,
    channels,
    BATCH: tl.constexpr,
    FACTOR: tl.constexpr,
    KEEP: tl.constexpr,
    BP: tl.constexpr,
    BF: tl.constexpr,
):
    """`dy = factor * q`; with statistics of the batch, less `slope * (y - mean) + level`, what goes through them."""
    o_f, m_f, o_h, m_h = block(positions, channels, BP, BF)
    b_d = tl.load(grad + o_h, mask=m_h, other=0).to(tl.float32)
    if KEEP:
        b_d *= tl.load(keep + tl.program_id(2)).to(tl.float32)
    if FACTOR:
        b_d *= tl.load(factor + o_f, mask=m_f, other=0).to(tl.float32)[None, :]
    if BATCH:
        b_y = tl.load(y + o_h, mask=m_h, other=0).to(tl.float32)
        b_y -= tl.load(mean + o_f, mask=m_f, other=0)[None, :]
        b_d -= b_y * tl.load(slope + o_f, mask=m_f, other=0)[None, :]
        b_d -= tl.load(level + o_f, mask=m_f, other=0)[None, :]
    tl.store(dy + o_h, b_d.to(dy.dtype.element_ty), mask=m_h)


def _partial(y: Tensor) -> Tensor:
    """Room for two values of each channel over each block of positions."""
    batch, positions, channels = y.shape
    return y.new_empty((2, batch, triton.cdiv(positions, META["BP"]), channels), dtype=torch.float32)


@lru_cache(maxsize=64)
def _counts(positions: int, device: torch.device) -> Tensor:
    """Positions of each block: `[blocks, 1]` float32. Kept, for these are several launches."""
    starts = torch.arange(0, positions, META["BP"], device=device)
    return (positions - starts).clamp_(max=META["BP"]).to(torch.float32)[:, None]


@torch.no_grad()
def batch_statistics(y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel of `[B, P, C]`: `[C]` float32, the variance without Bessel's correction."""
    batch, positions, _ = y.shape
    means, deviations = _partial(y)
    written = means, deviations
    launch(moments_kernel, grid_of(y), y, *written, *y.shape[1:], writes=written, **META)
    counts = _counts(positions, y.device)
    total = batch * positions
    mean = (means * counts).sum((0, 1)) / total
    between = ((means - mean).square_() * counts).sum((0, 1))
    return mean, (deviations.sum((0, 1)) + between) / total


def finish(
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shortcut: Tensor | None,
    keep: Tensor | None,
    statistics: tuple[Tensor, Tensor] | None,
    eps: float,
    of_batch: bool,
    dtype: torch.dtype,
) -> Tensor:
    """`shortcut + keep * scale * (weight * z + bias)` with gradients; all but y may be missing.

    Args:
        y: `[B, P, C]`, contiguous; shortcut: likewise.
        weight, bias, scale: `[C]`.
        keep: `[B]`, without a gradient.
        statistics: mean and variance of each channel, for `z = (y - mean) / sqrt(variance + eps)`; without, z is y.
        of_batch: whether they are those of y, so that its gradient goes through them.
        dtype: of the result.
    """
    mean, rstd = (None, None) if statistics is None else (statistics[0].float(), (statistics[1].float() + eps).rsqrt())
    return _Finish.apply(y, weight, bias, scale, shortcut, keep, mean, rstd, eps, of_batch, dtype)


def _product(*factors: Tensor | None) -> Any:
    """Of those that are there, in float32; None of none."""
    result = None
    for factor in factors:
        if factor is not None:
            result = factor.float() if result is None else result * factor.float()
    return result


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, weight, bias, scale, shortcut, keep, mean, rstd, eps, of_batch, dtype):
        factor = _product(rstd, weight, scale)
        shift = None if bias is None else _product(bias, scale)
        out = torch.empty_like(y, dtype=dtype)
        given = {"MEAN": mean, "FACTOR": factor, "BIAS": shift, "KEEP": keep, "SHORTCUT": shortcut}
        tensors = [y if tensor is None else tensor for tensor in given.values()]
        flags: dict[str, Any] = {name: tensor is not None for name, tensor in given.items()}
        launch(finish_kernel, grid_of(y), y, *tensors, out, *y.shape[1:], writes=(out,), **flags, **META)
        ctx.save_for_backward(y, weight, bias, scale, keep, mean, rstd)
        ctx.eps, ctx.of_batch = eps, of_batch
        ctx.shortcut_dtype = None if shortcut is None else shortcut.dtype
        return out

    @staticmethod
    def backward(ctx, grad):
        wanted, saved = ctx.needs_input_grad, ctx.saved_tensors
        dshortcut = grad.to(ctx.shortcut_dtype) if wanted[4] else None
        if torch.is_grad_enabled():  # the gradients are themselves to be differentiated
            found = tuple(_plain_gradients(saved, wanted, ctx.eps, ctx.of_batch, grad))
        else:
            found = _gradients(saved, wanted, ctx.of_batch, grad.contiguous())
        return *found, dshortcut, *(None,) * 6


def _gradients(saved, wanted, of_batch: bool, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Of y, weight, bias and scale."""
    y, weight, bias, scale, keep, mean, rstd = saved
    sums = products = None
    if any(wanted[1:4]) or (wanted[0] and of_batch):
        sums, products = _sums(grad, y, mean, rstd, keep)
    dweight = _product(products, scale).to(weight.dtype) if wanted[1] else None
    dbias = _product(sums, scale).to(bias.dtype) if wanted[2] else None
    dscale = None
    if wanted[3]:
        dscale = _product(products, weight)
        dscale = (dscale if bias is None else dscale + sums * bias.float()).to(scale.dtype)
    dy = None
    if wanted[0]:
        dy = _input_gradient(grad, y, mean, rstd, _product(rstd, weight, scale), keep, sums, products, of_batch)
    return dy, dweight, dbias, dscale


def _sums(grad, y, mean, rstd, keep) -> tuple[Tensor, Tensor]:
    partial = _partial(y)
    written = partial.unbind()
    flags: dict[str, Any] = {"NORM": mean is not None, "KEEP": keep is not None}
    mean, rstd, keep = (y if tensor is None else tensor for tensor in (mean, rstd, keep))
    arguments = grad, y, mean, rstd, keep, *written, *y.shape[1:]
    launch(sums_kernel, grid_of(y), *arguments, writes=written, **flags, **META)
    return partial.sum((1, 2)).unbind()


def _input_gradient(grad, y, mean, rstd, factor, keep, sums, products, of_batch: bool) -> Tensor:
    if factor is None and keep is None:
        return grad.to(y.dtype)
    slope = level = None
    if of_batch:
        total = y.shape[0] * y.shape[1]
        slope, level = factor * products * rstd / total, factor * sums / total
    dy = torch.empty_like(y)
    flags: dict[str, Any] = {"BATCH": of_batch, "FACTOR": factor is not None, "KEEP": keep is not None}
    tensors = (grad if tensor is None else tensor for tensor in (mean, slope, level, factor, keep))
    read = y if of_batch else grad
    launch(finish_backward_kernel, grid_of(y), grad, read, *tensors, dy, *y.shape[1:], writes=(dy,), **flags, **META)
    return dy


def _plain_gradients(saved, wanted, eps: float, of_batch: bool, grad: Tensor) -> list[Tensor | None]:
    """The same by autograd, with a graph."""
    y, weight, bias, scale, keep, mean, rstd = saved
    out = y.float()
    if of_batch:
        variance, mean = torch.var_mean(out, (0, 1), correction=0)
        rstd = (variance + eps).rsqrt()
    out = out if mean is None else (out - mean) * rstd
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    out = out if scale is None else out * scale
    out = out if keep is None else out * keep[:, None, None]
    return gradients_with_graph(out, (y, weight, bias, scale), wanted[:4], grad.to(out.dtype))

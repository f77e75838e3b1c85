"""The feed-forward part in Triton: what stands between its two products, in few passes over the hidden layer.

With `u = GELU(h + b1)` for the hidden layer `h = (gate * x) @ w1.T`, `n` the norm of each channel of `u` over the map,
`r = n / (mean(n) + eps)` and `s = 1 + gamma * r` for each sample, the result is `(u * s + beta) @ w2.T`.

| pass | reads | writes |
| --- | --- | --- |
| squares | h | sums of `u**2` over blocks of positions |
| scale | h | `v = u * s + beta`, what the second product reads |
| backward, scale | h, dv | v again, sums of `dv * u` |
| backward, hidden | h, dv | dh in place of dv, sums of it |

Of the wide tensors, only h is kept for the backward pass. Sums over a map are taken in two stages without atomics.
Arithmetic is in float32 whatever the type of h. What follows the second product is in `residual.py`.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from wbmm.ops import reference
from wbmm.ops.backends import gradients_with_graph
from wbmm.ops.reference import LEAST_SQUARE

from .context import BLOCK, no_autocast
from .launch import launch

__all__ = ["META", "block", "ffn", "grid_of"]

# BP positions and BF channels a program. Not tuned: the sums depend on the first.
META: dict[str, Any] = {"BP": BLOCK, "BF": 64, "num_warps": 4}


@triton.jit
def _gelu(x):
    return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_gradient(x):
    density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * density


@triton.jit
def block(positions, channels, BP: tl.constexpr, BF: tl.constexpr):
    """Of this program: its channels and their mask, its offsets in a map `[B, P, F]` and theirs."""
    i_f, i_p, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_f = i_f * BF + tl.arange(0, BF)
    o_p = i_p * BP + tl.arange(0, BP)
    m_f = o_f < channels
    m_h = (o_p < positions)[:, None] & m_f[None, :]
    # A hidden layer of a large batch has more than 2**31 elements.
    o_h = (i_b.to(tl.int64) * positions + o_p)[:, None] * channels + o_f[None, :]
    return o_f, m_f, o_h, m_h


@triton.jit
def squares_kernel(h, bias, partial, positions, channels, BP: tl.constexpr, BF: tl.constexpr):
    """`partial[b, p, f]`: sums of squares of `GELU(h + bias)` over blocks of positions."""
    o_f, m_f, o_h, m_h = block(positions, channels, BP, BF)
    b_bias = tl.load(bias + o_f, mask=m_f, other=0).to(tl.float32)
    b_u = _gelu(tl.load(h + o_h, mask=m_h, other=0).to(tl.float32) + b_bias[None, :])
    b_u = tl.where(m_h, b_u, 0)
    o_s = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * channels + o_f
    tl.store(partial + o_s, tl.sum(b_u * b_u, 0), mask=m_f)


@triton.jit
def scale_kernel(h, bias, scale, beta, v, positions, channels, BP: tl.constexpr, BF: tl.constexpr):
    """`v = GELU(h + bias) * scale + beta`, with a scale of each sample."""
    o_f, m_f, o_h, m_h = block(positions, channels, BP, BF)
    b_bias = tl.load(bias + o_f, mask=m_f, other=0).to(tl.float32)
    b_s = tl.load(scale + tl.program_id(2) * channels + o_f, mask=m_f, other=0)
    b_beta = tl.load(beta + o_f, mask=m_f, other=0).to(tl.float32)
    b_u = _gelu(tl.load(h + o_h, mask=m_h, other=0).to(tl.float32) + b_bias[None, :])
    tl.store(v + o_h, (b_u * b_s[None, :] + b_beta[None, :]).to(v.dtype.element_ty), mask=m_h)


@triton.jit
def scale_backward_kernel(
    h, bias, scale, beta, dv, v, partial, positions, channels, BP: tl.constexpr, BF: tl.constexpr
):
    """`v` once more, and sums of `dv * GELU(h + bias)` over blocks of positions."""
    o_f, m_f, o_h, m_h = block(positions, channels, BP, BF)
    b_bias = tl.load(bias + o_f, mask=m_f, other=0).to(tl.float32)
    b_s = tl.load(scale + tl.program_id(2) * channels + o_f, mask=m_f, other=0)
    b_u = _gelu(tl.load(h + o_h, mask=m_h, other=0).to(tl.float32) + b_bias[None, :])
    b_dv = tl.load(dv + o_h, mask=m_h, other=0).to(tl.float32)
    b_beta = tl.load(beta + o_f, mask=m_f, other=0).to(tl.float32)
    tl.store(v + o_h, (b_u * b_s[None, :] + b_beta[None, :]).to(v.dtype.element_ty), mask=m_h)
    o_s = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * channels + o_f
    tl.store(partial + o_s, tl.sum(b_dv * b_u, 0), mask=m_f)


@triton.jit
def hidden_backward_kernel(h, bias, scale, slope, dv, partial, positions, channels, BP: tl.constexpr, BF: tl.constexpr):
    """`dh = (dv * scale + u * slope) * GELU'(h + bias)` in place of `dv`, and sums of it over blocks of positions."""
    o_f, m_f, o_h, m_h = block(positions, channels, BP, BF)
    b_bias = tl.load(bias + o_f, mask=m_f, other=0).to(tl.float32)
    b_s = tl.load(scale + tl.program_id(2) * channels + o_f, mask=m_f, other=0)
    b_k = tl.load(slope + tl.program_id(2) * channels + o_f, mask=m_f, other=0)
    b_h = tl.load(h + o_h, mask=m_h, other=0).to(tl.float32) + b_bias[None, :]
    b_dv = tl.load(dv + o_h, mask=m_h, other=0).to(tl.float32)
    b_dh = (b_dv * b_s[None, :] + _gelu(b_h) * b_k[None, :]) * _gelu_gradient(b_h)
    b_dh = tl.where(m_h, b_dh, 0)
    tl.store(dv + o_h, b_dh.to(dv.dtype.element_ty), mask=m_h)
    o_s = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * channels + o_f
    tl.store(partial + o_s, tl.sum(b_dh, 0), mask=m_f)


def grid_of(h: Tensor) -> tuple[int, int, int]:
    batch, positions, channels = h.shape
    return triton.cdiv(channels, META["BF"]), triton.cdiv(positions, META["BP"]), batch


def _partial(h: Tensor) -> Tensor:
    """Room for the sums that programs take over their blocks of positions."""
    batch, positions, channels = h.shape
    return h.new_empty((batch, triton.cdiv(positions, META["BP"]), channels), dtype=torch.float32)


def _statistics(h: Tensor, bias: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Norms of the channels of `GELU(h + bias)`, and the scale that GRN makes of them: `[B, F]` float32."""
    partial = _partial(h)
    launch(squares_kernel, grid_of(h), h, bias, partial, *h.shape[1:], writes=(partial,), **META)
    norm = partial.sum(1).clamp_min_(LEAST_SQUARE).sqrt_()
    return norm, 1 + gamma.float() * _relative(norm, eps)


def _relative(norm: Tensor, eps: float) -> Tensor:
    return norm / (norm.mean(-1, keepdim=True) + eps)


def _norm_gradient(dratio: Tensor, norm: Tensor, eps: float) -> Tensor:
    """The norm's gradient over the norm, which multiplies `u`; none for a channel that is zero everywhere."""
    mean = norm.mean(-1, keepdim=True) + eps
    dnorm = dratio / mean - (dratio * norm).sum(-1, keepdim=True) / (mean.square() * norm.shape[-1])
    return torch.where(norm.square() > LEAST_SQUARE, dnorm / norm, 0)


def _scaled(h: Tensor, bias: Tensor, scale: Tensor, beta: Tensor) -> Tensor:
    v = torch.empty_like(h)
    launch(scale_kernel, grid_of(h), h, bias, scale, beta, v, *h.shape[1:], writes=(v,), **META)
    return v


def _scale_gradient(h: Tensor, bias: Tensor, scale: Tensor, beta: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """What the second product read, and the gradient of the scale."""
    v, partial = torch.empty_like(h), _partial(h)
    arguments = h, bias, scale, beta, dv, v, partial, *h.shape[1:]
    launch(scale_backward_kernel, grid_of(h), *arguments, writes=(v, partial), **META)
    return v, partial.sum(1)


def _hidden_gradient(h: Tensor, bias: Tensor, scale: Tensor, slope: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of h, in the memory of `dv`, and that of its bias."""
    partial = _partial(h)
    arguments = h, bias, scale, slope, dv, partial, *h.shape[1:]
    launch(hidden_backward_kernel, grid_of(h), *arguments, writes=(partial,), in_place=(dv,), **META)
    return dv, partial.sum((0, 1))


class _TritonFeedForward(torch.autograd.Function):
    """In one type: what autocast asks for, or that of the map. Biases, gamma and beta may have another."""

    @staticmethod
    def forward(ctx, x, w1, b1, gamma, beta, w2, eps):
        h = torch.matmul(x, w1.t())
        norm, scale = _statistics(h, b1, gamma, eps)
        ctx.save_for_backward(x, w1, b1, gamma, beta, w2, h, norm)
        ctx.eps = eps
        return torch.matmul(_scaled(h, b1, scale, beta), w2.t())

    @staticmethod
    def backward(ctx, grad):
        *inputs, h, norm = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:-1]
        with no_autocast(grad):  # it may be on for the backward pass alone
            if torch.is_grad_enabled():  # the gradients are themselves to be differentiated
                return *_plain_gradients(inputs, wanted, ctx.eps, grad), None
            return *_gradients(inputs, wanted, ctx.eps, grad.contiguous(), h, norm), None


def _gradients(inputs, wanted, eps: float, grad: Tensor, h: Tensor, norm: Tensor) -> tuple[Tensor | None, ...]:
    x, w1, b1, gamma, beta, w2 = inputs
    ratio = _relative(norm, eps)
    scale = 1 + gamma.float() * ratio
    dv = torch.matmul(grad, w2)
    v, dscale = _scale_gradient(h, b1, scale, beta, dv)
    rows = grad.flatten(0, 1)
    dw2 = rows.t() @ v.flatten(0, 1) if wanted[5] else None
    del v  # as wide as the hidden layer
    dbeta = (rows.sum(0, dtype=torch.float32) @ w2.float()).to(beta.dtype) if wanted[4] else None
    dgamma = (dscale * ratio).sum(0).to(gamma.dtype)
    dh, db1 = _hidden_gradient(h, b1, scale, _norm_gradient(dscale * gamma.float(), norm, eps), dv)
    dw1 = dh.flatten(0, 1).t() @ x.flatten(0, 1) if wanted[1] else None
    dx = torch.matmul(dh, w1) if wanted[0] else None
    return dx, dw1, db1.to(b1.dtype), dgamma, dbeta, dw2


def _plain_gradients(inputs, wanted, eps: float, grad: Tensor) -> list[Tensor | None]:
    """The same by autograd, with a graph."""
    x, w1, b1, gamma, beta, w2 = inputs
    b1, gamma, beta = (weight.to(x.dtype) for weight in (b1, gamma, beta))
    hidden = F.gelu(F.linear(x, w1, b1))[:, None]  # a map of one row
    out = F.linear(reference.grn(hidden, gamma, beta, eps)[:, 0], w2)
    return gradients_with_graph(out, inputs, wanted, grad)


def ffn(x: Tensor, w1: Tensor, b1: Tensor, gamma: Tensor, beta: Tensor | None, w2: Tensor, eps: float) -> Tensor:
    """`fc2(GRN(GELU(fc1(x))))` with gradients, `fc2` without its bias.

    Args:
        x: `[B, P, C]`, contiguous, of one type with both weights.
        w1: `[F, C]`; b1, gamma, beta: `[F]`, float32 or of the same type; w2: `[C, F]`.
        eps: of GRN.

    Returns:
        `[B, P, C]`.
    """
    beta = torch.zeros_like(gamma) if beta is None else beta
    return _TritonFeedForward.apply(x, w1, b1, gamma, beta, w2, eps)

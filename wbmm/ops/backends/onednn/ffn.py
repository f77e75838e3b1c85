"""The feed-forward part on a CPU: laid out for the cache, and in training with a written-out backward pass.

With `u = GELU((gate * x) @ w1.T + b1)`, `n` the norm of each channel of `u` over the map, `r = n / (mean(n) + eps)` and
`s = 1 + gamma * r` for each sample, the result is `(u * s + beta) @ w2.T`. Of the wide tensors training keeps only the
pre-activation; `u` is computed again, which costs less than to write and read it. What autograd would do in a dozen
passes over tensors of four times the map's width is two products and a few passes, over blocks that stay in the cache:

- With `q = u.T @ dy`, the gradients of the second weight and of the scale are `q * s` and the sum of `q * w2.T` over
  outputs: neither `u * s` nor `du * u` is formed. `q` is the smaller while a map has at least as many positions as
  channels.
- Where the gradients are themselves to be differentiated, autograd does the work after all.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from wbmm.ops import reference
from wbmm.ops.backends import gradients_with_graph
from wbmm.ops.profile import thresholds
from wbmm.ops.reference import LEAST_SQUARE

from .linear import linear, linear_add, linear_gelu

__all__ = ["ffn_inference", "ffn_training", "rows_at_once"]


def rows_at_once(hidden_width: int, like: Tensor, training: bool = False) -> int:
    """How many rows of the hidden layer to compute together, but for rounding.

    It is four times as wide as the map, and over a whole batch fits no cache of a CPU. Too few rows make the products
    slow. In training the weights' gradients are added up over blocks: fewer and larger ones.
    """
    chosen = thresholds(like.dtype)
    least = chosen.backward_rows if training else chosen.block_rows
    return max(chosen.block_bytes // (hidden_width * like.element_size()), least)


def _response_scale(blocks: Sequence[Tensor], gamma: Tensor, eps: float) -> Tensor:
    """`1 + gamma * N` of samples whose rows come in blocks `[n, rows, C]`, as `[n, 1, C]`.

    N is that of `reference.response_norm`. Few and small operations, which count where there is one image.
    """
    first, *rest = map(_sum_of_squares, blocks)
    norm = sum(rest, first).sqrt_()
    mean = norm.mean(-1, keepdim=True).add_(eps)
    return norm.mul_(gamma).div_(mean).add_(1).to(blocks[0].dtype)


def _scaled(block: Tensor, scale: Tensor) -> Tensor:
    """`block * scale`; in place unless in half precision, where PyTorch is slower at that."""
    return block * scale if block.element_size() < 4 else block.mul_(scale)


def _sum_of_squares(rows: Tensor) -> Tensor:
    """Over positions: `[n, rows, C]` to `[n, 1, C]`, in float32 at least.

    Half-precision rows are converted first: several times faster than `vector_norm`, and no square is rounded.
    """
    squares = rows.float().square_() if rows.element_size() < 4 else rows.square()
    return squares.sum(1, keepdim=True)


def _samples(x: Tensor) -> Tensor:
    """`[B, C, H, W]` in channels-last memory as the view `[B, HW, C]`."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def ffn_inference(
    x: Tensor,
    gate: Tensor | None,
    shortcut: Tensor | None,
    w1: Tensor,
    b1: Tensor,
    gamma: Tensor,
    w2: Tensor,
    b2: Tensor | None,
    eps: float,
    at_once: int | None = None,
    unpacked: Tensor | None = None,
) -> Tensor:
    """`shortcut + fc2(GELU(fc1(gate * x)) * (1 + gamma * N))`, without gradients.

    A block is several samples or, where one sample's hidden layer is too large, some of its rows; N is known once all
    rows of a sample are.

    Args:
        x: `[B, C, H, W]`, channels-last memory.
        gate: `[B, C]`, or None.
        shortcut: `[B, C, H, W]`, or None.
        w1: `[4C, C]`; b1: `[4C]`; gamma: `[4C]`; w2: `[C, 4C]`; b2: `[C]`. The weights may be packed (`pack_weight`).
        at_once: rows of the hidden layer to compute together; by `rows_at_once` if not given.
        unpacked: w2 as it is. Where a sample has more rows than w2, the scale `1 + gamma * N` goes into a copy of it.

    Returns:
        `[B, C, H, W]`, channels-last memory.
    """
    batch, channels, height, width = x.shape
    rows = _samples(x)
    at_once = at_once or rows_at_once(w1.shape[0], rows)
    step = max(at_once // (height * width), 1)  # samples; one block of them needs no cutting
    scale_weight = unpacked is not None and batch > 0 and height * width >= 2 * channels
    step = 1 if scale_weight else step
    rows_each = math.ceil(height * width / math.ceil(height * width / at_once))
    samples = _cut(rows, step, 0)
    gates = [None] * len(samples) if gate is None else _cut(gate, step, 0)
    residuals = [None] * len(samples) if shortcut is None else _cut(_samples(shortcut), step, 0)
    out = []
    for part, factor, residual in zip(samples, gates, residuals, strict=True):
        gated = part if factor is None else part * factor[:, None]
        blocks = [linear_gelu(block, w1, b1) for block in _cut(gated, rows_each, 1)]
        scale = _response_scale(blocks, gamma, eps)
        if scale_weight:
            weight = unpacked * scale[0]
        else:
            weight, blocks = w2, [_scaled(block, scale) for block in blocks]
        if residual is None:
            out += [linear(block, weight, b2) for block in blocks]
        else:
            others = _cut(residual, rows_each, 1)
            out += [linear_add(block, weight, b2, other) for block, other in zip(blocks, others, strict=True)]
    whole = out[0] if len(out) == 1 else torch.cat([block.flatten(0, 1) for block in out])
    return whole.view(batch, height, width, channels).permute(0, 3, 1, 2)


def _cut(x: Tensor, size: int, dim: int) -> Sequence[Tensor]:
    return (x,) if x.shape[dim] <= size else x.split(size, dim)


def ffn_training(
    x: Tensor, gate: Tensor, w1: Tensor, b1: Tensor, gamma: Tensor, beta: Tensor, w2: Tensor, eps: float
) -> Tensor:
    """`fc2(GRN(GELU(fc1(gate * x))))` with gradients, in eager mode.

    Args:
        x: `[B, H, W, C]`.
        gate: `[B, C]`.
        w1: `[4C, C]`; b1: `[4C]`; gamma, beta: of GRN, 4C elements in any shape; w2: `[C, 4C]`.
        eps: of GRN.

    Returns:
        `[B, H, W, C]`.
    """
    batch, height, width, channels = x.shape
    rows = x.reshape(batch, height * width, channels).contiguous()
    return _BlockedFeedForward.apply(rows, gate, w1, b1, gamma.flatten(), beta.flatten(), w2, eps).view(x.shape)


def _relative(norm: Tensor, eps: float) -> Tensor:
    """Norms `[N, 4C]` relative to their mean over channels."""
    return norm / (norm.mean(-1, keepdim=True) + eps)


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


class _BlockedFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, w1, b1, gamma, beta, w2, eps):
        batch, positions, _ = x.shape
        out, norm = torch.empty_like(x), x.new_empty(batch, w1.shape[0], dtype=_sum_type(x))
        base = F.linear(beta, w2)
        step = max(rows_at_once(w1.shape[0], x, training=True) // positions, 1)
        hidden = []
        for i in range(0, batch, step):
            part = slice(i, i + step)
            hidden.append(linear(x[part] * gate[part, None], w1, b1))
            u = F.gelu(hidden[-1])
            norm[part] = _sum_of_squares(u)[:, 0].clamp_min_(LEAST_SQUARE).sqrt_()
            scale = (1 + gamma * _relative(norm[part], eps)).to(u.dtype)
            out[part] = linear(_scaled(u, scale[:, None]), w2, base)
        ctx.save_for_backward(x, gate, w1, b1, gamma, beta, w2, norm, *hidden)
        ctx.eps, ctx.step = eps, step
        return out

    @staticmethod
    def backward(ctx, grad):
        with torch.autocast("cpu", enabled=False):  # it may be on for the backward pass alone
            return _BlockedFeedForward._gradients(ctx, grad)

    @staticmethod
    def _gradients(ctx, grad):
        saved = ctx.saved_tensors  # once: activation checkpointing allows no more
        inputs, norm, hidden = list(saved[:7]), saved[7], saved[8:]
        needed = ctx.needs_input_grad[:-1]
        if torch.is_grad_enabled():  # the gradients are themselves to be differentiated
            return *_plain_gradients(inputs, needed, ctx.eps, grad), None
        x, gate, w1, _, gamma, beta, w2 = inputs
        grad = grad.contiguous()
        dx, dgate = (
            torch.empty_like(tensor) if wanted else None for tensor, wanted in ((x, needed[0]), (gate, needed[1]))
        )
        # What is summed over blocks is summed in float32 at least.
        dw1, dw2 = (
            torch.zeros_like(weight, dtype=norm.dtype) if wanted else None
            for weight, wanted in ((w1, needed[2]), (w2, needed[6]))
        )
        db1, dgamma = (torch.zeros_like(gamma, dtype=norm.dtype) for _ in range(2))
        for i, h in zip(range(0, len(x), ctx.step), hidden, strict=True):
            part = slice(i, i + ctx.step)
            u, n = F.gelu(h), norm[part]
            ratio = _relative(n, ctx.eps)
            d, dscale = _second_product(grad[part], u, 1 + gamma * ratio, w2, dw2)
            dgamma += (dscale * ratio).sum(0)
            d.addcmul_(u, _norm_gradient(dscale * gamma, n, ctx.eps)[:, None].to(u.dtype))
            torch.ops.aten.gelu_backward.grad_input(d, h, grad_input=d)
            db1 += _flat(d).sum(0)
            if dw1 is not None:
                dw1 += _product_over_rows(_flat(d), _flat(x[part] * gate[part, None]))
            if dx is None and dgate is None:
                continue
            dgated = linear(d, w1.t())
            if dgate is not None:
                dgate[part] = (dgated * x[part]).sum(1)
            if dx is not None:
                torch.mul(dgated, gate[part, None], out=dx[part])
        total = _flat(grad).sum(0)
        if dw2 is not None:
            dw2.addr_(total.to(dw2.dtype), beta.to(dw2.dtype))
        found = (dx, dgate, dw1, db1, dgamma, F.linear(total, w2.t()), dw2)
        return *(None if one is None else one.to(like.dtype) for one, like in zip(found, inputs, strict=True)), None


def _sum_type(x: Tensor) -> torch.dtype:
    """What sums over many elements are kept in: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def _product_over_rows(a: Tensor, b: Tensor) -> Tensor:
    """`a.T @ b` of `[N, A]` and `[N, B]`, a weight's gradient. With the narrow one first oneDNN is faster."""
    if a.shape[1] > b.shape[1]:
        return linear(b.t(), a.t()).t()
    return linear(a.t(), b.t())


def _second_product(g: Tensor, u: Tensor, scale: Tensor, w2: Tensor, dw2: Tensor | None) -> tuple[Tensor, Tensor]:
    """The backward pass of `(u * scale) @ w2.T`: gradients of `u` (through the product alone) and of the scale.

    Args:
        g: `[N, P, C]`, the gradient of the result.
        u: `[N, P, 4C]`; scale: `[N, 4C]`; w2: `[C, 4C]`.
        dw2: what the weight's gradient is added to, None where it is not wanted.
    """
    factor = scale[:, None].to(u.dtype)
    d = linear(g, w2.t())
    if u.shape[1] < w2.shape[0]:
        scratch = u * factor
        if dw2 is not None:
            dw2 += _product_over_rows(_flat(g), _flat(scratch))
        dscale = torch.mul(d, u, out=scratch).sum(1, dtype=scale.dtype)
    else:
        q = torch.bmm(u.transpose(1, 2), g).to(scale.dtype)
        dscale = (q * w2.t()).sum(2)
        if dw2 is not None:
            dw2 += q.mul_(scale[:, :, None]).sum(0).t()
    return d.mul_(factor), dscale


def _plain_gradients(inputs: list[Tensor], needed: Sequence[bool], eps: float, grad: Tensor) -> list[Tensor | None]:
    """The same by autograd, with a graph."""
    x, gate, w1, b1, gamma, beta, w2 = inputs
    fc1, fc2 = partial(F.linear, weight=w1, bias=b1), partial(F.linear, weight=w2)
    grn = partial(reference.grn, gamma=gamma, beta=beta, eps=eps)
    out = reference.gated_ffn(x[:, None].permute(0, 3, 1, 2), fc1, grn, fc2, gate)[:, :, 0].transpose(1, 2)
    return gradients_with_graph(out, inputs, needed, grad)


def _norm_gradient(dratio: Tensor, norm: Tensor, eps: float) -> Tensor:
    """The norm's gradient over the norm, which multiplies `u`; none for a channel that is zero everywhere."""
    mean = norm.mean(-1, keepdim=True) + eps
    dnorm = dratio / mean - (dratio * norm).sum(-1, keepdim=True) / (mean.square() * norm.shape[-1])
    return torch.where(norm.square() > LEAST_SQUARE, dnorm / norm, 0)

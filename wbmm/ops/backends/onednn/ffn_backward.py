"""The feed-forward part in training, with a backward pass written out: fewer passes over the wide hidden layer.

With `u = GELU((gate * x) @ w1.T + b1)`, `n` the norm of each channel of `u` over the map, `r = n / (mean(n) + eps)` and
`s = 1 + gamma * r` for each sample, the result is `(u * s + beta) @ w2.T`. Of the wide tensors only the pre-activation
is kept; `u` is computed again, which costs less than to write and read it. What autograd would do in a dozen passes
over tensors of four times the map's width is two products and a few passes, over blocks that stay in the cache:

- With `q = u.T @ dy`, the gradients of the second weight and of the scale are `q * s` and the sum of `q * w2.T` over
  outputs: neither `u * s` nor `du * u` is formed. `q` is the smaller while a map has at least as many positions as
  channels.
- Where the gradients are themselves to be differentiated, autograd does the work after all.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from wbmm.ops import reference
from wbmm.ops.reference import LEAST_SQUARE

from .ffn import rows_at_once
from .linear import linear

__all__ = ["ffn_training"]

BLOCK_ROWS = 3136  # the weights' gradients are added up over blocks: fewer and larger ones than in inference


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
    return _FeedForward.apply(rows, gate, w1, b1, gamma.flatten(), beta.flatten(), w2, eps).view(x.shape)


def _relative(norm: Tensor, eps: float) -> Tensor:
    """Norms `[N, 4C]` relative to their mean over channels."""
    return norm / (norm.mean(-1, keepdim=True) + eps)


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, w1, b1, gamma, beta, w2, eps):
        batch, positions, _ = x.shape
        out, norm = torch.empty_like(x), x.new_empty(batch, w1.shape[0])
        base = w2 @ beta
        step = max(rows_at_once(w1.shape[0], x, BLOCK_ROWS) // positions, 1)
        hidden = []
        for i in range(0, batch, step):
            part = slice(i, i + step)
            hidden.append(linear(x[part] * gate[part, None], w1, b1))
            u = F.gelu(hidden[-1])
            norm[part] = u.square().sum(1).clamp_min_(LEAST_SQUARE).sqrt_()
            scale = 1 + gamma * _relative(norm[part], eps)
            out[part] = linear(u.mul_(scale[:, None]), w2, base)
        ctx.save_for_backward(x, gate, w1, b1, gamma, beta, w2, norm, *hidden)
        ctx.eps, ctx.step = eps, step
        return out

    @staticmethod
    def backward(ctx, grad):
        with torch.autocast("cpu", enabled=False):  # it may be on for the backward pass alone
            return _FeedForward._gradients(ctx, grad)

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
        dw1, dw2 = (
            torch.zeros_like(weight) if wanted else None for weight, wanted in ((w1, needed[2]), (w2, needed[6]))
        )
        db1, dgamma = torch.zeros_like(gamma), torch.zeros_like(gamma)
        for i, h in zip(range(0, len(x), ctx.step), hidden, strict=True):
            part = slice(i, i + ctx.step)
            u, n = F.gelu(h), norm[part]
            ratio = _relative(n, ctx.eps)
            scale = 1 + gamma * ratio
            d, dscale = _second_product(grad[part], u, scale, w2, dw2)
            dgamma += (dscale * ratio).sum(0)
            d.addcmul_(u, _norm_gradient(dscale * gamma, n, ctx.eps)[:, None])
            torch.ops.aten.gelu_backward.grad_input(d, h, grad_input=d)
            db1 += _flat(d).sum(0)
            if dw1 is not None:
                dw1.addmm_(_flat(d).t(), _flat(x[part] * gate[part, None]))
            if dx is None and dgate is None:
                continue
            dgated = linear(d, w1.t())
            if dgate is not None:
                dgate[part] = (dgated * x[part]).sum(1)
            if dx is not None:
                torch.mul(dgated, gate[part, None], out=dx[part])
        total = _flat(grad).sum(0)
        if dw2 is not None:
            dw2.addr_(total, beta)
        return dx, dgate, dw1, db1, dgamma, total @ w2, dw2, None


def _second_product(g: Tensor, u: Tensor, scale: Tensor, w2: Tensor, dw2: Tensor | None) -> tuple[Tensor, Tensor]:
    """The backward pass of `(u * scale) @ w2.T`: gradients of `u` (through the product alone) and of the scale.

    Args:
        g: `[N, P, C]`, the gradient of the result.
        u: `[N, P, 4C]`; scale: `[N, 4C]`; w2: `[C, 4C]`.
        dw2: what the weight's gradient is added to, None where it is not wanted.
    """
    if u.shape[1] < w2.shape[0]:
        scratch = u * scale[:, None]
        if dw2 is not None:
            dw2 += linear(_flat(g).t(), _flat(scratch).t())
        d = linear(g, w2.t())
        dscale = torch.mul(d, u, out=scratch).sum(1)
        return d.mul_(scale[:, None]), dscale
    # Not by oneDNN, which would transpose both factors first: where maps are large, that takes as long as the product.
    q = torch.stack([torch.mm(u[j].t(), g[j]) for j in range(len(g))])
    dscale = (q * w2.t()).sum(2)
    if dw2 is not None:
        dw2 += q.mul_(scale[:, :, None]).sum(0).t()
    return torch.stack([linear(g[j], (w2 * scale[j]).t()) for j in range(len(g))]), dscale


def _plain_gradients(inputs: list[Tensor], needed: Sequence[bool], eps: float, grad: Tensor) -> list[Tensor | None]:
    """The same by autograd, with a graph."""
    x, gate, w1, b1, gamma, beta, w2 = inputs
    fc1, fc2 = partial(F.linear, weight=w1, bias=b1), partial(F.linear, weight=w2)
    grn = partial(reference.grn, gamma=gamma, beta=beta, eps=eps)
    out = reference.gated_ffn(x[:, None].permute(0, 3, 1, 2), fc1, grn, fc2, gate)[:, :, 0].transpose(1, 2)
    wanted = [tensor for tensor, wants in zip(inputs, needed, strict=True) if wants]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if wants else None for wants in needed]


def _norm_gradient(dratio: Tensor, norm: Tensor, eps: float) -> Tensor:
    """The norm's gradient over the norm, which multiplies `u`; none for a channel that is zero everywhere."""
    mean = norm.mean(-1, keepdim=True) + eps
    dnorm = dratio / mean - (dratio * norm).sum(-1, keepdim=True) / (mean.square() * norm.shape[-1])
    return torch.where(norm.square() > LEAST_SQUARE, dnorm / norm, 0)

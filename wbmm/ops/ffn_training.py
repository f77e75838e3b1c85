"""The feed-forward part in training, with a backward pass written out: fewer passes over the wide hidden layer.

With `u = GELU(x @ w1.T + b1)`, `n` the norm of each channel of `u` over the map, `r = n / (mean(n) + eps)` and
`s = 1 + gamma * r` for each sample, the result is `(u * s + beta) @ w2.T`. Only the pre-activation and `u` are kept.
What autograd would do in a dozen passes over tensors of four times the map's width is two products and two passes:

- The scale belongs to the small weight while a map has at least as many positions as channels: `u @ (w2 * s).T`.
- With `q = dy.T @ u`, the gradients of the second weight and of the scale are `q * s` and the sum of `q * w2` over
  outputs: neither `u * s` nor `du * u` is ever formed.
- Where the gradients are themselves to be differentiated, autograd does the work after all.
- Samples are taken one by one where one's hidden layer fills the cache, as in inference.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .ffn import LEAST_SQUARE, response_norm, samples_at_once

__all__ = ["ffn_training"]


def ffn_training(x: Tensor, w1: Tensor, b1: Tensor, gamma: Tensor, beta: Tensor, w2: Tensor, eps: float) -> Tensor:
    """`fc2(GRN(GELU(fc1(x))))` with gradients, in eager mode.

    Args:
        x: `[B, H, W, C]`.
        w1: `[4C, C]`; b1: `[4C]`; gamma, beta: of GRN, 4C elements in any shape; w2: `[C, 4C]`.
        eps: of GRN.

    Returns:
        `[B, H, W, C]`.
    """
    batch, height, width, channels = x.shape
    rows = x.reshape(batch, height * width, channels).contiguous()
    return _FeedForward.apply(rows, w1, b1, gamma.flatten(), beta.flatten(), w2, eps).view(x.shape)


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, b1, gamma, beta, w2, eps):
        batch, positions, channels = x.shape
        width = w1.shape[0]
        hidden, active = x.new_empty(batch, positions, width), x.new_empty(batch, positions, width)
        out, norm = x.new_empty(batch, positions, channels), x.new_empty(batch, width)
        base = w2 @ beta
        step = samples_at_once(batch, positions * width * x.element_size())
        for i in range(0, batch, step):
            part = slice(i, i + step)
            h, u = hidden[part], active[part]
            torch.addmm(b1, _flat(x[part]), w1.t(), out=_flat(h))
            torch.ops.aten.gelu.out(h, out=u)
            norm[part] = u.square().sum(1).clamp_min_(LEAST_SQUARE).sqrt_()
            scale = 1 + gamma * _relative(norm[part], eps)
            if positions >= channels:
                torch.baddbmm(base, u, (w2 * scale[:, None]).transpose(1, 2), out=out[part])
            else:
                torch.addmm(base, _flat(u * scale[:, None]), w2.t(), out=_flat(out[part]))
        ctx.save_for_backward(hidden, active, norm, x, w1, b1, gamma, beta, w2)
        ctx.eps, ctx.step = eps, step
        return out

    @staticmethod
    def backward(ctx, grad):
        hidden, active, norm, *inputs = ctx.saved_tensors
        needed = ctx.needs_input_grad[:-1]
        if torch.is_grad_enabled():  # the gradients are themselves to be differentiated
            return *_plain_gradients(inputs, needed, ctx.eps, grad), None
        x, w1, _, gamma, beta, w2 = inputs
        batch, positions, channels = x.shape
        grad = grad.contiguous()
        dx = torch.empty_like(x) if needed[0] else None
        dw1, dw2 = (
            torch.zeros_like(weight) if wanted else None for weight, wanted in ((w1, needed[1]), (w2, needed[5]))
        )
        db1, dgamma = torch.zeros_like(gamma), torch.zeros_like(gamma)
        for i in range(0, batch, ctx.step):
            part = slice(i, i + ctx.step)
            g, u, n = grad[part], active[part], norm[part]
            ratio = _relative(n, ctx.eps)
            scale = 1 + gamma * ratio
            if positions >= channels:
                q = torch.bmm(g.transpose(1, 2), u)
                dscale = (q * w2).sum(1)
                if dw2 is not None:
                    dw2 += q.mul_(scale[:, None]).sum(0)
                d = torch.bmm(g, w2 * scale[:, None])
            else:
                if dw2 is not None:
                    torch.addmm(dw2, _flat(g).t(), _flat(u * scale[:, None]), out=dw2)
                d = (_flat(g) @ w2).view_as(u)
                dscale = (d * u).sum(1)
                d.mul_(scale[:, None])
            dgamma += (dscale * ratio).sum(0)
            d.addcmul_(u, _norm_gradient(dscale * gamma, n, ctx.eps)[:, None])
            torch.ops.aten.gelu_backward.grad_input(d, hidden[part], grad_input=d)
            if dx is not None:
                torch.mm(_flat(d), w1, out=_flat(dx[part]))
            if dw1 is not None:
                torch.addmm(dw1, _flat(d).t(), _flat(x[part]), out=dw1)
            db1 += _flat(d).sum(0)
        total = _flat(grad).sum(0)
        if dw2 is not None:
            dw2.addr_(total, beta)
        return dx, dw1, db1, dgamma, total @ w2, dw2, None


def _plain_gradients(inputs: list[Tensor], needed: Sequence[bool], eps: float, grad: Tensor) -> list[Tensor | None]:
    """The same by autograd, with a graph."""
    x, w1, b1, gamma, beta, w2 = inputs
    u = F.gelu(F.linear(x, w1, b1))
    scale = 1 + gamma * response_norm(u[:, :, None], eps)[:, 0]
    out = F.linear(u * scale + beta, w2)
    wanted = [tensor for tensor, wants in zip(inputs, needed, strict=True) if wants]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if wants else None for wants in needed]


def _relative(norm: Tensor, eps: float) -> Tensor:
    """`[B, 4C]`: norms relative to their mean over channels."""
    return norm / (norm.mean(-1, keepdim=True) + eps)


def _norm_gradient(dratio: Tensor, norm: Tensor, eps: float) -> Tensor:
    """The norm's gradient over the norm, which multiplies `u`; none for a channel that is zero everywhere."""
    mean = norm.mean(-1, keepdim=True) + eps
    dnorm = dratio / mean - (dratio * norm).sum(-1, keepdim=True) / (mean.square() * norm.shape[-1])
    return torch.where(norm.square() > LEAST_SQUARE, dnorm / norm, 0)

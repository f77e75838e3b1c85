"""The feed-forward part in inference, laid out for the cache."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .linear import linear, linear_add, linear_gelu

# The hidden layer is four times as wide as the map, and over a whole batch fits no cache of a CPU. It is computed in
# blocks of about this size, but of no fewer rows than make the products efficient: `wbmm bench paths`.
BLOCK_BYTES = 2**22
BLOCK_ROWS = 784


def rows_at_once(hidden_width: int, like: Tensor, least: int = BLOCK_ROWS) -> int:
    """How many rows of the hidden layer to compute together, but for rounding."""
    return max(BLOCK_BYTES // (hidden_width * like.element_size()), least)


def _apply_response_norm(blocks: Sequence[Tensor], gamma: Tensor, eps: float) -> None:
    """`block * (1 + gamma * N)`, in place, of samples whose rows come in blocks `[n, rows, C]`.

    N is that of `reference.response_norm`.

    Few and small operations, which count where there is one image.
    """
    first, *rest = map(_sum_of_squares, blocks)
    norm = sum(rest, first).sqrt_()
    mean = norm.mean(-1, keepdim=True).add_(eps)
    factor = norm.mul_(gamma).div_(mean).to(blocks[0].dtype)
    for block in blocks:
        block.addcmul_(block, factor)


def _sum_of_squares(rows: Tensor) -> Tensor:
    """Over positions: `[n, rows, C]` to `[n, 1, C]`, in float32 at least; see `reference.response_norm`."""
    if rows.element_size() < 4:
        return torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float32).square_()
    return rows.square().sum(1, keepdim=True)


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

    Returns:
        `[B, C, H, W]`, channels-last memory.
    """
    batch, channels, height, width = x.shape
    rows = _samples(x)
    at_once = at_once or rows_at_once(w1.shape[0], rows)
    step = max(at_once // (height * width), 1)  # samples; one block of them needs no cutting
    rows_each = math.ceil(height * width / math.ceil(height * width / at_once))
    samples = _cut(rows, step, 0)
    gates = [None] * len(samples) if gate is None else _cut(gate, step, 0)
    residuals = [None] * len(samples) if shortcut is None else _cut(_samples(shortcut), step, 0)
    out = []
    for part, factor, residual in zip(samples, gates, residuals, strict=True):
        gated = part if factor is None else part * factor[:, None]
        blocks = [linear_gelu(block, w1, b1) for block in _cut(gated, rows_each, 1)]
        _apply_response_norm(blocks, gamma, eps)
        if residual is None:
            out += [linear(block, w2, b2) for block in blocks]
        else:
            others = _cut(residual, rows_each, 1)
            out += [linear_add(block, w2, b2, other) for block, other in zip(blocks, others, strict=True)]
    whole = out[0] if len(out) == 1 else torch.cat([block.flatten(0, 1) for block in out])
    return whole.view(batch, height, width, channels).permute(0, 3, 1, 2)


def _cut(x: Tensor, size: int, dim: int) -> Sequence[Tensor]:
    return (x,) if x.shape[dim] <= size else x.split(size, dim)

"""The feed-forward part in inference, laid out for the cache."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .linear import linear_add, linear_gelu

# The hidden layer is four times as wide as the map, and over a whole batch fits no cache of a CPU. It is computed in
# blocks of about this size, but of no fewer rows than make the products efficient: `wbmm bench paths`.
BLOCK_BYTES = 2**22
BLOCK_ROWS = 784
LEAST_SQUARE = 1e-30


def rows_at_once(hidden_width: int, like: Tensor, least: int = BLOCK_ROWS) -> int:
    """How many rows of the hidden layer to compute together, but for rounding; all of them on a GPU."""
    if like.device.type != "cpu":
        return like.shape[0] * like.shape[1]
    return max(BLOCK_BYTES // (hidden_width * like.element_size()), least)


def relative(norm: Tensor, eps: float) -> Tensor:
    """Norms `[..., C]` relative to their mean over channels."""
    return norm / (norm.mean(-1, keepdim=True) + eps)


def response_norm(x: Tensor, eps: float) -> Tensor:
    """A channel's L2 norm over the map, relative to the mean over channels: `[B, H, W, C]` to `[B, 1, 1, C]`.

    A plain sum of squares is several times faster on a CPU than `vector_norm`. Half-precision maps need the latter: it
    sums in float32, where their squares would overflow.
    """
    if not isinstance(x, Tensor):  # an fx proxy, whose dtype is not known
        norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    elif x.dtype in (torch.float16, torch.bfloat16):
        norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    else:
        # The bound keeps the gradient of the root finite for a channel that is zero everywhere.
        norm = x.square().sum((1, 2), keepdim=True).clamp_min(LEAST_SQUARE).sqrt()
    return relative(norm, eps).to(x.dtype)


def _apply_response_norm(blocks: Sequence[Tensor], gamma: Tensor, eps: float) -> None:
    """`block * (1 + gamma * N)`, in place, of samples whose rows come in blocks `[n, rows, C]`; N as `response_norm`.

    Few and small operations, which count where there is one image.
    """
    first, *rest = map(_sum_of_squares, blocks)
    norm = sum(rest, first).sqrt_()
    mean = norm.mean(-1, keepdim=True).add_(eps)
    factor = norm.mul_(gamma).div_(mean).to(blocks[0].dtype)
    for block in blocks:
        block.addcmul_(block, factor)


def _sum_of_squares(rows: Tensor) -> Tensor:
    """Over positions: `[n, rows, C]` to `[n, 1, C]`, in float32 at least; see `response_norm`."""
    if rows.element_size() < 4:
        return torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float32).square_()
    return rows.square().sum(1, keepdim=True)


def _samples(x: Tensor) -> Tensor:
    """`[B, C, H, W]` in channels-last memory as the view `[B, HW, C]`."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def ffn_inference(
    x: Tensor,
    gate: Tensor,
    shortcut: Tensor,
    w1: Tensor,
    b1: Tensor,
    gamma: Tensor,
    w2: Tensor,
    b2: Tensor,
    eps: float,
    at_once: int | None = None,
) -> Tensor:
    """`shortcut + fc2(GELU(fc1(gate * x)) * (1 + gamma * N))`, without gradients.

    A block is several samples or, where one sample's hidden layer is too large, some of its rows; N is known once all
    rows of a sample are.

    Args:
        x: `[B, C, H, W]`, channels-last memory.
        gate: `[B, C]`.
        shortcut: `[B, C, H, W]`.
        w1: `[4C, C]`; b1: `[4C]`; gamma: `[4C]`; w2: `[C, 4C]`; b2: `[C]`. The weights may be packed (`pack_weight`).
        at_once: rows of the hidden layer to compute together; by `rows_at_once` if not given.

    Returns:
        `[B, C, H, W]`, channels-last memory.
    """
    batch, channels, height, width = x.shape
    rows, residual = _samples(x), _samples(shortcut)
    at_once = at_once or rows_at_once(w1.shape[0], rows)
    step = max(at_once // (height * width), 1)  # samples; one block of them needs no cutting
    rows_each = math.ceil(height * width / math.ceil(height * width / at_once))
    out = []
    for samples, gates, others in zip(*(_cut(tensor, step, 0) for tensor in (rows, gate, residual)), strict=True):
        blocks = [linear_gelu(block, w1, b1) for block in _cut(samples * gates[:, None], rows_each, 1)]
        _apply_response_norm(blocks, gamma, eps)
        shortcuts = _cut(others, rows_each, 1)
        out += [linear_add(block, w2, b2, other) for block, other in zip(blocks, shortcuts, strict=True)]
    whole = out[0] if len(out) == 1 else torch.cat([block.flatten(0, 1) for block in out])
    return whole.view(batch, height, width, channels).permute(0, 3, 1, 2)


def _cut(x: Tensor, size: int, dim: int) -> Sequence[Tensor]:
    return (x,) if x.shape[dim] <= size else x.split(size, dim)

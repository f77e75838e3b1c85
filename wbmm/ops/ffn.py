"""The feed-forward part in inference, laid out for the cache."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Above this size of one sample's hidden activation, samples are computed one by one: the hidden layer is four times as
# wide as the map and, over a whole batch, fits no cache. docs/design.md has the measurement.
HIDDEN_BYTES = 1_500_000


def response_norm(x: Tensor, eps: float) -> Tensor:
    """A channel's L2 norm over the map, relative to the mean over channels: `[B, H, W, C]` to `[B, 1, 1, C]`.

    Half-precision maps are summed in float32: a sum of squares over a map overflows float16.
    """
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=wide)
    return (norm / (norm.mean(-1, keepdim=True) + eps)).to(x.dtype)


def _samples(x: Tensor) -> Tensor:
    """`[B, C, H, W]` in channels-last memory as the view `[B, HW, C]`."""
    return x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, x.shape[1])


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
) -> Tensor:
    """`shortcut + fc2(GELU(fc1(gate * x)) * (1 + gamma * N))`, without gradients.

    Both the gate and GRN's scale are per sample and channel, so where a map has more positions than there are channels
    they are applied to the small weights instead of the large activations.

    Args:
        x: `[B, C, H, W]`, channels-last memory.
        gate: `[B, C]`.
        shortcut: `[B, C, H, W]`.
        w1: `[4C, C]`; b1: `[4C]`; gamma: `[4C]`; w2: `[C, 4C]`; b2: `[C]`.

    Returns:
        `[B, C, H, W]`, channels-last memory.
    """
    batch, channels, height, width = x.shape
    rows, residual = _samples(x), _samples(shortcut)
    hidden_bytes = height * width * w1.shape[0] * x.element_size()
    out = torch.empty_like(rows)
    step = 1 if hidden_bytes > HIDDEN_BYTES else batch
    on_weights = height * width >= channels
    for i in range(0, batch, step):
        part, part_gate = rows[i : i + step], gate[i : i + step, None, :]
        if on_weights:
            hidden = torch.baddbmm(b1, part, (w1 * part_gate).transpose(1, 2))
        else:
            hidden = F.linear(part * part_gate, w1, b1)
        hidden = F.gelu(hidden)
        scale = 1 + gamma * response_norm(hidden[:, :, None], eps)[:, 0]
        base = residual[i : i + step] + b2
        if on_weights:
            out[i : i + step] = torch.baddbmm(base, hidden, (w2 * scale).transpose(1, 2))
        else:
            out[i : i + step] = base + F.linear(hidden * scale, w2)
    return out.view(batch, height, width, channels).permute(0, 3, 1, 2)

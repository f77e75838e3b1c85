"""The feed-forward part in inference, laid out for the cache."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Above this size of one sample's hidden activation, samples are computed one by one: the hidden layer is four times as
# wide as the map and, over a whole batch, fits no cache. docs/design.md has the measurement.
HIDDEN_BYTES = 1_500_000
LEAST_SQUARE = 1e-30


def samples_at_once(batch: int, hidden_bytes: int) -> int:
    """How many samples to compute together, given the size of one's hidden activation."""
    return 1 if hidden_bytes > HIDDEN_BYTES else max(batch, 1)


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
    return (norm / (norm.mean(-1, keepdim=True) + eps)).to(x.dtype)


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
    on_weights = height * width >= channels
    step = samples_at_once(batch, height * width * w1.shape[0] * x.element_size())
    out = rows.new_empty(rows.shape)
    for i in range(0, batch, step):
        part = slice(i, i + step)
        if on_weights:
            hidden = torch.baddbmm(b1, rows[part], (w1 * gate[part, None]).transpose(1, 2))
        else:
            hidden = F.linear(rows[part] * gate[part, None], w1, b1)
        hidden = F.gelu(hidden)
        scale = 1 + gamma * response_norm(hidden[:, :, None], eps)[:, 0]
        base = residual[part] + b2
        if on_weights:
            torch.baddbmm(base, hidden, (w2 * scale).transpose(1, 2), out=out[part])
        else:
            flat = hidden.mul_(scale).flatten(0, 1)
            torch.addmm(base.flatten(0, 1), flat, w2.t(), out=out[part].flatten(0, 1))
    return out.view(batch, height, width, channels).permute(0, 3, 1, 2)

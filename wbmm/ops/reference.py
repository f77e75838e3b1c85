"""The computations that the family is made of, as definitions: the windowed operator, the feed-forward part, its gate.

All are differentiable and traceable, in any dtype and on any device, and have no branch on sizes. What is compiled,
exported or scripted is this; the backends (`dispatch.py`) compute the same faster, and are compared with it.
"""

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .tables import Window, expand
from .windows import is_channels_last, merge_windows, pad_to_windows, partition_windows

__all__ = ["GlobalResponseNorm", "gated_ffn", "grn", "opaque_product", "response_norm", "squeeze_excite", "windowed"]

LEAST_SQUARE = 1e-30


def windowed(
    x: Tensor,
    tables: list[Tensor],
    window: Window,
    bias: Tensor | None = None,
    shortcuts: int = 0,
    padding_mode: str = "zeros",
    index: list[Tensor] | None = None,
) -> Tensor:
    """Multiply each channel of each window with the channel's matrix: `Y = X @ M + shortcuts * X + bias`.

    Args:
        x: `[B, C, H, W]`, any H and W.
        tables: what the matrix `M[C, d, d]`, d = wh*ww, is made of: a table `[C, (2wh-1)(2ww-1)]` over offsets; that
            and one `[C, (wh-1)(ww-1)]` over the offsets inside a quarter of the window; or the matrix itself, its rows
            input positions.
        window: (wh, ww).
        bias: `[C]`.
        shortcuts: how many times the input is added. Kept apart from the matrix in training: in bfloat16 a table entry
            next to the 1 of the shortcut would lose its low bits.
        padding_mode: how a map is padded to whole windows.
        index: `relative_index` of each table's window, where the caller already has them.

    Returns:
        `[B, C, H, W]`, in the memory format of `x` and its type; under autocast, in autocast's.
    """
    batch, _, height, width = x.shape
    if not torch.jit.is_scripting():
        x = to_autocast_type(x)  # once, and before it is cut: the product would convert each use of the windows
    matrix = expand(tables, window, index)
    windows = partition_windows(pad_to_windows(x, window, padding_mode), window)
    if shortcuts > 0:
        out = torch.baddbmm(windows, windows, matrix, beta=shortcuts)
        out = out if bias is None else out + bias[:, None, None].to(out.dtype)
    elif bias is not None:
        out = torch.baddbmm(bias[:, None, None], windows, matrix)
    else:
        # Not bmm, which on a CPU is fifty times slower for a single window. What is added zero times needs no gradient.
        out = torch.baddbmm(windows[:, :1, :1].detach(), windows, matrix, beta=0)
    return merge_windows(out, (batch, height, width), window, is_channels_last(x))


def to_autocast_type(x: Tensor) -> Tensor:
    """What autocast would convert, converted; it leaves float64 alone. A compiler merges conversions by itself."""
    if torch.compiler.is_compiling():
        return x
    dtype = autocast_type(x.device)
    return x if dtype is None or x.dtype == torch.float64 else x.to(dtype)


def autocast_type(device: torch.device) -> torch.dtype | None:
    """What autocast computes products in; None if it is off, or is nothing that the device has."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def gated_ffn(
    x: Tensor,
    fc1: Callable[[Tensor], Tensor],
    grn: Callable[[Tensor], Tensor],
    fc2: Callable[[Tensor], Tensor],
    gate: Tensor | None = None,
    norm: Callable[[Tensor], Tensor] | None = None,
    scale: Tensor | None = None,
    shortcut: Tensor | None = None,
    drop_path: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """`shortcut + drop_path(scale * norm(fc2(grn(GELU(fc1(gate * x))))))`; all but linears and GRN may be missing.

    Args:
        x: `[B, C, H, W]`. The linears and GRN see the view `[B, H, W, C]`, free in channels-last memory.
        fc1: C to the hidden width; fc2: back.
        gate: `[B, C]`, from squeeze and excitation.
        norm: of a map `[B, C, H, W]`.
        scale: `[C]`, the layer scale.
        shortcut: `[B, C, H, W]`.
        drop_path: in training, leaves out the whole part for some samples.
    """
    out = from_rows(fc2(grn(F.gelu(fc1(to_rows(x, gate))))))
    return finish(out if norm is None else norm(out), scale, shortcut, drop_path)


def squeeze_excite(x: Tensor, fc1: Callable[[Tensor], Tensor], fc2: Callable[[Tensor], Tensor]) -> Tensor:
    """`sigmoid(fc2(ReLU(fc1(mean over the map))))`: a gate per sample and channel, `[B, C, H, W]` to `[B, C]`."""
    return torch.sigmoid(fc2(F.relu(fc1(x.mean((2, 3))))))


def to_rows(x: Tensor, gate: Tensor | None) -> Tensor:
    """`gate * x` as `[B, H, W, C]`."""
    x = x if gate is None else x * gate[:, :, None, None]
    return x.permute(0, 2, 3, 1)


def from_rows(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


def finish(
    out: Tensor, scale: Tensor | None, shortcut: Tensor | None, drop_path: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """What follows the norm of the feed-forward part."""
    out = out if scale is None else out * scale[:, None, None]
    out = out if drop_path is None else drop_path(out)
    return out if shortcut is None else shortcut + out


def grn(x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float) -> Tensor:
    """Global response normalisation, `x * (1 + gamma * N(x)) + beta` on `[B, H, W, C]`, in the dtype of x.

    Under autocast gamma and beta are float32, and would promote x, the widest tensor of a block.
    """
    scale = (1 + gamma * response_norm(x, eps)).to(x.dtype)
    return x * scale if beta is None else torch.addcmul(beta.to(x.dtype), x, scale)


class GlobalResponseNorm(nn.Module):
    """`x * (1 + gamma * N(x)) + beta` on `[B, H, W, C]`; N is a channel's L2 norm over the map, relative to their mean.

    gamma and beta are stored as `[1, 1, 1, C]`: weight decay applies to them, as in the released recipe, and skips 1-d
    parameters.
    """

    def __init__(self, dim: int, eps: float = 1e-6, device=None, dtype=None) -> None:
        super().__init__()
        self.eps = eps
        self.gamma = nn.Parameter(torch.zeros(1, 1, 1, dim, device=device, dtype=dtype))
        self.beta = nn.Parameter(torch.zeros(1, 1, 1, dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return grn(x, self.gamma, self.beta, self.eps)


def response_norm(x: Tensor, eps: float, least_square: float = LEAST_SQUARE) -> Tensor:
    """N: a channel's L2 norm over the map, relative to the mean over channels: `[B, H, W, C]` to `[B, 1, 1, C]`.

    A plain sum of squares is several times faster on a CPU than `vector_norm`. Half-precision maps need the latter: it
    sums in float32, where their squares would overflow. Elsewhere it reads the map once and writes no squares.
    """
    if x.dtype == torch.float16 or x.dtype == torch.bfloat16 or x.device.type != "cpu":
        norm = torch.linalg.vector_norm(x, dim=[1, 2], keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    else:
        # `least_square` keeps the gradient of the root finite for a channel that is zero everywhere.
        norm = x.square().sum([1, 2], keepdim=True).clamp_min(least_square).sqrt()
    return (norm / (norm.mean(-1, keepdim=True) + eps)).to(x.dtype)


@torch.library.custom_op("wbmm::windowed_product", mutates_args=())
def opaque_product(
    x: Tensor, matrix: Tensor, window: list[int], bias: Tensor | None, shortcuts: int, padding_mode: str
) -> Tensor:
    """`windowed` as one node of an exported graph with dynamic H or W; the result is contiguous.

    `torch.export` cannot prove that a padded side always divides into windows, and would pin the size that it saw.
    """
    return windowed(x, [matrix], (window[0], window[1]), bias, shortcuts, padding_mode).contiguous()


@opaque_product.register_fake
def _(x, matrix, window, bias, shortcuts, padding_mode):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)

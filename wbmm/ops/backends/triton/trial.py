"""The first call of each kind on a GPU: the kernels against the reference, on a small map.

No GPU has run these kernels where they were written. So before a kind of call is left to them, they are tried. If they
cannot be compiled or launched here (Triton needs a C compiler, for one), or give another result than the reference,
that is said once, and other backends compute such calls.
"""

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from wbmm.ops import reference
from wbmm.ops.backends import Call
from wbmm.ops.tables import num_offsets, scales_of
from wbmm.text import first_line

__all__ = ["DEVICES", "first_use"]

log = logging.getLogger(__name__)

DEVICES = ("cuda",)  # where calls are tried
# Of the largest value. TF32 and bfloat16 keep 10 and 7 bits; a kernel that is wrong is wrong by about 1.
TOLERANCES = {torch.float32: 0.02, torch.float16: 0.05, torch.bfloat16: 0.1}
POSITIONS = 81  # of a map for the feed-forward part: more than one block, and not a whole number of them
EPS = 1e-5

_found: dict[tuple, str | None] = {}


def first_use(call: Call) -> str | None:
    """None, or why the kernels should not compute such calls here; tried at the first of them."""
    x = call.x
    if x.device.type not in DEVICES:
        return None
    dtype = reference.autocast_type(x.device) or x.dtype
    last, precision = x.stride(1) == 1, torch.get_float32_matmul_precision()
    key = (call.operator, x.device, dtype, call.grad, call.window, call.tables, call.weights[0].shape, last, precision)
    if key not in _found:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # a graph cannot wait for a result
        _found[key] = _try(call, dtype, last)
    return _found[key]


def _try(call: Call, dtype: torch.dtype, last: bool) -> str | None:
    from . import no_autocast

    try:
        with torch.set_grad_enabled(call.grad), torch.cuda.device_of(call.x), no_autocast(call.x):
            errors = _windowed(call, dtype, last) if call.operator == "windowed" else _gated_ffn(call, dtype)
            error = torch.stack(errors).max().item()  # NaN if there is one
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:  # of Triton, of the compilers that it calls, of the driver
        why = f"its kernels failed on {call.x.device}: {type(failure).__name__}, {first_line(failure)}"
    else:
        if error <= TOLERANCES[dtype]:
            return None
        why = f"its result on {call.x.device} is off by {error:.2g} of the largest value, tried on a small map"
    log.warning("backend triton does not compute %s in %s: %s", call.operator, str(dtype).removeprefix("torch."), why)
    return why


def _values(like: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """Numbers in [-1, 1] that look like chance; nobody's random state moves."""
    places = torch.arange(1, 1 + torch.Size(shape).numel(), device=like.device, dtype=torch.float64)
    return (places * places * 0.618 + shape[0]).sin().view(shape).to(dtype)


def _error(ours: Tensor, theirs: Tensor) -> Tensor:
    return (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max()


def _windowed(call: Call, dtype: torch.dtype, last: bool) -> list[Tensor]:
    """Every configuration that the tuner may choose; the gradient of the map is the same kernel."""
    from .windowed import PRODUCT_CONFIGS, product, table_gradient

    (wh, ww), more = call.window, call.x.shape[1] % 16
    # Few channels; kernels are compiled for a multiple of 16 or any number. The reference has the whole matrix.
    channels = 4 if wh * ww > 1024 else 16 + more
    x = _values(call.x, dtype, 2, channels, wh + 1, 2 * ww - 1)
    x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    scales, bias = scales_of(call.tables, call.window), _values(x, torch.float32, channels)
    tables = [_values(x, torch.float32, channels, num_offsets(scale)) / (wh * ww) ** 0.5 for scale in scales]
    tables = [table.requires_grad_(call.grad) for table in tables]
    expected = reference.windowed(x.float(), tables, call.window, bias, 1)
    plain = [table.detach() for table in tables]
    local = plain[1] if len(plain) > 1 else None
    errors = []
    for config in PRODUCT_CONFIGS:
        out = product(x, plain[0], local, bias, [wh, ww], 1, config)
        errors.append(_error(out, expected.detach()))
    if call.grad:
        grad = x.flip(0)
        for scale, dtable in zip(scales, torch.autograd.grad(expected, tables, grad.float()), strict=True):
            errors.append(_error(table_gradient(x, grad, list(scale)), dtable))
    return errors


def _gated_ffn(call: Call, dtype: torch.dtype) -> list[Tensor]:
    """The whole part; in training with the statistics of the batch, one of two samples dropped."""
    hidden, channels = call.weights[0].shape
    rows, wide, narrow = (2, POSITIONS, channels), (hidden,), (channels,)
    shapes = rows, (hidden, channels), wide, wide, (channels, hidden), narrow, narrow, narrow, rows
    inputs = [_values(call.x, dtype, *shape) for shape in shapes]
    for i in (1, 4):
        inputs[i] = inputs[i] * (3 / inputs[i].shape[1]) ** 0.5
    ours, theirs = (_outcome(part, inputs, call.grad) for part in (_by_kernels, _by_torch))
    return [_error(*pair) for pair in zip(ours, theirs, strict=True)]


def _outcome(part: Callable, inputs: list[Tensor], training: bool) -> list[Tensor]:
    inputs = [tensor.detach().requires_grad_(training) for tensor in inputs]
    out = part(training, *inputs)
    found = torch.autograd.grad(out, inputs, inputs[-1].detach().flip(1).to(out.dtype)) if training else ()
    return [out.detach(), *found]


def _by_kernels(training, x, w1, b1, gamma, w2, weight, bias, scale, shortcut) -> Tensor:
    from .ffn import ffn
    from .residual import batch_statistics, finish

    y = ffn(x, w1, b1, gamma, None, w2, EPS)
    statistics = batch_statistics(y) if training else (weight.float(), scale.float().square())
    keep = x.new_tensor([2, 0]) if training else None
    return finish(y, weight, bias, scale, shortcut, keep, statistics, EPS, training, x.dtype)


def _by_torch(training, x, w1, b1, gamma, w2, weight, bias, scale, shortcut) -> Tensor:
    given = (x, w1, b1, gamma, w2, weight, bias, scale, shortcut)
    x, w1, b1, gamma, w2, weight, bias, scale, shortcut = (tensor.float() for tensor in given)
    hidden = reference.grn(F.gelu(F.linear(x, w1, b1))[:, None], gamma, None, EPS)[:, 0]
    y = F.linear(hidden, w2).transpose(1, 2)
    mean, variance = (None, None) if training else (weight, scale.square())
    out = F.batch_norm(y, mean, variance, weight, bias, training, 0.0, EPS).transpose(1, 2) * scale
    return shortcut + (out * x.new_tensor([2, 0])[:, None, None] if training else out)

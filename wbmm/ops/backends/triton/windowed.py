"""The windowed operator in Triton: no copies of windows, no matrix in memory.

With `a(p) = h_p (2ww - 1) + w_p` for a position p of a window, the table's entry for input i and output j stands at
`a(i) - a(j) + a(last)`. So a tile of the matrix is one gather of the table with two vectors of offsets, and is made
where it is multiplied. A program has some windows, some output positions and some channels; in channels-last memory the
channels are what fills a memory sector. Positions outside the map are masked, which is zero padding.

- The gradient of the map is the same product with the tables reversed.
- The gradient of a table sums, over all windows and all pairs of positions with the same offset, `x[i] * dy[j]`. The
  window's rows are taken in blocks. One program sums the products of all pairs of blocks at one distance, over some of
  the windows; a second kernel sums those partial results along their diagonals. There are no atomics, so the result
  does not depend on the order in which programs run.
- The tuner may choose only what leaves the order of every sum alone: the step of the inner loop is fixed by the window
  and the type. So a run gives the same bits whatever it chose.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from wbmm.ops.tables import Window, num_offsets
from wbmm.ops.windows import grid_size, is_channels_last

from .context import no_autocast, tf32_allowed
from .launch import launch

__all__ = ["table_gradient", "table_product"]

STEP = 16  # input positions that one step of the inner loop adds up
# BC channels, BN windows, BJ output positions a program. 8 channels of float32 or 16 of half precision fill a sector.
PRODUCT_CONFIGS = [
    triton.Config({"BC": 8, "BN": 16, "BJ": 32}, num_warps=8, num_stages=2),
    triton.Config({"BC": 8, "BN": 32, "BJ": 32}, num_warps=8, num_stages=1),
    triton.Config({"BC": 16, "BN": 16, "BJ": 16}, num_warps=8, num_stages=2),
    triton.Config({"BC": 4, "BN": 32, "BJ": 32}, num_warps=8, num_stages=2),
]
PRODUCT_KEY = ["stride_w", "channels", "WH", "WW", "LOCAL", "PRECISION"]  # the first tells the memory format
# Not tuned: what is summed in one step is a number of windows.
GRADIENT_META = {"BN": 16, "BI": 32, "BJ": 32, "num_warps": 8, "num_stages": 1}
TILE = 64  # positions of a block of rows, at most, unless a single row has more
PROGRAMS = 1024  # of the gradient's first stage, about; a constant, so that sums are the same on every GPU
OFFSET_BLOCK = 16


@triton.jit
def product_kernel(
    x,
    table,
    local_table,
    bias,
    y,
    windows,
    channels,
    height,
    width,
    grid_h,
    grid_w,
    stride_b,
    stride_c,
    stride_h,
    stride_w,
    WH: tl.constexpr,
    WW: tl.constexpr,
    SHORTCUTS: tl.constexpr,
    LOCAL: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BC: tl.constexpr,
    BN: tl.constexpr,
    BI: tl.constexpr,
    BJ: tl.constexpr,
):
    """`y[n, j] = sum_i x[n, i] M[i, j] + SHORTCUTS x[n, j] + bias` for every channel."""
    D: tl.constexpr = WH * WW
    LH: tl.constexpr = WH // 2
    LW: tl.constexpr = WW // 2
    blocks_c = tl.cdiv(channels, BC)
    blocks_j: tl.constexpr = (D + BJ - 1) // BJ
    i_c = tl.program_id(0) % blocks_c
    i_j = tl.program_id(0) // blocks_c % blocks_j
    i_n = tl.program_id(0) // (blocks_c * blocks_j)

    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < channels
    o_n = i_n * BN + tl.arange(0, BN)
    o_row = o_n // grid_w % grid_h * WH
    o_col = o_n % grid_w * WW
    o_p = o_n // (grid_w * grid_h) * stride_b + o_row * stride_h + o_col * stride_w
    m_n = o_n < windows
    o_j = i_j * BJ + tl.arange(0, BJ)
    o_hj, o_wj = o_j // WW, o_j % WW
    o_x = o_c[:, None, None] * stride_c + o_p[None, :, None]
    o_t = o_c * ((2 * WH - 1) * (2 * WW - 1)) + (2 * WH * WW - WH - WW)
    o_t = o_t[:, None, None] - (o_hj * (2 * WW - 1) + o_wj)[None, None, :]
    if LOCAL:
        o_l = o_c * ((2 * LH - 1) * (2 * LW - 1)) + (2 * LH * LW - LH - LW)
        o_l = o_l[:, None, None] - (o_hj * (2 * LW - 1) + o_wj)[None, None, :]

    b_y = tl.zeros([BC, BN, BJ], dtype=tl.float32)
    for i in range(0, D, BI):
        o_i = i + tl.arange(0, BI)
        o_hi, o_wi = o_i // WW, o_i % WW
        m_x = (m_n[:, None] & (o_row[:, None] + o_hi < height) & (o_col[:, None] + o_wi < width))[None, :, :]
        m_x = m_x & m_c[:, None, None] & (o_i < D)[None, None, :]
        b_x = tl.load(x + (o_x + (o_hi * stride_h + o_wi * stride_w)[None, None, :]), mask=m_x, other=0)
        m_m = m_c[:, None, None] & ((o_i < D)[:, None] & (o_j < D)[None, :])[None, :, :]
        b_m = tl.load(table + (o_t + (o_hi * (2 * WW - 1) + o_wi)[None, :, None]), mask=m_m, other=0).to(tl.float32)
        if LOCAL:
            # Both positions in the same quarter of the window.
            m_q = ((o_hi // LH)[:, None] == (o_hj // LH)[None, :]) & ((o_wi // LW)[:, None] == (o_wj // LW)[None, :])
            p_l = local_table + (o_l + (o_hi * (2 * LW - 1) + o_wi)[None, :, None])
            b_m += tl.load(p_l, mask=m_m & m_q[None, :, :], other=0).to(tl.float32)
        b_m = b_m.to(b_x.dtype)
        if UPCAST:
            b_x, b_m = b_x.to(tl.float32), b_m.to(tl.float32)
        b_y = tl.dot(b_x, b_m, b_y, input_precision=PRECISION)

    o_y = o_x + (o_hj * stride_h + o_wj * stride_w)[None, None, :]
    m_y = (m_n[:, None] & (o_row[:, None] + o_hj < height) & (o_col[:, None] + o_wj < width))[None, :, :]
    m_y = m_y & m_c[:, None, None] & (o_j < D)[None, None, :]
    if SHORTCUTS > 0:
        b_y += SHORTCUTS * tl.load(x + o_y, mask=m_y, other=0).to(tl.float32)
    if BIAS:
        b_y += tl.load(bias + o_c, mask=m_c, other=0).to(tl.float32)[:, None, None]
    tl.store(y + o_y, b_y.to(y.dtype.element_ty), mask=m_y)


@triton.jit
def gradient_kernel(
    x,
    grad,
    partial,
    windows,
    channels,
    height,
    width,
    grid_h,
    grid_w,
    stride_b,
    stride_c,
    stride_h,
    stride_w,
    splits,
    WH: tl.constexpr,
    WW: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BC: tl.constexpr,
    BN: tl.constexpr,
    BI: tl.constexpr,
    BJ: tl.constexpr,
):
    """`partial[s, c, k, i, j]`: the sum of `x[i] * grad[j]` over pairs of blocks of rows that are k apart."""
    T: tl.constexpr = ROWS * WW
    BLOCKS: tl.constexpr = (WH + ROWS - 1) // ROWS
    tiles_i: tl.constexpr = (T + BI - 1) // BI
    tiles_j: tl.constexpr = (T + BJ - 1) // BJ
    blocks_c = tl.cdiv(channels, BC)
    i_p = tl.program_id(0)
    i_c = i_p % blocks_c
    i_j = i_p // blocks_c % tiles_j
    i_i = i_p // (blocks_c * tiles_j) % tiles_i
    i_k = i_p // (blocks_c * tiles_j * tiles_i) % (2 * BLOCKS - 1)
    i_s = i_p // (blocks_c * tiles_j * tiles_i * (2 * BLOCKS - 1))
    distance = i_k - (BLOCKS - 1)

    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < channels
    o_i = i_i * BI + tl.arange(0, BI)
    o_j = i_j * BJ + tl.arange(0, BJ)
    o_ri, o_wi = o_i // WW, o_i % WW
    o_rj, o_wj = o_j // WW, o_j % WW
    first = tl.maximum(0, -distance)
    last = tl.minimum(BLOCKS, BLOCKS - distance)
    per_split = tl.cdiv(tl.cdiv(windows, splits), BN) * BN

    b_t = tl.zeros([BC, BI, BJ], dtype=tl.float32)
    for n in range(i_s * per_split, tl.minimum(windows, (i_s + 1) * per_split), BN):
        o_n = n + tl.arange(0, BN)
        m_n = o_n < windows
        o_row = o_n // grid_w % grid_h * WH
        o_col = o_n % grid_w * WW
        o_p = o_n // (grid_w * grid_h) * stride_b + o_row * stride_h + o_col * stride_w
        for block in range(first, last):
            o_hi = (block + distance) * ROWS + o_ri
            o_hj = block * ROWS + o_rj
            m_i = ((o_i < T) & (o_hi < WH))[:, None] & m_n[None, :] & (o_row[None, :] + o_hi[:, None] < height)
            m_i = m_i & (o_col[None, :] + o_wi[:, None] < width)
            m_j = ((o_j < T) & (o_hj < WH))[None, :] & m_n[:, None] & (o_row[:, None] + o_hj[None, :] < height)
            m_j = m_j & (o_col[:, None] + o_wj[None, :] < width)
            o_x = (o_p[None, :] + (o_hi * stride_h + o_wi * stride_w)[:, None])[None, :, :]
            o_g = (o_p[:, None] + (o_hj * stride_h + o_wj * stride_w)[None, :])[None, :, :]
            o_s = o_c[:, None, None] * stride_c
            b_x = tl.load(x + (o_s + o_x), mask=m_c[:, None, None] & m_i[None, :, :], other=0)
            b_g = tl.load(grad + (o_s + o_g), mask=m_c[:, None, None] & m_j[None, :, :], other=0)
            if UPCAST:
                b_x, b_g = b_x.to(tl.float32), b_g.to(tl.float32)
            b_t = tl.dot(b_x, b_g, b_t, input_precision=PRECISION)

    o_t = ((i_s * channels + o_c) * (2 * BLOCKS - 1) + i_k)[:, None, None] * (T * T)
    o_t = o_t + (o_i[:, None] * T + o_j[None, :])[None, :, :]
    tl.store(partial + o_t, b_t, mask=m_c[:, None, None] & ((o_i < T)[:, None] & (o_j < T)[None, :])[None, :, :])


@triton.jit
def collapse_kernel(
    partial,
    dtable,
    channels,
    splits,
    WH: tl.constexpr,
    WW: tl.constexpr,
    ROWS: tl.constexpr,
    BO: tl.constexpr,
    BJ: tl.constexpr,
):
    """Sum partial results over the splits, and along the pairs of positions that have an offset."""
    T: tl.constexpr = ROWS * WW
    BLOCKS: tl.constexpr = (WH + ROWS - 1) // ROWS
    OFFSETS: tl.constexpr = (2 * WH - 1) * (2 * WW - 1)
    i_o, i_c = tl.program_id(0), tl.program_id(1)
    o_o = i_o * BO + tl.arange(0, BO)
    o_dh = o_o // (2 * WW - 1)  # from 0, as the table counts
    o_dw = o_o % (2 * WW - 1) - (WW - 1)
    o_j = tl.arange(0, BJ)
    o_rj, o_wj = o_j // WW, o_j % WW
    # An offset dh is k blocks of rows and e rows more or less: the blocks at or below it, or the next.
    o_shifted = o_dh - (WH - 1) + BLOCKS * ROWS
    b_o = tl.zeros([BO], dtype=tl.float32)
    for i_s in range(0, splits):
        for near in tl.static_range(2):
            o_k = o_shifted // ROWS - BLOCKS + near
            o_e = o_dh - (WH - 1) - o_k * ROWS
            o_ri = o_rj[None, :] + o_e[:, None]
            o_wi = o_wj[None, :] + o_dw[:, None]
            m_p = (o_ri >= 0) & (o_ri < ROWS) & (o_wi >= 0) & (o_wi < WW) & (o_j < T)[None, :]
            m_p = m_p & ((o_o < OFFSETS) & (o_k > -BLOCKS) & (o_k < BLOCKS))[:, None]
            o_p = ((i_s * channels + i_c) * (2 * BLOCKS - 1) + o_k + BLOCKS - 1)[:, None] * (T * T)
            b_o += tl.sum(tl.load(partial + (o_p + (o_ri * WW + o_wi) * T + o_j[None, :]), mask=m_p, other=0), 1)
    tl.store(dtable + i_c * OFFSETS + o_o, b_o, mask=o_o < OFFSETS)


INTERPRETED = not isinstance(product_kernel, triton.JITFunction)
tuned_product = product_kernel if INTERPRETED else triton.autotune(PRODUCT_CONFIGS, PRODUCT_KEY)(product_kernel)


def dot_options(x: Tensor) -> dict[str, object]:
    """How tiles are multiplied.

    float32 takes TF32 where torch allows it for its own products, else three products of it, which are about float32.
    The interpreter would multiply the bits of bfloat16 as integers.
    """
    return {"PRECISION": "tf32" if tf32_allowed() else "tf32x3", "UPCAST": INTERPRETED and x.dtype is torch.bfloat16}


def block_rows(window: Window) -> int:
    """How many rows of a window one tile of a table's gradient has."""
    return max(1, min(window[0], TILE // window[1]))


def gradient_meta(dtype: torch.dtype) -> dict[str, int]:
    return {**GRADIENT_META, "BC": 8 if dtype is torch.float32 else 16}


def _geometry(x: Tensor, window: Window) -> tuple[int, ...]:
    """Windows, channels, height, width, the grid of windows, and the strides: arguments of both kernels."""
    batch, channels, height, width = x.shape
    rows, columns = grid_size(height, width, window)
    return batch * rows * columns, channels, height, width, rows, columns, *x.stride()


def _dense(x: Tensor) -> Tensor:
    return x if is_channels_last(x) else x.contiguous()


def _as(grad: Tensor, x: Tensor) -> Tensor:
    """A gradient in the memory format of its map."""
    return grad.contiguous(memory_format=torch.channels_last if is_channels_last(x) else torch.contiguous_format)


@triton_op("wbmm::table_product", mutates_args=())
def table_product(
    x: Tensor,
    table: Tensor,
    local_table: Tensor | None,
    bias: Tensor | None,
    window: list[int],
    shortcuts: int = 0,
) -> Tensor:
    """`reference.windowed` of tables with zero padding; sums are in float32.

    Args:
        x: `[B, C, H, W]`, any H and W.
        table: `[C, (2wh-1)(2ww-1)]`.
        local_table: `[C, (wh-1)(ww-1)]`, over the quarters of the window.
        bias: `[C]`.
        window: (wh, ww).
        shortcuts: how many times the input is added.

    Returns:
        `[B, C, H, W]`, in the type and memory format of `x`.
    """
    return product(x, table, local_table, bias, window, shortcuts)


def product(
    x: Tensor,
    table: Tensor,
    local_table: Tensor | None,
    bias: Tensor | None,
    window: list[int],
    shortcuts: int,
    config: triton.Config | None = None,
) -> Tensor:
    """`table_product`, without gradients; in one of `PRODUCT_CONFIGS`, or in that which the tuner finds."""
    wh, ww = window
    x, table = _dense(x), table.contiguous()
    local = table if local_table is None else local_table.contiguous()
    y = torch.empty_like(x)
    geometry = _geometry(x, (wh, ww))

    def grid(meta: dict) -> tuple[int]:
        blocks = triton.cdiv(geometry[1], meta["BC"]) * triton.cdiv(wh * ww, meta["BJ"])
        return (blocks * triton.cdiv(geometry[0], meta["BN"]),)

    config = PRODUCT_CONFIGS[0] if config is None and INTERPRETED else config
    kernel, meta = (tuned_product, {}) if config is None else (product_kernel, config.all_kwargs())
    meta = {**meta, "WH": wh, "WW": ww, "LOCAL": local_table is not None, "BIAS": bias is not None, "BI": STEP}
    macs = geometry[0] * geometry[1] * (wh * ww) ** 2
    options: dict[str, Any] = {
        "writes": (y,),
        "macs": macs,
        "wrapped": config is None,
        "SHORTCUTS": shortcuts,
        **dot_options(x),
    }
    launch(kernel, grid, x, table, local, table if bias is None else bias, y, *geometry, **options, **meta)
    return y


@triton_op("wbmm::table_gradient", mutates_args=())
def table_gradient(x: Tensor, grad: Tensor, window: list[int]) -> Tensor:
    """The gradient of the table in `table_product`: for each offset, the sum of `x[i] * grad[j]` over its pairs.

    Args:
        x: `[B, C, H, W]`.
        grad: of the result, of the same shape and type.
        window: (wh, ww).

    Returns:
        `[C, (2wh-1)(2ww-1)]` float32.
    """
    wh, ww = window
    x = _dense(x)
    grad = _as(grad, x)
    rows = block_rows((wh, ww))
    positions, distances = rows * ww, 2 * triton.cdiv(wh, rows) - 1
    meta = gradient_meta(x.dtype)
    geometry = _geometry(x, (wh, ww))
    windows, channels = geometry[:2]
    tiles = triton.cdiv(positions, meta["BI"]) * triton.cdiv(positions, meta["BJ"])
    programs = triton.cdiv(channels, meta["BC"]) * tiles * distances
    splits = max(1, min(PROGRAMS // programs, triton.cdiv(windows, meta["BN"])))
    partial = x.new_empty((splits, channels, distances, positions, positions), dtype=torch.float32)
    shape = {"WH": wh, "WW": ww, "ROWS": rows}
    macs = windows * channels * (positions * triton.cdiv(wh, rows)) ** 2
    options = {"writes": (partial,), "macs": macs, "wrapped": True, **shape, **dot_options(x), **meta}
    launch(gradient_kernel, (programs * splits,), x, grad, partial, *geometry, splits, **options)
    dtable = x.new_empty((channels, num_offsets((wh, ww))), dtype=torch.float32)
    options = {"writes": (dtable,), "wrapped": True, **shape, "BO": OFFSET_BLOCK}
    grid = triton.cdiv(dtable.shape[1], OFFSET_BLOCK), channels
    launch(collapse_kernel, grid, partial, dtable, channels, splits, BJ=triton.next_power_of_2(positions), **options)
    return dtable


def _keep_product(ctx, inputs, output) -> None:
    x, table, local_table, bias, ctx.window, ctx.shortcuts = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, table, local_table)


def _product_gradients(ctx, grad):
    """Made of the same two operators, so that they can be differentiated again."""
    x, table, local_table = ctx.saved_tensors
    wanted, (wh, ww) = ctx.needs_input_grad, ctx.window
    dx = dtable = dlocal = dbias = None
    with no_autocast(grad):  # it may be on for the backward pass alone
        if wanted[0]:
            local = None if local_table is None else local_table.flip(1)
            dx = table_product(_as(grad, x), table.flip(1), local, None, ctx.window, ctx.shortcuts)
        if wanted[1]:
            dtable = table_gradient(x, grad, [wh, ww]).to(table.dtype)
        if wanted[2]:
            # The local part is the operator of the small windows, which fill the large ones.
            dlocal = table_gradient(x, grad, [wh // 2, ww // 2]).to(local_table.dtype)
        if wanted[3]:
            dbias = grad.sum((0, 2, 3), dtype=torch.float32).to(ctx.bias_dtype)
    return dx, dtable, dlocal, dbias, None, None


table_product.register_autograd(_product_gradients, setup_context=_keep_product)


def _keep_gradient(ctx, inputs, output) -> None:
    x, grad, ctx.window = inputs
    ctx.save_for_backward(x, grad)


def _gradient_gradients(ctx, dtable):
    """`table_gradient` is linear in either map, and its adjoint is the product with a table."""
    x, grad = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    with no_autocast(grad):
        dx = table_product(_as(grad, x), dtable.flip(1), None, None, ctx.window) if wanted[0] else None
        dgrad = table_product(x, dtable, None, None, ctx.window) if wanted[1] else None
    return dx, dgrad, None


table_gradient.register_autograd(_gradient_gradients, setup_context=_keep_gradient)


def _autocast_product(x, table, local_table, bias, window, shortcuts=0):
    """The map in autocast's type; tables and bias as they are, for sums are in float32 anyway.

    `register_autocast` would cast the tables too, and to one type for good.
    """
    device = x.device.type
    if x.is_floating_point() and x.dtype is not torch.float64:
        x = x.to(torch.get_autocast_dtype(device))
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
        return table_product(x, table, local_table, bias, window, shortcuts)


_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCPU
)
_library = torch.library.Library("wbmm", "FRAGMENT")
for _key in ("AutocastCUDA", "AutocastCPU"):
    _library.impl("table_product", _autocast_product, _key)

"""The reference implementation of the whole net: NCHW maps, one step after another, nothing tuned.

It is the parity baseline of the tests and the speed baseline of the benchmarks. Parameter names are the family's.
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from wbmm import layers
from wbmm.layers import Block, FeedForward, FusedBlock, FusedFeedForward, SqueezeExcite

from .wbmm import WBMM

__all__ = ["PlainBlock", "PlainFusedBlock", "PlainNet", "plain_conv", "plain_mixer", "to_plain"]

Window = tuple[int, int]


def offset_index(window: Window) -> Tensor:
    """`[d, d]`: where a table holds the weight from input position i (row) to output position j (column)."""
    rows, columns = torch.meshgrid(torch.arange(window[0]), torch.arange(window[1]), indexing="ij")
    rows, columns = rows.flatten(), columns.flatten()
    down = rows[:, None] - rows[None, :] + window[0] - 1
    right = columns[:, None] - columns[None, :] + window[1] - 1
    return down * (2 * window[1] - 1) + right


def pad(x: Tensor, window: Window, mode: str) -> Tensor:
    """A map with whole windows, enlarged at the bottom and right."""
    bottom, right = -x.shape[2] % window[0], -x.shape[3] % window[1]
    if bottom or right:
        x = F.pad(x, (0, right, 0, bottom), mode="constant" if mode == "zeros" else mode)
    return x


def partition(x: Tensor, window: Window) -> Tensor:
    """`[B, C, H, W]` to `[C, N, d]`."""
    batch, channels, height, width = x.shape
    x = x.reshape(batch, channels, height // window[0], window[0], width // window[1], window[1])
    return x.permute(1, 0, 2, 4, 3, 5).reshape(channels, -1, window[0] * window[1])


def reverse(windows: Tensor, shape: torch.Size, window: Window) -> Tensor:
    """`[C, N, d]` to the map of whole windows, `shape` = `[B, C, H, W]`."""
    batch, channels, height, width = shape
    x = windows.reshape(channels, batch, height // window[0], width // window[1], window[0], window[1])
    return x.permute(1, 0, 2, 4, 3, 5).reshape(shape)


def multiply(x: Tensor, matrix: Tensor, window: Window, padding_mode: str) -> Tensor:
    """Each channel of each window times the channel's matrix `[C, d, d]`."""
    padded = pad(x, window, padding_mode)
    out = reverse(torch.bmm(partition(padded, window), matrix), padded.shape, window)
    return out[:, :, : x.shape[2], : x.shape[3]]


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone(memory_format=torch.contiguous_format))


def plain_conv(conv: nn.Conv2d) -> nn.Conv2d:
    """A convolution of PyTorch's own with the same weights."""
    plain = nn.Conv2d(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,
        stride=conv.stride,
        padding=conv.padding,
        groups=conv.groups,
        bias=conv.bias is not None,
        device=conv.weight.device,
        dtype=conv.weight.dtype,
    )
    plain.load_state_dict(conv.state_dict())
    return plain


class PlainWBMM(nn.Module):
    """The product, then the shortcut."""

    def __init__(self, mixer: layers.WBMM2d) -> None:
        super().__init__()
        self.window, self.padding_mode, self.shortcut = mixer.window, mixer.padding_mode, mixer.shortcut
        self.table = _parameter(mixer.table)
        self.register_buffer("index", offset_index(self.window).to(self.table.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = multiply(x, self.table[:, self.index], self.window, self.padding_mode)
        return out + x if self.shortcut else out


class PlainHierarchical(nn.Module):
    """One product over the global windows, one over the local ones, each with its shortcut."""

    def __init__(self, mixer: layers.HierarchicalWBMM2d) -> None:
        super().__init__()
        self.window, self.local_window = mixer.window, mixer.local_window
        self.padding_mode, self.shortcut = mixer.padding_mode, mixer.shortcut
        self.table, self.local_table = _parameter(mixer.table), _parameter(mixer.local_table)
        self.register_buffer("index", offset_index(self.window).to(self.table.device), persistent=False)
        self.register_buffer("local_index", offset_index(self.local_window).to(self.table.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = multiply(x, self.table[:, self.index], self.window, self.padding_mode)
        local = multiply(x, self.local_table[:, self.local_index], self.local_window, self.padding_mode)
        return (out + x) + (local + x) if self.shortcut else out + local


class PlainMultiKernel(nn.Module):
    """`BN(WBMM(x) + x)` plus `BN(DW(x))` for each kernel, a convolution of each window by itself."""

    def __init__(self, mixer: layers.MultiKernelWBMM2d) -> None:
        super().__init__()
        self.window, self.padding_mode = mixer.window, mixer.padding_mode
        self.table = _parameter(mixer.table)
        self.register_buffer("index", offset_index(self.window).to(self.table.device), persistent=False)
        self.norm, self.norms = copy.deepcopy(mixer.norm), copy.deepcopy(mixer.norms)
        self.kernels = nn.ParameterDict({name: _parameter(kernel) for name, kernel in mixer.kernels.items()})

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(multiply(x, self.table[:, self.index], self.window, self.padding_mode) + x)
        for name, kernel in self.kernels.items():
            out = out + self.norms[name](self._convolve(x, kernel))
        return out

    def _convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        padded = pad(x, self.window, self.padding_mode)
        batch, channels, height, width = padded.shape
        wh, ww = self.window
        grid = padded.reshape(batch, channels, height // wh, wh, width // ww, ww).permute(0, 2, 4, 1, 3, 5)
        windows = grid.reshape(-1, channels, wh, ww)
        out = F.conv2d(windows, kernel, padding=kernel.shape[-1] // 2, groups=channels)
        out = out.reshape(grid.shape).permute(0, 3, 1, 4, 2, 5).reshape(padded.shape)
        return out[:, :, : x.shape[2], : x.shape[3]]


class PlainDilated(nn.Module):
    """UniRepLKNet's operator: a large convolution and dilated small ones, each with its batch norm."""

    def __init__(self, mixer: layers.DilatedReparamConv2d) -> None:
        super().__init__()
        self.conv, self.norm = plain_conv(mixer.conv), copy.deepcopy(mixer.norm)
        self.branches, self.norms = copy.deepcopy(mixer.branches), copy.deepcopy(mixer.norms)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        for name, conv in self.branches.items():
            out = out + self.norms[name](conv(x))
        return out


class PlainDense(nn.Module):
    """The fused form: the matrices, built once, and the bias added after the product."""

    def __init__(self, matrix: Tensor, bias: Tensor, window: Window, padding_mode: str) -> None:
        super().__init__()
        self.window, self.padding_mode = window, padding_mode
        self.weight, self.bias = _parameter(matrix), _parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.window, self.padding_mode) + self.bias[:, None, None]


def _local_matrix(table: Tensor, window: Window) -> Tensor:
    """The matrix over a global window of a table that acts inside each quarter of it."""
    lh, lw = window[0] // 2, window[1] // 2
    row = torch.arange(window[0], device=table.device).repeat_interleave(window[1])
    column = torch.arange(window[1], device=table.device).repeat(window[0])
    quarter = 2 * (row // lh) + column // lw
    place = (row % lh) * lw + column % lw
    index = offset_index((lh, lw)).to(table.device)[place[:, None], place[None, :]]
    return table[:, index] * (quarter[:, None] == quarter[None, :])


def _dense(mixer: nn.Module) -> PlainDense:
    if isinstance(mixer, layers.DenseWBMM2d):
        matrix = mixer.weight
    else:
        matrix = mixer.table[:, offset_index(mixer.window).to(mixer.table.device)]
        if isinstance(mixer, layers.FusedHierarchicalWBMM2d):
            matrix = matrix + _local_matrix(mixer.local_table, mixer.window)
    return PlainDense(matrix, mixer.bias, mixer.window, mixer.padding_mode)


PLAIN = {
    layers.WBMM2d: PlainWBMM,
    layers.HierarchicalWBMM2d: PlainHierarchical,
    layers.MultiKernelWBMM2d: PlainMultiKernel,
    layers.DepthwiseConv2d: plain_conv,
    layers.DilatedReparamConv2d: PlainDilated,
    layers.FusedWBMM2d: _dense,
    layers.FusedHierarchicalWBMM2d: _dense,
    layers.DenseWBMM2d: _dense,
    layers.FusedDepthwiseConv2d: plain_conv,
}


def plain_mixer(mixer: nn.Module) -> nn.Module:
    """The same mixer in this layout, with a copy of its weights."""
    if type(mixer) not in PLAIN:
        known = ", ".join(kind.__name__ for kind in PLAIN)
        raise ValueError(f"mixer {type(mixer).__name__} has no reference implementation; those that have one: {known}")
    return PLAIN[type(mixer)](mixer)


class PlainSqueezeExcite(nn.Module):
    """Two 1x1 convolutions on the pooled map."""

    def __init__(self, se: SqueezeExcite) -> None:
        super().__init__()
        self.fc1, self.fc2 = _pointwise(se.fc1), _pointwise(se.fc2)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.fc2(F.relu(self.fc1(F.adaptive_avg_pool2d(x, 1))))
        return x * torch.sigmoid(gate)


def _pointwise(linear: nn.Linear) -> nn.Conv2d:
    weight, bias = linear.weight, linear.bias
    conv = nn.Conv2d(linear.in_features, linear.out_features, 1, device=weight.device, dtype=weight.dtype)
    conv.load_state_dict({"weight": weight[:, :, None, None], "bias": bias})
    return conv


def relative_norm(x: Tensor, eps: float) -> Tensor:
    """The norm of each channel over the map `[B, H, W, C]`, relative to their mean."""
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    return norm / (norm.mean(dim=-1, keepdim=True) + eps)


class PlainResponseNorm(nn.Module):
    def __init__(self, grn: nn.Module) -> None:
        super().__init__()
        self.eps = grn.eps
        self.gamma, self.beta = copy.deepcopy(grn.gamma), copy.deepcopy(grn.beta)

    def forward(self, x: Tensor) -> Tensor:
        return (self.gamma * relative_norm(x, self.eps) + 1) * x + self.beta


class PlainFeedForward(nn.Module):
    """Linears on NHWC, batch norm on NCHW, a permute between them."""

    def __init__(self, ffn: FeedForward) -> None:
        super().__init__()
        self.fc1, self.fc2, self.norm = (copy.deepcopy(part) for part in (ffn.fc1, ffn.fc2, ffn.norm))
        self.grn = PlainResponseNorm(ffn.grn)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc2(self.grn(F.gelu(self.fc1(x.permute(0, 2, 3, 1)))))
        return self.norm(x.permute(0, 3, 1, 2))


class PlainFusedFeedForward(nn.Module):
    """As above, with the batch norm and GRN's beta in the second linear."""

    def __init__(self, ffn: FusedFeedForward) -> None:
        super().__init__()
        self.eps = ffn.eps
        self.fc1, self.gamma, self.fc2 = (copy.deepcopy(part) for part in (ffn.fc1, ffn.gamma, ffn.fc2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.fc1(x.permute(0, 2, 3, 1)))
        x = self.fc2((self.gamma * relative_norm(x, self.eps) + 1) * x)
        return x.permute(0, 3, 1, 2)


class PlainBlock(nn.Module):
    """mixer, BN, SE, feed-forward, layer scale, drop path, add."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.mixer = plain_mixer(block.mixer)
        self.norm = copy.deepcopy(block.norm)
        self.se = nn.Identity() if block.se is None else PlainSqueezeExcite(block.se)
        self.ffn = PlainFeedForward(block.ffn)
        self.gamma = copy.deepcopy(block.gamma)
        self.drop_path = copy.deepcopy(block.drop_path)

    def forward(self, x: Tensor) -> Tensor:
        out = self.ffn(self.se(self.norm(self.mixer(x))))
        if self.gamma is not None:
            out = out * self.gamma[:, None, None]
        return x + self.drop_path(out)


class PlainFusedBlock(nn.Module):
    """mixer with bias, SE, feed-forward, add."""

    def __init__(self, block: FusedBlock) -> None:
        super().__init__()
        self.mixer = plain_mixer(block.mixer)
        self.se = nn.Identity() if block.se is None else PlainSqueezeExcite(block.se)
        self.ffn = PlainFusedFeedForward(block.ffn)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.se(self.mixer(x)))


class PlainLayerNorm(nn.Module):
    """LayerNorm over the channels of an NCHW map, from elementary operations."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.eps = norm.eps
        self.weight, self.bias = copy.deepcopy(norm.weight), copy.deepcopy(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class PlainStem(nn.Module):
    def __init__(self, stem: nn.Module) -> None:
        super().__init__()
        self.conv1, self.norm1 = plain_conv(stem.conv1), PlainLayerNorm(stem.norm1)
        self.conv2, self.norm2 = plain_conv(stem.conv2), PlainLayerNorm(stem.norm2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm2(self.conv2(F.gelu(self.norm1(self.conv1(x)))))


class PlainDownsample(nn.Module):
    def __init__(self, downsample: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = plain_conv(downsample.conv), PlainLayerNorm(downsample.norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class PlainStage(nn.Module):
    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        first = isinstance(stage.downsample, nn.Identity)
        self.downsample = nn.Identity() if first else PlainDownsample(stage.downsample)
        self.blocks = nn.Sequential(
            *(PlainBlock(block) if isinstance(block, Block) else PlainFusedBlock(block) for block in stage.blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.downsample(x))


class PlainNet(nn.Module):
    """The family in NCHW memory; it takes images in any memory format."""

    def __init__(self, model: WBMM) -> None:
        super().__init__()
        self.feature_info = copy.deepcopy(model.feature_info)
        self.stem = PlainStem(model.stem)
        self.stages = nn.Sequential(*(PlainStage(stage) for stage in model.stages))
        self.head = copy.deepcopy(model.head)

    def forward_features(self, x: Tensor) -> Tensor:
        return self.stages(self.stem(x.contiguous()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x))


def to_plain(model: WBMM) -> PlainNet:
    """A copy of a model as its reference implementation, with the same weights, in the same mode.

    Parameters and statistics keep their names. Those of squeeze and excitation become 1x1 convolutions, and tables of a
    fused model become matrices. Activation checkpointing is not taken over.

    Args:
        model: of the WBMM family, with WBMM or a depthwise convolution (UniRepLKNet's among them) in its W blocks; in
            training form, or fused in either form.
    """
    if not isinstance(model, WBMM):
        raise ValueError(f"the reference implementation is of the WBMM family alone; this is a {type(model).__name__}")
    return PlainNet(model).to(memory_format=torch.contiguous_format).train(model.training)

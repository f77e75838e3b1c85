"""Base classes of layers that compute an operator. Each holds a `Kept`, and when scripted is the reference.

A script cannot take a module as an argument, nor what is kept; hence these few lines stand here and not in the layers.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from . import reference
from .dispatch import conv2d, gated_ffn, kept_matrix, squeeze_excite, windowed
from .kept import Kept
from .obstacles import is_eager
from .tables import expand, relative_index, scales_of
from .windows import PADDING_MODES

__all__ = ["GateLayer", "GatedFFN", "PackedConv2d", "WindowLayer"]

# Leaves for fx wherever it starts; `dispatch.py` says so to timm's and torchvision's tracers.
torch.fx.wrap("windowed")
torch.fx.wrap("gated_ffn")
torch.fx.wrap("squeeze_excite")
torch.fx.wrap("conv2d")

# The index of larger windows, 78 MB for 56x56, is made where the whole matrix is, which is nowhere if it can be helped.
LARGEST_INDEX = 1024


class WindowLayer(nn.Module):
    """A layer of windows. Subclasses give `tables()`; their index is among the constants of what is exported."""

    def __init__(
        self, dim: int, window: tuple[int, int], padding_mode: str = "zeros", tables: int = 1, device=None
    ) -> None:
        super().__init__()
        if padding_mode not in PADDING_MODES:
            raise ValueError(f"padding_mode {padding_mode!r}: expected one of {', '.join(PADDING_MODES)}")
        self.dim = dim
        self.window = window
        self.padding_mode = padding_mode
        scales = scales_of(tables, window) if window[0] * window[1] <= LARGEST_INDEX else ()
        for i, name in enumerate(("index", "local_index")):
            index = relative_index(scales[i], device) if i < len(scales) else None
            self.register_buffer(name, index, persistent=False)
        self.kept = Kept()

    def indices(self) -> list[Tensor] | None:
        """`relative_index` of each table's window, if there are tables and it is not too large."""
        if self.index is None:
            return None
        else:  # noqa: RET505  a script looks at no branch but the one that applies
            if self.local_index is None:
                return [self.index]
            else:  # noqa: RET505
                return [self.index, self.local_index]

    def _apply(self, fn, recurse=True):
        """Indices are made again: `to_empty` leaves any memory in them, and layers on a CPU share theirs."""
        super()._apply(fn, recurse)
        for name, scale in zip(("index", "local_index"), scales_of(2, self.window), strict=True):
            index = getattr(self, name)
            if index is not None and is_eager(index):
                setattr(self, name, relative_index(scale, index.device))
        return self

    def tables(self) -> list[Tensor]:
        """What the matrix is made of, as `reference.windowed` takes it."""
        raise NotImplementedError

    def build_matrix(self) -> Tensor:
        """`[C, d, d]` from the tables."""
        return expand(self.tables(), self.window, self.indices())

    def matrix(self) -> Tensor:
        """The same, kept in inference."""
        if torch.jit.is_scripting():
            return self.build_matrix()
        else:  # noqa: RET505  what is scripted must stand in the other branch
            return kept_matrix(self.tables(), self.window, self.indices(), self.kept)

    def windowed(
        self, x: Tensor, tables: list[Tensor], bias: Tensor | None = None, shortcuts: int = 0, keep: bool = True
    ) -> Tensor:
        """`reference.windowed`; without `keep`, for tables that are made anew at every call."""
        if torch.jit.is_scripting():
            return reference.windowed(x, tables, self.window, bias, shortcuts, self.padding_mode, self.indices())
        else:  # noqa: RET505  what is scripted must stand in the other branch
            kept = self.kept if keep else None
            return windowed(x, tables, self.window, bias, shortcuts, self.padding_mode, self.indices(), kept)

    def extra_repr(self) -> str:
        return f"{self.dim}, window={self.window[0]}x{self.window[1]}, padding_mode={self.padding_mode}"


class GatedFFN(nn.Module):
    """A feed-forward part. Subclasses have linears `fc1`, `fc2`; `grn`, `norm`, `drop_path` as modules or methods."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept()

    def gated_ffn(self, x: Tensor, gate: Tensor | None, scale: Tensor | None, shortcut: Tensor | None) -> Tensor:
        """`reference.gated_ffn` with this layer's parts."""
        if torch.jit.is_scripting():
            out = self.fc2(self.grn(F.gelu(self.fc1(reference.to_rows(x, gate)))))
            out = self.norm(reference.from_rows(out))
            out = self.drop_path(out if scale is None else out * scale[:, None, None])
            return out if shortcut is None else shortcut + out
        else:  # noqa: RET505
            grn, norm, drop_path = self.parts()
            return gated_ffn(x, self.fc1, grn, self.fc2, gate, norm, scale, shortcut, drop_path, self.kept)


class GateLayer(nn.Module):
    """Squeeze and excitation. Subclasses have linears `fc1` and `fc2`."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept()

    def forward(self, x: Tensor) -> Tensor:
        """`[B, C, H, W]` to `[B, C]`."""
        if torch.jit.is_scripting():
            return torch.sigmoid(self.fc2(F.relu(self.fc1(x.mean((2, 3))))))
        else:  # noqa: RET505
            return squeeze_excite(x, self.fc1, self.fc2, self.kept)


class PackedConv2d(nn.Conv2d):
    """A convolution that may keep its weight in another order in inference."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.kept = Kept()

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return self._conv_forward(x, self.weight, self.bias)
        else:  # noqa: RET505
            return conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups, self.kept)

"""The feed-forward part of a block: linear, GELU, GRN, linear, batch norm; and its fused form."""

import torch
import torch.nn as nn
from timm.layers import DropPath
from torch import Tensor

from wbmm.ops import GlobalResponseNorm
from wbmm.ops.modules import GatedFFN
from wbmm.ops.reference import grn

from .fused import batch_norm_affine


class FeedForward(GatedFFN):
    """`shortcut + drop_path(scale * BN(fc2(GRN(GELU(fc1(gate * x))))))`; both factors and the shortcut are optional.

    Shape: `[B, C, H, W]` to the same. The linears work on the NHWC view, which is free in channels-last memory.
    """

    def __init__(self, dim: int, ratio: float = 4, drop_path: float = 0.0, device=None, dtype=None) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        hidden = int(dim * ratio)
        self.fc1 = nn.Linear(dim, hidden, **dd)
        self.grn = GlobalResponseNorm(hidden, **dd)
        self.fc2 = nn.Linear(hidden, dim, bias=False, **dd)
        self.norm = nn.BatchNorm2d(dim, **dd)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def parts(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.grn, self.norm, self.drop_path

    def forward(
        self, x: Tensor, gate: Tensor | None = None, scale: Tensor | None = None, shortcut: Tensor | None = None
    ) -> Tensor:
        """
        Args:
            x: `[B, C, H, W]`.
            gate: `[B, C]`, from squeeze and excitation.
            scale: `[C]`, the layer scale.
            shortcut: `[B, C, H, W]`, what is added at the end.
        """
        return self.gated_ffn(x, gate, scale, shortcut)

    @torch.no_grad()
    def fuse(self, layer_scale: Tensor | None = None) -> "FusedFeedForward":
        """Fold GRN's beta, the batch norm and the layer scale that follows (if given) into the second linear."""
        scale, shift = batch_norm_affine(self.norm, self.fc2.weight)
        if layer_scale is not None:
            scale, shift = scale * layer_scale, shift * layer_scale
        beta = self.grn.beta.flatten()
        fused = FusedFeedForward(
            self.fc1.in_features,
            self.fc1.out_features,
            self.grn.eps,
            device=self.fc1.weight.device,
            dtype=self.fc1.weight.dtype,
        )
        fused.fc1.load_state_dict(self.fc1.state_dict())
        fused.gamma.copy_(self.grn.gamma.flatten())
        fused.fc2.weight.copy_(self.fc2.weight * scale[:, None])
        fused.fc2.bias.copy_((self.fc2.weight @ beta) * scale + shift)
        return fused


class FusedFeedForward(GatedFFN):
    """`fc2(GELU(fc1(gate * x)) * (1 + gamma * N))`, everything else folded into fc2."""

    def __init__(self, dim: int, hidden: int, eps: float, device=None, dtype=None) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.eps = eps
        self.fc1 = nn.Linear(dim, hidden, **dd)
        self.gamma = nn.Parameter(torch.zeros(hidden, **dd))
        self.fc2 = nn.Linear(hidden, dim, **dd)

    def parts(self) -> tuple[tuple[Tensor, float], None, None]:
        return (self.gamma, self.eps), None, None

    def grn(self, x: Tensor) -> Tensor:
        return grn(x, self.gamma, None, self.eps)

    def norm(self, x: Tensor) -> Tensor:
        return x

    def drop_path(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, gate: Tensor, shortcut: Tensor) -> Tensor:
        """`shortcut + ffn(gate * x)`.

        Args:
            x: `[B, C, H, W]`.
            gate: `[B, C]`, from squeeze and excitation.
            shortcut: `[B, C, H, W]`.
        """
        return self.gated_ffn(x, gate, None, shortcut)

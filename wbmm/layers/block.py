"""The block: mixer, batch norm, squeeze and excitation, feed-forward part; and its fused form."""

import copy

import torch
import torch.nn as nn
from timm.layers import DropPath
from torch import Tensor

from wbmm.ops import GlobalResponseNorm
from wbmm.ops.modules import GatedFFN, GateLayer
from wbmm.ops.reference import grn

from .mixers import batch_norm_affine

__all__ = ["Block", "FeedForward", "FusedBlock", "FusedFeedForward", "SqueezeExcite"]


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


class SqueezeExcite(GateLayer):
    """A gate per sample and channel from the mean over the map: `[B, C, H, W]` to `[B, C]`.

    What follows multiplies with it, where that is cheapest.

    Args:
        dim: channels.
        ratio: the hidden width is `dim // ratio`.
    """

    def __init__(self, dim: int, ratio: int = 4, device=None, dtype=None) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, dim // ratio, device=device, dtype=dtype)
        self.fc2 = nn.Linear(dim // ratio, dim, device=device, dtype=dtype)


class Block(nn.Module):
    """mixer, BN, SE, feed-forward, layer scale, drop path, add.

    Shape: `[B, C, H, W]` to the same; channels-last memory is the fast one.

    Args:
        mixer: the spatial mixer, with a `fuse(norm)`.
        dim: channels.
        ffn_ratio: width of the hidden layer over `dim`.
        se: squeeze and excitation after the mixer.
        ls_init_value: initial layer scale; None for no layer scale.
        drop_path: probability of skipping the block for a sample in training.
    """

    __jit_unused_properties__ = ("drop_path",)

    def __init__(
        self,
        mixer: nn.Module,
        dim: int,
        ffn_ratio: float = 4,
        se: bool = True,
        ls_init_value: float | None = 1e-6,
        drop_path: float = 0.0,
        device=None,
        dtype=None,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.mixer = mixer
        self.norm = nn.BatchNorm2d(dim, **dd)
        self.se = SqueezeExcite(dim, **dd) if se else None
        self.ffn = FeedForward(dim, ffn_ratio, drop_path, **dd)
        self.gamma = None if ls_init_value is None else nn.Parameter(torch.full((dim,), ls_init_value, **dd))

    @property
    def drop_path(self) -> nn.Module:
        """Of the feed-forward part, which computes it together with the addition."""
        return self.ffn.drop_path

    def __setattr__(self, name: str, value: object) -> None:
        if name == "drop_path":  # a module would be registered here, and never called
            self.ffn.drop_path = value
        else:
            super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.mixer(x))
        gate = None if self.se is None else self.se(out)
        # A copy: PyTorch's counter of operations fails in inference mode where a module is given a parameter.
        scale = None if self.gamma is None else self.gamma.clone()
        return self.ffn(out, gate, scale, x)

    def fuse(self) -> "FusedBlock":
        """The inference form: mixer and BN in one, GRN's beta, fc2, BN and layer scale in one."""
        fused = FusedBlock(self.mixer.fuse(self.norm), copy.deepcopy(self.se), self.ffn.fuse(self.gamma))
        return fused.train(self.training)


class FusedBlock(nn.Module):
    """mixer with bias, SE (if there is one), feed-forward, add."""

    def __init__(self, mixer: nn.Module, se: SqueezeExcite | None, ffn: FusedFeedForward) -> None:
        super().__init__()
        self.mixer = mixer
        self.se = se
        self.ffn = ffn

    def forward(self, x: Tensor) -> Tensor:
        out = self.mixer(x)
        # Gates are cheap where the feed-forward part applies them, so that it needs no second path without them.
        gate = out.new_ones(out.shape[:2]) if self.se is None else self.se(out)
        return self.ffn(out, gate, x)

"""The feed-forward part of a block: linear, GELU, GRN, linear, batch norm; and its fused form."""

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.nn.modules.module as everywhere
from torch import Tensor

from wbmm.ops.eager import differentiates_on_cpu, is_eager
from wbmm.ops.ffn import ffn_inference, response_norm
from wbmm.ops.ffn_training import ffn_training
from wbmm.ops.linear import pack_weight, takes_onednn

from .fused import batch_norm_affine
from .packed import PackedWeights


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
        scale = 1 + self.gamma * response_norm(x, self.eps)
        return torch.addcmul(self.beta, x, scale)


def _untouched(*modules: nn.Module) -> bool:
    """Whether these modules are what was built here: nothing wrapped, quantised or hooked, which must be called."""
    if any((everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks)) or any(
        (everywhere._global_backward_hooks, everywhere._global_backward_pre_hooks)
    ):
        return False
    return all(
        type(module) in (nn.Linear, GlobalResponseNorm)
        and "forward" not in module.__dict__
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        for module in modules
    )


class FeedForward(nn.Module):
    """`scale * BN(fc2(GRN(GELU(fc1(gate * x)))))`, both factors optional.

    Shape: `[B, C, H, W]` to the same. The linears work on the NHWC view, which is free in channels-last memory.
    """

    def __init__(self, dim: int, ratio: float = 4, device=None, dtype=None) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        hidden = int(dim * ratio)
        self.fc1 = nn.Linear(dim, hidden, **dd)
        self.grn = GlobalResponseNorm(hidden, **dd)
        self.fc2 = nn.Linear(hidden, dim, bias=False, **dd)
        self.norm = nn.BatchNorm2d(dim, **dd)

    def forward(self, x: Tensor, gate: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        """
        Args:
            x: `[B, C, H, W]`.
            gate: `[B, C]`, from squeeze and excitation.
            scale: `[C]`, the layer scale.
        """
        on_cpu = differentiates_on_cpu(x, self.fc1.weight)
        if on_cpu and _untouched(self.fc1, self.grn, self.fc2):
            gate = x.new_ones(x.shape[:2]) if gate is None else gate
            x, grn = x.permute(0, 2, 3, 1), self.grn
            x = ffn_training(x, gate, self.fc1.weight, self.fc1.bias, grn.gamma, grn.beta, self.fc2.weight, grn.eps)
        else:
            x = x if gate is None else x * gate[:, :, None, None]
            x = self.fc2(self.grn(F.gelu(self.fc1(x.permute(0, 2, 3, 1)))))
        x = x.permute(0, 3, 1, 2)
        if scale is None:
            return self.norm(x)
        if on_cpu and isinstance(self.norm, nn.BatchNorm2d):
            # In the norm's weight and bias the scale costs no pass over the map. Half precision would lose it there.
            weights = {"weight": self.norm.weight * scale, "bias": self.norm.bias * scale}
            return torch.func.functional_call(self.norm, weights, (x,))
        return self.norm(x) * scale[:, None, None]

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


class FusedFeedForward(PackedWeights):
    """`fc2(GELU(fc1(gate * x)) * (1 + gamma * N))`, everything else folded into fc2."""

    def __init__(self, dim: int, hidden: int, eps: float, device=None, dtype=None) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.eps = eps
        self.fc1 = nn.Linear(dim, hidden, **dd)
        self.gamma = nn.Parameter(torch.zeros(hidden, **dd))
        self.fc2 = nn.Linear(hidden, dim, **dd)

    def weights(self, rows: int) -> tuple[Tensor, Tensor]:
        """The weights of both linears for `ffn_inference`; on a CPU in oneDNN's own order, made once."""
        pair = self.fc1.weight, self.fc2.weight
        if not takes_onednn(*pair):
            return pair
        return self.packed(pair, lambda: tuple(pack_weight(weight, rows) for weight in pair))

    def forward(self, x: Tensor, gate: Tensor, shortcut: Tensor) -> Tensor:
        """`shortcut + ffn(gate * x)`.

        Args:
            x: `[B, C, H, W]`.
            gate: `[B, C]`, from squeeze and excitation.
            shortcut: `[B, C, H, W]`.
        """
        if is_eager(x) and not torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type):
            w1, w2 = self.weights(x.shape[2] * x.shape[3])
            return ffn_inference(x, gate, shortcut, w1, self.fc1.bias, self.gamma, w2, self.fc2.bias, self.eps)
        x = F.gelu(self.fc1((x * gate[:, :, None, None]).permute(0, 2, 3, 1)))
        x = self.fc2(x * (1 + self.gamma * response_norm(x, self.eps)))
        return shortcut + x.permute(0, 3, 1, 2)

"""The feed-forward part of a block: linear, GELU, GRN, linear, batch norm; and its fused form."""

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.nn.modules.module as everywhere
from torch import Tensor

from wbmm.ops.eager import differentiates_on_cpu, is_eager
from wbmm.ops.ffn import ffn_inference, response_norm
from wbmm.ops.ffn_training import ffn_training

from .fused import batch_norm_affine


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
    """`BN(fc2(GRN(GELU(fc1(x)))))`.

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

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        if differentiates_on_cpu(x, self.fc1.weight) and _untouched(self.fc1, self.grn, self.fc2):
            grn = self.grn
            x = ffn_training(x, self.fc1.weight, self.fc1.bias, grn.gamma, grn.beta, self.fc2.weight, grn.eps)
            return self.norm(x.permute(0, 3, 1, 2))
        x = self.fc2(self.grn(F.gelu(self.fc1(x))))
        return self.norm(x.permute(0, 3, 1, 2))

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


class FusedFeedForward(nn.Module):
    """`fc2(GELU(fc1(gate * x)) * (1 + gamma * N))`, everything else folded into fc2."""

    def __init__(self, dim: int, hidden: int, eps: float, device=None, dtype=None) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.eps = eps
        self.fc1 = nn.Linear(dim, hidden, **dd)
        self.gamma = nn.Parameter(torch.zeros(hidden, **dd))
        self.fc2 = nn.Linear(hidden, dim, **dd)

    def forward(self, x: Tensor, gate: Tensor, shortcut: Tensor) -> Tensor:
        """`shortcut + ffn(gate * x)`.

        Args:
            x: `[B, C, H, W]`.
            gate: `[B, C]`, from squeeze and excitation.
            shortcut: `[B, C, H, W]`.
        """
        if is_eager(x) and not torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type):
            return ffn_inference(
                x, gate, shortcut, self.fc1.weight, self.fc1.bias, self.gamma, self.fc2.weight, self.fc2.bias, self.eps
            )
        x = F.gelu(self.fc1((x * gate[:, :, None, None]).permute(0, 2, 3, 1)))
        x = self.fc2(x * (1 + self.gamma * response_norm(x, self.eps)))
        return shortcut + x.permute(0, 3, 1, 2)

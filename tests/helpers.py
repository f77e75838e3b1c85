"""What several tests need."""

import torch
import torch.nn as nn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Move every parameter and batch-norm statistic far from its initial value.

    At a layer scale of 1e-6 a block does nothing, and a fresh batch norm hides bias errors.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim <= 1 else 0.5 / max(parameter[0].numel(), 1) ** 0.5
            centre = 1.0 if name.endswith("norm.weight") or (".norms." in name and name.endswith("weight")) else 0.0
            if name.endswith("gamma"):
                centre = 0.5
            parameter.copy_(centre + spread * noise(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.3 * noise(buffer))
            elif name.endswith("running_var"):
                buffer.copy_(0.5 + noise(buffer).abs())
    return model


def has_fake_cuda() -> bool:
    """Whether tensors on CUDA can be faked here. PyTorch 2.9 asks the driver all the same."""
    try:
        with FakeTensorMode():
            torch.empty(1, 2, 3, 3, device="cuda").contiguous(memory_format=torch.channels_last)
    except RuntimeError:
        return False
    return True

"""What holds around the kernels: the interpreter, autocast, TF32. Imported with the package, so without Triton."""

import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["BLOCK", "is_interpreted", "no_autocast", "tf32_allowed"]

BLOCK = 64  # positions that one program of the feed-forward part has


def is_interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU, statement by statement: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def no_autocast(x: Tensor) -> AbstractContextManager:
    """Autocast switched off, if there is one for the device."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def tf32_allowed() -> bool:
    """Whether torch may compute its own products of float32 in TF32."""
    matmul = torch.backends.cuda.matmul
    setting = getattr(matmul, "fp32_precision", None)  # PyTorch 2.9 and later, which may refuse to read the other
    return matmul.allow_tf32 if setting is None else setting == "tf32"

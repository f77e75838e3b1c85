"""Tells plain eager execution from tracing of any kind.

Paths that depend on sizes or on stored results are for eager execution alone: compiling, exporting, tracing and fx must
see one canonical path.
"""

import torch
from torch import Tensor


def is_eager(*tensors: Tensor) -> bool:
    """Whether these are real tensors that nothing is tracing: no compile, export, jit trace, fx proxy, fake, meta."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return all(type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta for tensor in tensors)

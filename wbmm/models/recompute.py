"""Activation checkpointing of blocks: less memory in training, each block run twice, the same result."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["run_checkpointed"]


def run_checkpointed(blocks: nn.Sequential, x: Tensor) -> Tensor:
    """Runs blocks one after another, keeping what goes in alone; the rest is computed again in the backward pass."""
    for block in blocks:
        # A compiled graph has no place for the context; there the caller sees to the statistics.
        contexts = {} if torch.compiler.is_compiling() else {"context_fn": partial(_contexts, block)}
        x = checkpoint(block, x, use_reentrant=False, **contexts)
    return x


def _contexts(block: nn.Module):
    """For the first run and for the second one."""
    return nullcontext(), _keep_buffers(block)


@contextmanager
def _keep_buffers(block: nn.Module) -> Iterator[None]:
    """Leaves a block's buffers as they were: batch norms must not count a batch twice."""
    before = [(buffer, buffer.clone()) for buffer in block.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)

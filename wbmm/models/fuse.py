"""A whole model in its inference form."""

import copy

import torch.nn as nn

from wbmm.layers import (
    Block,
    DenseWBMM2d,
    DilatedReparamConv2d,
    FullConnection2d,
    HalfWBMM2d,
    HierarchicalWBMM2d,
    MultiKernelWBMM2d,
    ParallelWBMM2d,
    SerialWBMM2d,
    SLaKConv2d,
    WBMM2d,
    WindowAttention2d,
)
from wbmm.layers.mixers import CompactMixer

FUSIBLE = (
    Block,
    WBMM2d,
    HierarchicalWBMM2d,
    MultiKernelWBMM2d,
    DilatedReparamConv2d,
    SLaKConv2d,
    WindowAttention2d,
    FullConnection2d,
    ParallelWBMM2d,
    SerialWBMM2d,
    HalfWBMM2d,
)
FUSED_FORMS = ("compact", "dense")


def _replace(module: nn.Module, form: str, done: dict[nn.Module, nn.Module]) -> nn.Module:
    """The inference form of a module, its children replaced in place; one that is used twice stays one."""
    if module not in done:
        done[module] = _replace_once(module, form, done)
    return done[module]


def _replace_once(module: nn.Module, form: str, done: dict[nn.Module, nn.Module]) -> nn.Module:
    if isinstance(module, FUSIBLE):
        module = module.fuse()
    if form == "dense" and isinstance(module, CompactMixer):
        return module.to_dense()
    if form == "compact" and isinstance(module, DenseWBMM2d):
        raise ValueError(
            "the model is in dense form already, from which tables cannot be recovered: fuse the trained one"
        )
    for name, child in list(module._modules.items()):
        if child is not None:
            setattr(module, name, _replace(child, form, done))
    return module


def fuse(model: nn.Module, form: str = "compact") -> nn.Module:
    """A copy of a model with every WBMM block in its inference form; the original is untouched.

    Any module that contains our blocks will do: a classifier, a segmentor, a detector. Fusing a fused model again gives
    the same model.

    Args:
        model: in eval mode.
        form: `compact` keeps tables and builds the matrices at the first call; `dense` stores the matrices.
    """
    if form not in FUSED_FORMS:
        raise ValueError(f"form {form!r}: expected 'compact' or 'dense'")
    if model.training or any(module.training for module in model.modules() if isinstance(module, FUSIBLE)):
        raise ValueError(
            "the model is in train mode: its batch statistics still move. Call model.eval() before wbmm.fuse(model)"
        )
    return _replace(copy.deepcopy(model), form, {}).eval()

"""From a configuration to a model on its device, its starting weights, its average and its wrapper."""

import os
from pathlib import Path

import torch
import torch.nn as nn
from timm.layers import convert_sync_batchnorm
from timm.utils import ModelEmaV3
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from wbmm.io.card import read_card
from wbmm.io.reader import CheckpointFile, read_checkpoint
from wbmm.io.weights import load_converted
from wbmm.machine import PRECISIONS, set_precision
from wbmm.models.identify import identify
from wbmm.models.released import convert_released
from wbmm.models.state import CheckpointError, find_state_dict

from .config import TrainConfig
from .dist import World
from .model import create_model, freeze

__all__ = ["build_ema", "build_model", "init_weights", "set_arithmetic", "wrap"]


def set_arithmetic(config: TrainConfig, device: torch.device) -> str:
    """Seeds torch and sets how this process computes; returns a sentence about the precision."""
    torch.manual_seed(config.seed)
    torch.backends.cudnn.benchmark = not config.deterministic  # the size of the images is fixed
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    set_precision(config.precision)
    if device.type == "cpu":
        return f"precision {config.precision}: of no effect on a CPU, which computes in strict float32"
    return f"precision {config.precision}: {PRECISIONS[config.precision]}"


def build_model(config: TrainConfig, num_classes: int, world: World) -> nn.Module:
    """The model by its timm name, on its device, with what is frozen frozen."""
    options = config.model
    model = create_model(options.name, options.args, options.drop_path, config.data.in_chans, num_classes)
    if config.model.grad_checkpointing:
        model.set_grad_checkpointing()
    freeze(model, config.model.freeze)
    if config.model.sync_bn:
        if world.device.type == "cuda":
            model = convert_sync_batchnorm(model)
        elif world.size > 1:
            raise ValueError("model.sync_bn needs CUDA: torch has no SyncBatchNorm for the CPU; set it to false")
    layout = torch.channels_last if config.model.channels_last else torch.contiguous_format
    return model.to(world.device, memory_format=layout)


def init_weights(model: nn.Module, path: Path, resize_tables: bool = False) -> str:
    """Loads `path` into `model` and says what was done.

    A classifier of another number of classes stays as initialised; anything else that does not fit is an error.

    Args:
        model: The model to start.
        path: A run's checkpoint (its moving average, if it has one), or a file of weights.
        resize_tables: Interpolate tables of other window sizes.
    """
    try:
        file = read_checkpoint(path)
        state_dict = dict(convert_released(find_state_dict(file.contents)))
        _check_trainable(state_dict, file)
        own = model.state_dict()
        fresh = [
            key
            for key in _classifier_keys(model)
            if key in own and (key not in state_dict or _has_other_classes(state_dict[key], own[key]))
        ]
        state_dict.update({key: own[key] for key in fresh})
        load_converted(model, state_dict, resize_tables)
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(str(path)) else f"{path}: {text}") from None
    head = f"; the classifier is new ({', '.join(fresh)})" if fresh else ""
    return f"started from the weights in {path}{head}"


def _check_trainable(state_dict: dict[str, Tensor], file: CheckpointFile) -> None:
    seen = identify(state_dict)
    if seen is None or seen.form == "training":
        return
    card = read_card(file)
    source = f": {card.source['file']}" if card and card.source else ""
    raise CheckpointError(
        f"{file.path} is fused ({seen.form} form), which cannot be trained: batch norms and branches are folded into "
        f"its weights. Fine-tuning needs the training checkpoint that it was made from{source}"
    )


def _has_other_classes(value: Tensor, own: Tensor) -> bool:
    return value.ndim == own.ndim and value.shape[1:] == own.shape[1:] and len(value) != len(own)


def _classifier_keys(model: nn.Module) -> list[str]:
    classifier = model.get_classifier()
    names = [name for name, module in model.named_modules() if module is classifier]
    return [f"{name}.{part}" for name in names for part in ("weight", "bias")]


def build_ema(model: nn.Module, config: TrainConfig) -> ModelEmaV3 | None:
    if config.ema.decay is None:
        return None
    return ModelEmaV3(model, decay=config.ema.decay, use_warmup=config.ema.warmup)


def wrap(model: nn.Module, config: TrainConfig, world: World) -> nn.Module:
    """Compiles the model if asked, in place so that its names stay, and puts DDP around it for several processes."""
    if config.model.compile:
        model.compile()
    if world.size == 1:
        return model
    # Buffers in no state dict are constants (the index of a window), which DDP would send to all at every step.
    constants = sorted({name for name, _ in model.named_buffers()} - model.state_dict().keys())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, constants)
    return DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )

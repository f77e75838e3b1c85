"""From a configuration to what a run is made of: the model with its weights, average and wrapper, and both sets."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
from timm.layers import convert_sync_batchnorm
from timm.utils import ModelEmaV3
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from wbmm.data.augment import (
    ByteTransform,
    FinishBytes,
    MemoryFetch,
    SampleDataset,
    check_memory,
    eval_transform,
    load_images,
    train_transform,
)
from wbmm.data.classes import check_sets, in_order_of
from wbmm.data.loader import EvalLoader, Prefetcher, TrainLoader, WorkerFetch
from wbmm.data.order import Plan
from wbmm.data.sources import Source, open_source
from wbmm.io.card import read_card
from wbmm.io.files import load_converted, with_own_classifier
from wbmm.io.reader import CheckpointFile, read_checkpoint
from wbmm.machine import describe_precision, set_precision
from wbmm.models.state import CheckpointError, convert_released, find_state_dict, identify

from .config import TrainConfig, check_config
from .dist import World
from .model import create_model, freeze

__all__ = ["Data", "build_data", "build_ema", "build_eval", "build_model", "init_weights", "set_arithmetic", "wrap"]

CPU = torch.device("cpu")


def set_arithmetic(config: TrainConfig, device: torch.device) -> str:
    """Seeds torch and sets how this process computes; returns a sentence about the precision."""
    torch.manual_seed(config.seed)
    torch.backends.cudnn.benchmark = not config.deterministic  # the size of the images is fixed
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    set_precision(config.precision)
    return f"precision {config.precision}: {describe_precision(config.precision, device)}"


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
        state_dict, fresh = with_own_classifier(state_dict, model)
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


@dataclass
class Data:
    train: TrainLoader
    val: EvalLoader
    num_classes: int
    class_names: list[str] | None


def build_data(
    cfg: TrainConfig,
    rank: int = 0,
    world: int = 1,
    accumulation: int = 1,
    class_names: list[str] | None = None,
    device: torch.device = CPU,
) -> Data:
    """Opens and checks both sets; every error about the data is raised here, before the first step.

    Args:
        cfg: the run's.
        rank, world: of the processes.
        accumulation: forward passes a step.
        class_names: of the checkpoint that the run continues; the data's must be the same.
        device: where the run is; on a GPU the batches are brought there ahead of time.
    """
    check_config(cfg)
    sets = (open_source(cfg.data, train=train) for train in (True, False))
    train, val = (in_order_of(source, class_names, "the checkpoint") for source in sets)
    num_classes = check_sets(cfg.data, train, val)
    if cfg.data.in_memory:
        check_memory(cfg.data, train, val)
    size, fetch = _fetch(cfg, train, device, training=True)
    plan = Plan(size, cfg.seed, cfg.batch, world, rank, accumulation)
    names = train.class_names or class_names
    return Data(TrainLoader(plan, fetch), _eval_loader(cfg, val, rank, world, device), num_classes, names)


def build_eval(cfg: TrainConfig, rank: int = 0, world: int = 1) -> EvalLoader:
    """The validation set alone."""
    check_config(cfg)
    source = open_source(cfg.data, train=False)
    if cfg.data.in_memory:
        check_memory(cfg.data, source)
    return _eval_loader(cfg, source, rank, world)


def _eval_loader(cfg: TrainConfig, source: Source, rank: int, world: int, device: torch.device = CPU) -> EvalLoader:
    size, fetch = _fetch(cfg, source, device, training=False)
    return EvalLoader(size, cfg.batch, rank, world, fetch)


def _fetch(cfg: TrainConfig, source: Source, device: torch.device, training: bool):
    """How many images there are to read, and what reads them. On a GPU they are normalised there."""
    augment, seed = (cfg.augment, cfg.seed) if training else (None, None)
    on_gpu = device.type == "cuda"
    if cfg.data.in_memory:
        images, labels = load_images(cfg.data, source)
        memory = MemoryFetch(images, labels, cfg.data, augment, seed or 0)
        return len(images), Prefetcher(memory.raw, memory.finish, device) if on_gpu else memory
    if augment is not None:
        transform = train_transform(cfg.data, augment, as_bytes=on_gpu)
    else:
        transform = ByteTransform(eval_transform(cfg.data, normalize=False)) if on_gpu else eval_transform(cfg.data)
    dataset = SampleDataset(source, transform, cfg.data.in_chans, seed, cfg.data.on_bad_image == "skip")
    workers = WorkerFetch(dataset, cfg.data.workers, as_bytes=on_gpu)
    return len(source), Prefetcher(workers, FinishBytes(cfg.data), device) if on_gpu else workers

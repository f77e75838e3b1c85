"""The training and the validation set of a run: opened, checked, and made into batches in an order that is fixed."""

from dataclasses import dataclass

import torch

from wbmm.data.augment import ByteTransform, FinishBytes, SampleDataset, eval_transform, train_transform
from wbmm.data.classes import check_sets, in_order_of
from wbmm.data.in_memory import MemoryFetch, check_memory, load_images
from wbmm.data.loader import EvalLoader, TrainLoader, WorkerFetch
from wbmm.data.order import Plan
from wbmm.data.prefetch import Prefetcher
from wbmm.data.sources import Source, open_source

from .config import TrainConfig, check_config

__all__ = ["Data", "build_data", "build_eval"]

CPU = torch.device("cpu")


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

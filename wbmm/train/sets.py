"""The training and the validation set of a run: opened, checked, and made into batches in an order that is fixed."""

from dataclasses import dataclass

from wbmm.data.augment import SampleDataset, eval_transform, train_transform
from wbmm.data.classes import check_sets, in_order_of
from wbmm.data.in_memory import MemoryFetch, check_memory, load_images
from wbmm.data.loader import EvalLoader, TrainLoader, WorkerFetch
from wbmm.data.order import Plan
from wbmm.data.sources import Source, open_source

from .config import TrainConfig, check_config

__all__ = ["Data", "build_data", "build_eval"]


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
    pin_memory: bool = False,
) -> Data:
    """Opens and checks both sets; every error about the data is raised here, before the first step.

    Args:
        cfg: the run's.
        rank, world: of the processes.
        accumulation: forward passes a step.
        class_names: of the checkpoint that the run continues; the data's must be the same.
        pin_memory: whether batches go to a GPU.
    """
    check_config(cfg)
    sets = (open_source(cfg.data, train=train) for train in (True, False))
    train, val = (in_order_of(source, class_names, "the checkpoint") for source in sets)
    num_classes = check_sets(cfg.data, train, val)
    if cfg.data.in_memory:
        check_memory(cfg.data, train, val)
    size, fetch = _train_fetch(cfg, train, pin_memory)
    plan = Plan(size, cfg.seed, cfg.batch, world, rank, accumulation)
    names = train.class_names or class_names
    return Data(TrainLoader(plan, fetch), _eval_loader(cfg, val, rank, world, pin_memory), num_classes, names)


def build_eval(cfg: TrainConfig, rank: int = 0, world: int = 1) -> EvalLoader:
    """The validation set alone."""
    check_config(cfg)
    source = open_source(cfg.data, train=False)
    if cfg.data.in_memory:
        check_memory(cfg.data, source)
    return _eval_loader(cfg, source, rank, world)


def _train_fetch(cfg: TrainConfig, source: Source, pin_memory: bool):
    if cfg.data.in_memory:
        images, labels = load_images(cfg.data, source)
        return len(images), MemoryFetch(images, labels, cfg.data, cfg.augment, cfg.seed)
    skip = cfg.data.on_bad_image == "skip"
    dataset = SampleDataset(source, train_transform(cfg.data, cfg.augment), cfg.data.in_chans, cfg.seed, skip)
    return len(source), WorkerFetch(dataset, cfg.data.workers, pin_memory)


def _eval_loader(cfg: TrainConfig, source: Source, rank: int, world: int, pin_memory: bool = False) -> EvalLoader:
    if cfg.data.in_memory:
        images, labels = load_images(cfg.data, source)
        return EvalLoader(len(images), cfg.batch, rank, world, MemoryFetch(images, labels, cfg.data))
    skip = cfg.data.on_bad_image == "skip"
    dataset = SampleDataset(source, eval_transform(cfg.data), cfg.data.in_chans, None, skip)
    return EvalLoader(len(source), cfg.batch, rank, world, WorkerFetch(dataset, cfg.data.workers, pin_memory))

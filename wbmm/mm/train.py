"""Training of a segmentor or a detector through mmengine's runner: what the tools do."""

import argparse
import os
from collections.abc import Callable, Sequence

import torch

from wbmm.handler import run_command

from .metrics import prefer_fast_metrics
from .require import require

__all__ = ["main", "train"]

TRACKERS = {"tensorboard": "TensorboardVisBackend", "wandb": "WandbVisBackend"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from .options import add_common_arguments

    add_common_arguments(parser)
    parser.add_argument(
        "--resume", nargs="?", const="auto", metavar="FILE", help="continue the run in the work folder, or from FILE"
    )
    parser.add_argument("--amp", action="store_true", help="mixed precision; needs a GPU")
    parser.add_argument("--track", nargs="+", choices=TRACKERS, default=[], help="log there as well")


def main(extra: str, argv: Sequence[str] | None = None) -> int:
    """The training tool of an extra: `seg` or `det`."""
    return run_command(f"train_{extra}", lambda: _main(extra, argv))


def _main(extra: str, argv: Sequence[str] | None) -> None:
    prefer_fast_metrics(extra)
    require(extra)
    parser = argparse.ArgumentParser(prog=f"train_{extra}")
    add_arguments(parser)
    train(extra, parser.parse_args(argv))


def train(extra: str, args: argparse.Namespace):
    """Trains as the command line says; returns the runner."""
    from mmengine.logging import print_log
    from mmengine.runner import Runner

    from .device import prepare_device
    from .options import configure
    from .resume import check_load_from, prepare_resume
    from .safety import close_doors

    close_doors()
    cfg = configure(args)
    texts = [prepare_resume(cfg, args.resume)]
    if cfg.get("load_from") and not cfg.resume:
        check_load_from(cfg.load_from)
    if args.amp:
        use_amp(cfg)
    track(cfg, args.track)
    texts += [_PREPARE[extra](cfg), prepare_device(cfg)]
    runner = Runner.from_cfg(cfg)
    for text in filter(None, texts):
        print_log(text, logger="current")
    runner.train()
    return runner


def use_amp(cfg) -> None:
    """Mixed precision, with dynamic loss scaling; `optim_wrapper.dtype=bfloat16` for the other kind."""
    if not torch.cuda.is_available():
        raise ValueError("--amp needs a CUDA device, and torch sees none here")
    if cfg.optim_wrapper.type not in ("OptimWrapper", "AmpOptimWrapper"):
        raise ValueError(f"--amp cannot change optim_wrapper.type={cfg.optim_wrapper.type!r}; expected 'OptimWrapper'")
    cfg.optim_wrapper.type = "AmpOptimWrapper"
    cfg.optim_wrapper.setdefault("loss_scale", "dynamic")


def track(cfg, names: Sequence[str]) -> None:
    """Adds logging back ends to those of the configuration."""
    backends = cfg.visualizer.vis_backends
    have = {backend["type"] for backend in backends}
    cfg.visualizer.vis_backends = [*backends, *({"type": TRACKERS[n]} for n in names if TRACKERS[n] not in have)]


def _prepare_segmentation(cfg) -> str | None:
    """Has labels watched in training, and in the first process looks at the data before."""
    from .data import check_segmentation_data

    hook = {"type": "LabelRangeHook", "num_classes": cfg.model.decode_head.num_classes}
    cfg.custom_hooks = [*cfg.get("custom_hooks", []), hook]
    return check_segmentation_data(cfg) if int(os.environ.get("RANK", 0)) == 0 else None


def _prepare_detection(cfg) -> str | None:
    """In the first process, looks at the data before training."""
    from .data import check_detection_data

    return check_detection_data(cfg) if int(os.environ.get("RANK", 0)) == 0 else None


_PREPARE: dict[str, Callable] = {"seg": _prepare_segmentation, "det": _prepare_detection}

"""Training and testing of segmentors and detectors through mmengine's runner: what the tools do."""

import argparse
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from mmengine.config import Config, DictAction

from wbmm.handler import run_command

from .build import load_config, require

__all__ = [
    "LAUNCHERS",
    "add_common_arguments",
    "configure",
    "evaluate_tool",
    "prefer_fast_metrics",
    "set_data_root",
    "test",
    "train",
    "train_tool",
]

LAUNCHERS = ("none", "pytorch", "slurm", "mpi")


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a configuration, such as those of configs/ade20k and configs/coco")
    parser.add_argument("--work-dir", help="output folder; work_dirs/NAME OF THE CONFIGURATION when not given")
    parser.add_argument("--data-root", help="where the data are, in place of what the configuration says")
    parser.add_argument(
        "--cfg-options", nargs="+", action=DictAction, metavar="KEY=VALUE", help="changes of the configuration"
    )
    parser.add_argument("--launcher", choices=LAUNCHERS, help="how processes were started; found out for torchrun")


def configure(args: argparse.Namespace) -> Config:
    """The configuration with the command line's changes, its work folder and its launcher."""
    cfg = load_config(args.config, args.cfg_options)
    if args.data_root is not None:
        set_data_root(cfg, args.data_root)
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get("work_dir") is None:
        cfg.work_dir = str(Path("work_dirs") / Path(args.config).stem)
    torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    cfg.launcher = args.launcher or ("pytorch" if torchrun else "none")
    return cfg


def set_data_root(cfg: Config, root: str) -> None:
    """Moves every data set of a configuration, and the annotation files that its metrics read, to another folder."""
    for part in ("train", "val", "test"):
        dataset = (cfg.get(f"{part}_dataloader") or {}).get("dataset")
        while dataset is not None and "data_root" not in dataset:
            dataset = dataset.get("dataset")  # of a wrapper
        if dataset is None:
            continue
        old, dataset.data_root = dataset.data_root, root
        evaluator = cfg.get(f"{part}_evaluator")
        for metric in evaluator if isinstance(evaluator, list) else [evaluator or {}]:
            if metric.get("ann_file") and Path(metric.ann_file).is_relative_to(old):
                metric.ann_file = str(Path(root) / Path(metric.ann_file).relative_to(old))


def prefer_fast_metrics(extra: str) -> bool:
    """Puts faster-coco-eval in the place of pycocotools, before mmdet imports it; whether it is there."""
    if extra != "det":
        return False
    try:
        faster = importlib.import_module("faster_coco_eval")
    except ImportError:
        return False
    faster.init_as_pycocotools()
    return True


TRACKERS = {"tensorboard": "TensorboardVisBackend", "wandb": "WandbVisBackend"}


def add_train_arguments(parser: argparse.ArgumentParser) -> None:

    add_common_arguments(parser)
    parser.add_argument(
        "--resume", nargs="?", const="auto", metavar="FILE", help="continue the run in the work folder, or from FILE"
    )
    parser.add_argument("--amp", action="store_true", help="mixed precision; needs a GPU")
    parser.add_argument("--track", nargs="+", choices=TRACKERS, default=[], help="log there as well")


def train_tool(extra: str, argv: Sequence[str] | None = None) -> int:
    """The training tool of an extra: `seg` or `det`."""
    return run_command(f"train_{extra}", lambda: _train_tool(extra, argv))


def _train_tool(extra: str, argv: Sequence[str] | None) -> None:
    prefer_fast_metrics(extra)
    require(extra)
    parser = argparse.ArgumentParser(prog=f"train_{extra}")
    add_train_arguments(parser)
    train(extra, parser.parse_args(argv))


def train(extra: str, args: argparse.Namespace):
    """Trains as the command line says; returns the runner."""
    from mmengine.logging import print_log
    from mmengine.runner import Runner

    from .build import prepare_device
    from .resume import check_load_from, prepare_resume, use_safe_reader

    use_safe_reader()
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


def add_test_arguments(parser: argparse.ArgumentParser, extra: str) -> None:

    add_common_arguments(parser)
    parser.add_argument("checkpoint", help="of a runner, released, or fused by `wbmm reparam`")
    if extra == "seg":
        help_tta = "multi-scale testing with flips, as the configuration says"
        parser.add_argument("--tta", action="store_true", help=help_tta)
    parser.add_argument(
        "--fuse", nargs="?", const="compact", choices=("compact", "dense"), help="fuse the backbone after loading"
    )
    parser.add_argument("--show-dir", help="draw predictions into this folder")


def evaluate_tool(extra: str, argv: Sequence[str] | None = None) -> int:
    """The testing tool of an extra: `seg` or `det`."""
    return run_command(f"test_{extra}", lambda: _test_tool(extra, argv))


def _test_tool(extra: str, argv: Sequence[str] | None) -> None:
    prefer_fast_metrics(extra)
    require(extra)
    parser = argparse.ArgumentParser(prog=f"test_{extra}")
    add_test_arguments(parser, extra)
    test(extra, parser.parse_args(argv))


def test(extra: str, args: argparse.Namespace) -> dict:
    """Tests as the command line says; returns the metrics."""
    from mmengine.logging import print_log
    from mmengine.registry import MODELS, DefaultScope
    from mmengine.runner import Runner

    from .build import build_model, prepare_device

    cfg = configure(args)
    cfg.load_from, cfg.resume = None, False
    if args.show_dir:
        cfg.default_hooks.visualization.update(draw=True)
        cfg.visualizer.save_dir = args.show_dir
    scope = {"seg": "mmseg", "det": "mmdet"}[extra]
    if extra == "det":
        from .data import check_detection_data

        print_log(check_detection_data(cfg, ["test"]), logger="current")
    prepare_device(cfg)
    model = build_model(cfg, scope, args.checkpoint, args.fuse)
    tta = getattr(args, "tta", False)
    if tta:
        _use_tta(cfg)
        with DefaultScope.overwrite_default_scope(scope):
            model = MODELS.build({**cfg.tta_model, "module": model})
    names = ("test_dataloader", "test_cfg", "test_evaluator", "default_hooks", "custom_hooks", "env_cfg")
    names += ("log_processor", "visualizer", "default_scope", "randomness", "launcher", "work_dir")
    runner = Runner(model=model, cfg=cfg, **{name: cfg[name] for name in names if cfg.get(name) is not None})
    metrics = runner.test()
    form = args.fuse or getattr(getattr(model, "module", model).backbone, "form", "training")
    how = "multi-scale with flips" if tta else "single scale"
    figures = ", ".join(f"{key} {value:.4g}" for key, value in metrics.items())
    print_log(f"{args.checkpoint}, {form} form, {how}: {figures}", logger="current")
    return metrics


def _use_tta(cfg) -> None:
    missing = [key for key in ("tta_pipeline", "tta_model") if key not in cfg]
    if missing:
        raise ValueError(f"--tta needs {missing[0]} in the configuration")
    cfg.test_dataloader.dataset.pipeline = cfg.tta_pipeline

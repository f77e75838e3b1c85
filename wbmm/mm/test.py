"""Testing of a segmentor or a detector through mmengine's runner: what the tools do."""

import argparse
from collections.abc import Sequence

from wbmm.handler import run_command

from .metrics import prefer_fast_metrics
from .require import require

__all__ = ["main", "test"]


def add_arguments(parser: argparse.ArgumentParser, extra: str) -> None:
    from .options import add_common_arguments

    add_common_arguments(parser)
    parser.add_argument("checkpoint", help="of a runner, released, or fused by `wbmm reparam`")
    if extra == "seg":
        help_tta = "multi-scale testing with flips, as the configuration says"
        parser.add_argument("--tta", action="store_true", help=help_tta)
    parser.add_argument(
        "--fuse", nargs="?", const="compact", choices=("compact", "dense"), help="fuse the backbone after loading"
    )
    parser.add_argument("--show-dir", help="draw predictions into this folder")


def main(extra: str, argv: Sequence[str] | None = None) -> int:
    """The testing tool of an extra: `seg` or `det`."""
    return run_command(f"test_{extra}", lambda: _main(extra, argv))


def _main(extra: str, argv: Sequence[str] | None) -> None:
    prefer_fast_metrics(extra)
    require(extra)
    parser = argparse.ArgumentParser(prog=f"test_{extra}")
    add_arguments(parser, extra)
    test(extra, parser.parse_args(argv))


def test(extra: str, args: argparse.Namespace) -> dict:
    """Tests as the command line says; returns the metrics."""
    from mmengine.logging import print_log
    from mmengine.registry import MODELS, DefaultScope
    from mmengine.runner import Runner

    from .build import build_model
    from .device import prepare_device
    from .options import configure

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

"""The command line that the training and testing tools of segmentation and detection share."""

import argparse
import os
from pathlib import Path

from mmengine.config import Config, DictAction

from .build import load_config

__all__ = ["LAUNCHERS", "add_common_arguments", "configure", "set_data_root"]

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

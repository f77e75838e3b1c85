"""Entry points of tools/train_seg.py, test_seg.py, train_det.py and test_det.py: packages first, then `runner.py`.

Where there is no checkout, `python -m wbmm.mm.tools train_seg CONFIG ...` is the same, also behind `torchrun -m`.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from wbmm.handler import run_command

from . import require

__all__ = ["evaluate_tool", "prefer_fast_metrics", "prepare_packages", "train", "train_tool"]


def train_tool(extra: str, argv: Sequence[str] | None = None) -> int:
    """The training tool of an extra: `seg` or `det`."""
    return run_command(f"train_{extra}", lambda: train(extra, argv))


def evaluate_tool(extra: str, argv: Sequence[str] | None = None) -> int:
    """The testing tool of an extra: `seg` or `det`."""
    return run_command(f"test_{extra}", lambda: _test(extra, argv))


def train(extra: str, argv: Sequence[str] | None) -> None:
    """What `train_tool` runs, for a caller that handles errors itself."""
    prepare_packages(extra)
    from .runner import add_train_arguments, run_training

    parser = argparse.ArgumentParser(prog=f"train_{extra}")
    add_train_arguments(parser)
    run_training(extra, parser.parse_args(argv))


def _test(extra: str, argv: Sequence[str] | None) -> None:
    prepare_packages(extra)
    from .runner import add_test_arguments, run_testing

    parser = argparse.ArgumentParser(prog=f"test_{extra}")
    add_test_arguments(parser, extra)
    run_testing(extra, parser.parse_args(argv))


def prepare_packages(extra: str) -> None:
    """Raises an `ImportError` unless the packages of an extra are there; with the faster metrics, if they are."""
    prefer_fast_metrics(extra)
    require(extra)


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


def main(argv: Sequence[str]) -> int:
    """`train_seg CONFIG ...`, `test_seg`, `train_det` or `test_det`."""
    tools = {"train": train_tool, "test": evaluate_tool}
    names = [f"{what}_{extra}" for what in tools for extra in ("seg", "det")]
    if not argv or argv[0] not in names:
        print(f"usage: python -m wbmm.mm.tools {{{','.join(names)}}} CONFIG ...", file=sys.stderr)
        return 2
    what, _, extra = argv[0].partition("_")
    return tools[what](extra, argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

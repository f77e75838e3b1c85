"""`wbmm reparam`: a checkpoint of ours, of the authors, of MMSegmentation or of MMDetection to its fused form."""

import argparse
from pathlib import Path

from wbmm.deploy.fused_file import reparam
from wbmm.io.atomic import check_target
from wbmm.io.files import run_checkpoint
from wbmm.io.reader import read_checkpoint
from wbmm.mm.mm_checkpoint import is_mm, reparam_mm
from wbmm.models.fuse import FUSED_FORMS

__all__ = ["EXAMPLE", "add_arguments", "run"]

EXAMPLE = "wbmm reparam runs/wbmm_t/best.pt wbmm_t.safetensors --check"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input", type=Path, metavar="IN", help="a checkpoint (ours, released, mmseg's, mmdet's) or a run's folder"
    )
    parser.add_argument("output", type=Path, metavar="OUT", help="a .safetensors or .pth file")
    parser.add_argument("--model", help="the model's name, where the file does not tell")
    parser.add_argument("--form", choices=FUSED_FORMS, default="compact")
    parser.add_argument("--half", action="store_true", help="store the weights in float16")
    parser.add_argument("--check", action="store_true", help="compare both forms on pictures; exit code 1 if unlike")
    parser.add_argument("--images", type=Path, metavar="DIR", help="images for --check (default: drawn landscapes)")
    parser.add_argument("--tolerance", type=float, help="of --check, relative to the largest output (default 1e-5)")
    parser.add_argument("--no-ema", dest="ema", action="store_false", help="the weights themselves, not their average")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")


def run(args: argparse.Namespace) -> int:
    args.input = run_checkpoint(args.input)
    check_target(args.output, args.force)
    file = read_checkpoint(args.input)
    return reparam_mm(args, file.contents) if is_mm(file.contents) else reparam(args, file)

"""`wbmm export`: a checkpoint to a file for ONNX Runtime, OpenVINO or torch.export, run there and compared."""

import argparse
from pathlib import Path

import timm
import torch.nn as nn

from wbmm.deploy.export import FORMATS, Exportable, ExportReport, as_exportable, check_format, export_to_file
from wbmm.deploy.export.graph import INPUT_NAME
from wbmm.io.card import check_timm_name
from wbmm.io.files import describe_source, load_model, run_checkpoint
from wbmm.layers import Block
from wbmm.mm.exportable import open_exportable
from wbmm.models.fuse import FUSED_FORMS
from wbmm.text import render_table

__all__ = ["EXAMPLE", "add_arguments", "run"]

EXAMPLE = "wbmm export runs/wbmm_t/best.pt wbmm_t.onnx --dynamic-batch --dynamic-size"
HEADERS = ("compared", "input", "images", "largest value", "largest difference")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN", help="a checkpoint or a run's folder; with --random-weights, a name")
    parser.add_argument("output", type=Path, nargs="?", metavar="OUT", help="default: beside IN, with another ending")
    parser.add_argument("--format", choices=FORMATS, help="default: by the ending of OUT, .onnx, .xml or .pt2")
    parser.add_argument("--dynamic-batch", action="store_true", help="any batch size")
    parser.add_argument("--dynamic-size", action="store_true", help="any image size")
    parser.add_argument("--size", type=int, nargs=2, metavar=("H", "W"), help="image size (default: the model's)")
    parser.add_argument("--batch", type=int, default=1, help="batch size, where it is not dynamic")
    parser.add_argument("--with-preprocess", action="store_true", help="take uint8 images and normalise in the graph")
    parser.add_argument("--features", action="store_true", help="the maps of the four stages instead of logits")
    parser.add_argument(
        "--neck", action="store_true", help="of a detector, backbone and neck alone: the maps p2, p3, ..."
    )
    parser.add_argument("--form", choices=FUSED_FORMS, help="compact (default), or dense")
    parser.add_argument("--half", action="store_true", help="store the weights in float16 (openvino)")
    parser.add_argument("--config", type=Path, help="of an mmseg or mmdet checkpoint")
    parser.add_argument("--model", help="the model's name, where the file does not tell")
    parser.add_argument("--no-ema", dest="ema", action="store_false", help="the weights themselves, not their average")
    parser.add_argument("--random-weights", action="store_true", help="IN is a name; for trying things out")
    parser.add_argument("--tolerance", type=float, help="relative to the largest output (default 1e-4, --half 2e-2)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")


def run(args: argparse.Namespace) -> int:
    by_name = args.random_weights or not Path(args.input).exists()
    output = _output(args, Path(args.input) if by_name else run_checkpoint(args.input), by_name)
    if not args.random_weights:
        args.input = str(run_checkpoint(args.input))
    check_format(output, args.format, args.force)
    report = export_to_file(
        _open(args),
        output,
        format=args.format,
        size=args.size,
        batch=args.batch,
        dynamic_batch=args.dynamic_batch,
        dynamic_size=args.dynamic_size,
        with_preprocess=args.with_preprocess,
        form=args.form,
        half=args.half,
        tolerance=args.tolerance,
        force=args.force,
    )
    _print(report)
    return 0


def _output(args: argparse.Namespace, path: Path, by_name: bool) -> Path:
    if args.output is not None:
        return args.output
    if args.format is None:
        raise ValueError(f"say OUT or --format, one of {', '.join(FORMATS)}")
    # A model's name may have a dot, which begins no suffix.
    return Path(f"{path}{FORMATS[args.format]}") if by_name else path.with_suffix(FORMATS[args.format])


def _open(args: argparse.Namespace) -> Exportable:
    path = Path(args.input)
    if args.random_weights:
        if path.is_file():
            raise ValueError(f"{path} is a file: --random-weights goes with a model's name")
        return as_exportable(_random(args.input), features=args.features)
    if not path.is_file() and timm.is_model(args.input):
        raise ValueError(
            f"{args.input} is a model's name, not a file with weights; say --random-weights if that is meant"
        )
    if args.neck and args.config is None:
        raise ValueError("--neck is for a detector's checkpoint, with its --config FILE")
    if args.config is not None:
        exportable = open_exportable(args.config, path, args.features, args.neck)
        # A detector's pictures keep their aspect ratio, so that one size would fit few of them.
        args.dynamic_size |= exportable.boxes and args.size is None
    else:
        model = load_model(path, args.model, args.ema)
        exportable = as_exportable(model, model.card, args.features)
    exportable.card = exportable.card.replace(source=describe_source(path))
    return exportable


def _random(name: str) -> nn.Module:
    model = timm.create_model(check_timm_name(name)).eval()
    for module in model.modules():
        if isinstance(module, Block) and module.gamma is not None:
            nn.init.ones_(module.gamma)  # at the initial 1e-6 a block does nothing and comparing says nothing
    return model


def _print(report: ExportReport) -> None:
    print(render_table(HEADERS, [comparison.row() for comparison in report.comparisons]))
    kind = "uint8" if report.card.input == "uint8" else "float32, normalised"
    print(f"\n{report.path}: {report.bytes / 2**20:.1f} MB, {report.card.describe()}")
    print(f"{INPUT_NAME}: {kind}, {report.shapes.describe()}")

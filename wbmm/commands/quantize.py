"""`wbmm quantize`: a model in INT8 or 16 bits, with what that costs and what it gains in one table."""

import argparse
import sys
import tempfile
from pathlib import Path

from wbmm.data.images import check_batch, match_classes, no_more_than, open_labelled
from wbmm.data.sources import Source
from wbmm.deploy.evaluate import (
    FORM_HEADERS,
    ComparisonImages,
    MeasuredFile,
    Quality,
    add_data_arguments,
    measure_files,
)
from wbmm.deploy.quantize.choose import GROUPS, Layer, LayerChoice
from wbmm.deploy.quantize.convert import (
    BACKENDS,
    PRECISIONS,
    Calibration,
    check_request,
    convert_precision,
    float_file,
    read_calibration,
    target_of,
)
from wbmm.io.card import ModelCard
from wbmm.io.files import run_checkpoint
from wbmm.text import render_table

__all__ = ["EXAMPLE", "add_arguments", "run"]

EXAMPLE = "wbmm quantize runs/wbmm_t/best.pt --calib /data/imagenet --format openvino --data /data/imagenet"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input", type=Path, metavar="IN", help="a checkpoint, a run's folder, or an .onnx or .xml of `wbmm export`"
    )
    parser.add_argument("output", type=Path, nargs="?", metavar="OUT", help="default: beside IN, e.g. best.int8.xml")
    parser.add_argument("--format", choices=BACKENDS, required=True, help="safetensors: weights in fp16 or bf16 alone")
    parser.add_argument("--precision", choices=PRECISIONS, default="int8")
    calib = "images to calibrate INT8 on; labels do not matter (no DIR for --source digits and hfds)"
    parser.add_argument("--calib", type=Path, nargs="?", metavar="DIR", help=calib)
    parser.add_argument("--calib-split", default="train", help="of --calib, where it has splits (default: train)")
    parser.add_argument("--n", type=int, default=128, help="images to calibrate on (default: 128)")
    keep = f"layers to keep in float, by group ({', '.join(GROUPS)}) or by name, with * and ?; nothing: none"
    default = f"default: {' '.join(BACKENDS['openvino'].float_groups)} for openvino, which INT8 makes no faster there"
    parser.add_argument("--keep", nargs="*", metavar="PATTERN", help=f"{keep} ({default})")
    target = "agreement with float32, in %%, below which layers are kept in float; a miss on --data is told"
    parser.add_argument("--target", type=float, default=99.0, help=f"{target} (default: 99)")
    parser.add_argument("--sensitivity", action="store_true", help="measure what each group costs by itself")
    parser.add_argument("--full-range", action="store_true", help="weights of 8 bits, not 7: for processors with VNNI")
    data = "labelled images, for accuracy (no DIR for --source digits and hfds)"
    parser.add_argument("--data", type=Path, nargs="?", const=Path(), metavar="DIR", help=data)
    add_data_arguments(parser)
    parser.add_argument("--limit", type=int, metavar="N", help="of --data, equally many of each class")
    parser.add_argument("--dynamic-batch", action="store_true", help="any batch size, if IN is a checkpoint")
    parser.add_argument("--model", help="the model's name, where the file does not tell")
    parser.add_argument("--no-ema", dest="ema", action="store_false", help="the weights themselves, not their average")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")


def run(args: argparse.Namespace) -> int:
    check_request(args.format, args.precision, args.full_range)
    if not 0 <= args.target <= 100:
        raise ValueError(f"--target {args.target:g}: expected a percentage from 0 to 100")
    for name in ("calib", "data"):
        folder = getattr(args, name)
        if folder is not None and not folder.exists():
            raise ValueError(f"--{name} {folder}: there is no such folder")
    given, args.input = args.input, run_checkpoint(args.input)
    # What a model of the project by name becomes is written here, not beside its file.
    source = args.input if given.exists() else Path(args.input.name)
    output = target_of(source, args.output, args.format, args.precision, args.force)
    with tempfile.TemporaryDirectory() as folder:
        path, card = float_file(args.input, args.format, Path(folder), args.model, args.ema, args.dynamic_batch)
        labelled = _labelled(args, card)
        calibration = _calibration(args, card)
        images = ComparisonImages(labelled, calibration.others, args.workers, args.skip_bad)
        before = images.evaluate(path)  # what is wrong with the data shows before anything is written
        backend = BACKENDS[args.format](path, card, **({"full_range": True} if args.full_range else {}))
        converted = convert_precision(
            backend, args.precision, output, calibration, args.keep, args.target, args.sensitivity, args.force
        )
        if converted.choice is not None:
            print(calibration.describe())
            _explain(converted.choice, converted.layers, calibration, args)
        measured = measure_files([path, output], images, before)
    labels = (f"float32, {backend.runtime}", f"{args.precision}, {backend.runtime}")
    rows = [item.row(label) for item, label in zip(measured, labels, strict=True)]
    print("\n" + render_table(FORM_HEADERS, rows, markdown=args.markdown))
    if labelled is None:
        print(f"\nagreement is on {calibration.what}; accuracy needs labelled images (--data DIR)")
    print(f"\n{output}: {converted.card.describe()}")
    if labelled is not None or converted.choice is None:
        _compare_with_target(measured[1], args, converted.choice)
    return 0


def _compare_with_target(measured: MeasuredFile, args: argparse.Namespace, choice: LayerChoice | None) -> None:
    """Says whether the target is reached on the images of the table, which the layers were not chosen on."""
    where = f"{measured.images} images{' of --data' if args.data is not None else ''}"
    text = f"agreement with float32 on {where}: {measured.agreement:.2f} %"
    if measured.agreement >= args.target:
        print(f"{text}, --target {args.target:g} is reached")
        return
    advice = ""
    if choice is not None:
        chosen = f"the layers were chosen on others, where it is {choice.after.agreement:.2f} %"
        advice = f"; {chosen}. More calibration images (--n) or a higher --target keep it nearer to float32"
    print(f"note: {text}, below --target {args.target:g}{advice}", file=sys.stderr)


def _labelled(args: argparse.Namespace, card: ModelCard) -> Source | None:
    if args.data is None:
        return None
    source = open_labelled(card, None if args.data == Path() else args.data, args.source, args.split)
    return no_more_than(match_classes(card, source), args.limit)


def _calibration(args: argparse.Namespace, card: ModelCard) -> Calibration:
    if args.precision == "int8" or args.calib is not None:
        return read_calibration(card, args.calib, args.source, args.calib_split, args.n)
    pictures, what = check_batch(card)
    return Calibration(pictures, pictures, False, what)


def _explain(choice: LayerChoice, layers: list[Layer], calibration: Calibration, args: argparse.Namespace) -> None:
    kept = len(choice.keep)
    usual = [g for g in BACKENDS[args.format].float_groups if args.keep is None and any(x.group == g for x in layers)]
    why = f"; in float, since INT8 makes them no faster: {', '.join(usual)}" if usual else ""
    print(f"{len(layers) - kept} of {len(layers)} layers in INT8{why}")
    count, what = len(calibration.others), calibration.what
    where = f"the {count} {what.removeprefix('the ')}" if what.startswith("the ") else f"{count} {what}"
    print(f"agreement with float32 on {where}: {choice.after.agreement:.2f} %, --target is {args.target:g}")
    if choice.alone:
        print("\n" + _sensitivity_table(choice.alone, layers, args.markdown) + "\n")
    if choice.groups:
        print(
            f"kept in float: {', '.join(choice.groups)}; agreement {choice.before.agreement:.2f} % before, "
            f"{choice.after.agreement:.2f} % after"
        )
    if choice.after.agreement < args.target:
        print(
            f"note: the agreement is {choice.after.agreement:.2f} %, below --target {args.target:g}, and keeping more "
            "layers in float did not raise it",
            file=sys.stderr,
        )


def _sensitivity_table(alone: dict[str, Quality], layers: list[Layer], markdown: bool = False) -> str:
    """What each group costs, quantised by itself."""
    counts = {group: sum(layer.group == group for layer in layers) for group in alone}
    rows = [
        [group, GROUPS[group], str(counts[group]), f"{item.agreement:.2f}", f"{100 * item.noise:.2f}"]
        for group, item in alone.items()
    ]
    headers = ("quantised alone", "", "layers", "same top-1 %", "noise of the logits %")
    return render_table(headers, rows, markdown=markdown)

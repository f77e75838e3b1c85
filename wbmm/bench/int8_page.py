"""What fewer bits do to trained models: every form of several runs, as one page."""

import argparse
import tempfile
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import mean, median

import torch

from wbmm.data.images import match_classes, no_more_than, open_labelled
from wbmm.deploy.evaluate import ComparisonImages, MeasuredFile, measure_files
from wbmm.deploy.quantize.choose import GROUPS, LayerChoice
from wbmm.deploy.quantize.convert import BACKENDS, convert_precision, float_file, read_calibration
from wbmm.handler import run_command
from wbmm.io.atomic import write_text
from wbmm.io.files import run_checkpoint
from wbmm.io.reader import safe_load
from wbmm.machine import processor, versions
from wbmm.text import counted, render_table

from .results import data_name

FORMATS = ("openvino", "onnx")
DEFAULTS = {"n": 128, "limit": None}
FOLDERS = {"source": "folder", "train_split": "train", "val_split": "val"}
BF16 = "OpenVINO, BF16"

FORM_HEADERS = (
    *("model, data", "form", "MB", "top-1 of each run, %", "mean", "same top-1 as PyTorch FP32, %"),
    *("noise of the logits, %", "kept in float", "speed to the same runtime's FP32"),
)

PROSE = """# INT8, BF16 and FP16, measured

The paper claims that WBMM is compatible with INT8. This page is what came out on models trained here, for better or
worse. Every form is evaluated on {images}; INT8 is post-training, static and per channel
(OpenVINO by NNCF, ONNX by ONNX Runtime's quantiser), calibrated on {n} training images. Layers stay in float as
`wbmm quantize` decides; in OpenVINO, depthwise convolutions and gates always do. BF16 is the FP32 file, computed with
OpenVINO's precision hint. *Noise* is the difference of the logits from PyTorch's in FP32, relative to their spread over
the classes. *7-bit weights* are the default, safe on processors without VNNI; *8-bit* is `--full-range`. Speed is at
batch 1, the median of interleaved rounds, as a ratio to the same runtime in FP32 in the same rounds.
"""


@dataclass
class TrainedRun:
    """The forms of one run, by name in order, and what was found about its layers."""

    model: str
    data: str
    forms: dict[str, MeasuredFile] = field(default_factory=dict)
    choices: dict[str, LayerChoice] = field(default_factory=dict)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/int8_report.py", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs, or with --data checkpoints")
    parser.add_argument("--data", type=Path, metavar="DIR", help="images in folders train and val, in place of a run's")
    parser.add_argument("--n", type=int, default=DEFAULTS["n"], help="images to calibrate on")
    parser.add_argument("--limit", type=int, help="images to evaluate on (default: all)")
    parser.add_argument("--rounds", type=int, default=50, help="of the timing")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE", help="the page to write, Markdown")
    return run_command("int8_report", lambda: _write_report(parser.parse_args(argv)))


def _write_report(args: argparse.Namespace) -> None:
    runs = [examine(folder, args) for folder in args.runs]
    write_text(args.results, page(runs, args))
    print(args.results.read_text())


def examine(folder: Path, args: argparse.Namespace) -> TrainedRun:
    """Converts the last checkpoint of a run to every form and measures them beside each other."""
    checkpoint = run_checkpoint(folder) if args.data else folder / "last.pt"
    data = {"root": args.data, **FOLDERS} if args.data else safe_load(checkpoint)["config"]["data"]
    with tempfile.TemporaryDirectory() as place:
        path, card = float_file(checkpoint, "safetensors", Path(place))
        labelled = match_classes(card, open_labelled(card, data["root"], data["source"], data["val_split"]))
        root = data["root"] and Path(data["root"])
        calibration = read_calibration(card, root, data["source"], data["train_split"], args.n)
        run = TrainedRun(card.model, Path(data["root"]).name if data["root"] else data["source"])
        files: dict[str, Path] = {"PyTorch, FP32": path}
        for format in FORMATS:
            _convert_all(checkpoint, format, Path(place), calibration, files, run)
        images = ComparisonImages(no_more_than(labelled, args.limit), calibration.others)
        precisions = ["bf16" if form == BF16 else "f32" for form in files]
        measured = measure_files(list(files.values()), images, rounds=args.rounds, precisions=precisions)
    run.forms = dict(zip(files, measured, strict=True))
    print(f"{folder}: " + ", ".join(f"{form} {item.top1:.2f}" for form, item in run.forms.items()), flush=True)
    return run


def _convert_all(
    checkpoint: Path, format: str, place: Path, calibration, files: dict[str, Path], run: TrainedRun
) -> None:
    path, card = float_file(checkpoint, format, place)
    cls = BACKENDS[format]
    files[f"{cls.runtime}, FP32"] = path
    if format == "openvino":
        files[BF16] = path
    wanted = {
        "FP16": (cls(path, card), "fp16"),
        "INT8, 7-bit weights": (cls(path, card), "int8"),
        "INT8, 8-bit weights": (cls(path, card, full_range=True), "int8"),
    }
    for number, (name, (backend, precision)) in enumerate(wanted.items()):
        form = f"{cls.runtime}, {name}"
        files[form] = place / f"{number}{cls.suffix}"
        converted = convert_precision(backend, precision, files[form], calibration, look=number == 1)
        if converted.choice is not None:
            run.choices[form] = converted.choice


def page(runs: list[TrainedRun], args: argparse.Namespace) -> str:
    groups: dict[str, list[TrainedRun]] = {}
    for run in runs:
        groups.setdefault(f"{run.model}, {run.data}", []).append(run)
    rows = [_row(name, form, members) for name, members in groups.items() for form in members[0].forms]
    used = versions("openvino", "nncf", "onnxruntime")
    changed = f" --data {data_name(args.data)}" if args.data else ""
    changed += "".join(f" --{key} {getattr(args, key)}" for key in DEFAULTS if getattr(args, key) != DEFAULTS[key])
    changed += f" --results {args.results}"
    images = (
        f"{args.limit} images of the validation set (or all, if there are fewer)" if args.limit else "the whole set"
    )
    return (
        f"{PROSE.format(n=args.n, images=images)}\n{render_table(FORM_HEADERS, rows, markdown=True)}\n\n"
        "## What each group of layers costs\n\n"
        "Quantised by itself (7-bit weights), everything else in float; noise of the logits in per cent, the mean of "
        f"the runs.\n\n{_sensitivity(groups)}\n\n"
        f"Measured: {_processor_for_int8()}, {date.today().isoformat()}; "
        + ", ".join(f"{name} {version}" for name, version in used.items())
        + f".\n\n```sh\npython tools/int8_report.py {' '.join(map(str, args.runs))}{changed}\n```\n"
    )


def _row(name: str, form: str, runs: list[TrainedRun]) -> list[str]:
    items = [run.forms[form] for run in runs]
    base = [run.forms[f"{form.partition(',')[0]}, FP32"] for run in runs]
    choices = [run.choices[form] for run in runs if form in run.choices]
    kept = sorted({group for choice in choices for group in choice.groups})
    return [
        name,
        form,
        f"{items[0].bytes / 2**20:.1f}",
        " ".join(f"{item.top1:.2f}" for item in items),
        f"{mean(item.top1 for item in items):.2f}",
        f"{mean(item.agreement for item in items):.2f}",
        f"{100 * mean(item.noise for item in items):.2f}",
        (", ".join(kept) or "nothing") if choices else "-",
        f"{median(b.seconds / i.seconds for b, i in zip(base, items, strict=True)):.2f}x",
    ]


def _sensitivity(groups: dict[str, list[TrainedRun]]) -> str:
    columns = []
    for name, runs in groups.items():
        for format in FORMATS:
            form = f"{BACKENDS[format].runtime}, INT8, 7-bit weights"
            columns.append((f"{name}, {BACKENDS[format].runtime}", [run.choices[form].alone for run in runs]))
    present = [group for group in GROUPS if any(group in alone for _, found in columns for alone in found)]
    rows = [
        [group, GROUPS[group]]
        + [
            f"{100 * mean(alone[group].noise for alone in found):.2f}" if group in found[0] else "-"
            for _, found in columns
        ]
        for group in present
    ]
    return render_table(("group", "", *(title for title, _ in columns)), rows, markdown=True)


def _processor_for_int8() -> str:
    """Its name, its cores, and what it has for eight bits."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text().split() if info.is_file() else []
    has = {"avx2": "AVX2", "avx512_vnni": "AVX-512 VNNI", "avx_vnni": "AVX VNNI", "amx_int8": "AMX"}
    found = [label for flag, label in has.items() if flag in flags]
    vnni = "" if any("VNNI" in label for label in found) else ", no VNNI"
    return f"{counted(torch.get_num_threads(), 'thread')} of {processor()} ({', '.join(found)}{vnni})"

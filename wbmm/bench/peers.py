"""`wbmm bench peers`: throughput of the family and its peers in timm against their published ImageNet top-1.

One interleaved run for each precision: float32 and bfloat16 in eager PyTorch, INT8 by OpenVINO. Top-1 is what papers
or timm report; nothing is evaluated here. With `--out`, a picture for each precision is drawn beside the table.
"""

import argparse
import csv
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

import torch

from wbmm.deploy.runtime import open_runner
from wbmm.io.atomic import write_text
from wbmm.paper_tables import load_tables

from .report.chart import Axis, Chart, Point, Series
from .results import (
    Cell,
    Entry,
    Record,
    Result,
    RunLog,
    add_log_arguments,
    add_output_arguments,
    check_out,
    plan_text,
    present,
    run_cells,
    speed_record,
    typed_argv,
)
from .runtime import PAUSE_S, converted_file, fused_with_card, open_named
from .setting import Setting, build, images_for, split

__all__ = ["PRECISIONS", "Peer", "draw", "peers", "run"]

EXAMPLE = "wbmm bench peers --out results/peers"
PRECISIONS = {
    "float32": "float32, eager PyTorch",
    "bfloat16": "bfloat16, eager PyTorch",
    "int8": "INT8, OpenVINO",
}
BASELINE = "convnext_tiny"
# Exporting and quantising take half a minute a net.
INT8_NETS = ("wbmm_p", "wbmm_t", "convnext_pico", BASELINE)
COLOURS = {
    "WBMM": "blue",
    "UniRepLKNet": "sky",
    "ConvNeXt": "orange",
    "ConvNeXt V2": "amber",
    "Swin": "purple",
    "InceptionNeXt": "green",
    "EfficientNet": "grey",
}
NOTE = (
    "224 px, fused where the net has a fused form; all nets of a precision in the same interleaved run, ratios to "
    f"{BASELINE} in that precision. Top-1 is published, of ImageNet at 224 px in float32, and was not measured here. "
    "INT8 is post-training, calibrated on noise, which changes accuracy and not speed."
)


@dataclass(frozen=True)
class Peer:
    """A net with its published top-1."""

    model: str
    family: str
    top1: float
    source: str

    @property
    def spec(self) -> str:
        """What is timed: ours fused."""
        return f"{self.model}:compact" if self.family in ("WBMM", "UniRepLKNet") else self.model


def peers() -> dict[str, Peer]:
    """Ours and UniRepLKNet from the paper's table, the others from `published.csv`."""
    found = {}
    for row in load_tables()["imagenet"].rows:
        if not row.large_kernel:
            family = "WBMM" if row.model.startswith("wbmm") else "UniRepLKNet"
            found[row.model] = Peer(row.model, family, float(row.paper["top1"]), "the WBMM paper")
    text = resources.files("wbmm.bench").joinpath("published.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        found[row["model"]] = Peer(row["model"], row["family"], float(row["top1"]), row["source"])
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(peers())
    parser.add_argument("models", nargs="*", metavar="NAME", help=f"of {known} (default: all, and a few in INT8)")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--px", type=int, default=224, help="for a trial; top-1 is of 224 (default: 224)")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="3 rounds")
    add_log_arguments(parser)
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if min(args.batch, args.px, args.rounds) < 1:
        raise ValueError(f"--batch {args.batch}, --px {args.px}, --rounds {args.rounds}: each must be at least 1")
    known = peers()
    for name in args.models:
        if name not in known:
            raise ValueError(f"{name!r} has no published top-1 here: expected some of {', '.join(known)}")
    if args.out is not None:
        check_out(args.out, "peers")
    argv = typed_argv(add_arguments, args)
    rounds = min(args.rounds, 3) if args.quick else args.rounds
    cells = []
    for precision in args.precisions:
        default = INT8_NETS if precision == "int8" else tuple(known)
        names = list(dict.fromkeys([BASELINE, *(args.models or default)]))
        values = {"precision": precision, "batch": args.batch, "px": args.px}
        nets = [known[name] for name in names]
        cells.append(Cell(values, names, partial(measure, nets, precision, args.batch, args.px, rounds)))
    log = RunLog(args.out, "peers", shlex.join(["wbmm", "bench", "peers", *argv]), "cpu", args.fresh)
    if args.dry_run:
        print(plan_text(cells, log))
        return 0
    entries = run_cells(cells, log, args.budget)
    records = [record for entry in entries for record in _records(entry, known)]
    status = present(args, "peers", records, {"rounds": rounds, "px": args.px}, argv, NOTE)
    if args.out is not None:
        for precision in args.precisions:
            chart = draw(records, precision)
            if chart is not None:
                write_text(args.out / f"peers-{precision}.svg", chart.svg(standalone=True) + "\n")
    return status


def measure(nets: Sequence[Peer], precision: str, batch: int, px: int, rounds: int) -> dict[str, Result]:
    """All nets in turn."""
    setting = Setting(dtype="float32" if precision == "int8" else precision)
    images = torch.randn(batch, 3, px, px)
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        calls = {}
        for net in nets:
            split(net.spec)
            make = partial(_int8_call, Path(folder)) if precision == "int8" else partial(_eager_call, setting)
            calls[net.model] = make(net, images)
        pause = PAUSE_S if precision == "int8" else 0.0
        timings = setting.time(calls, f"{PRECISIONS[precision]}, rounds", rounds, pause=pause)
    return {name: {"seconds": list(timing.seconds)} for name, timing in timings.items()}


def _eager_call(setting: Setting, net: Peer, images: torch.Tensor) -> Callable[[], object]:
    model = build(net.spec, setting, tuple(images.shape[2:]))
    return partial(setting.forward, model, images_for(net.spec, images, setting))


def _int8_call(folder: Path, net: Peer, images: torch.Tensor) -> Callable[[], object]:
    """Through an INT8 file of OpenVINO."""
    model, size = open_named(net.model), tuple(images.shape[2:])
    model = fused_with_card(model) if net.family in ("WBMM", "UniRepLKNet") else model
    with torch.inference_mode(False):
        path = converted_file(model, "openvino", "int8", size, folder / net.model)
    return partial(open_runner(path), images)


def _records(entry: Entry, known: dict[str, Peer]) -> list[Record]:
    found, base = [], entry.timing(BASELINE)
    for name in entry.results:
        peer, cell = known[name], entry.cell
        record = speed_record(name, cell["batch"], entry.timing(name), base)
        record |= {"numbers": PRECISIONS[cell["precision"]], "precision": cell["precision"], "family": peer.family}
        found.append(record | {"top1": peer.top1, "top1_source": peer.source})
    return found


def _short(row: Record) -> str:
    """T of wbmm_t, tiny of convnext_tiny; nothing for the others, or labels would cover each other."""
    end = str(row["model"]).rsplit("_", 1)[1]
    return {"WBMM": end.upper(), "ConvNeXt": end}.get(str(row["family"]), "")


def draw(records: Sequence[Record], precision: str) -> Chart | None:
    """Top-1 against images a second, a curve for each family; None if nothing was measured in that precision."""
    rows = [record for record in records if record["precision"] == precision]
    if not rows:
        return None
    series = []
    for family in dict.fromkeys(str(row["family"]) for row in rows):
        points = [
            Point(
                float(row["images_per_s"]),
                float(row["top1"]),
                note=f"{row['model']}, {row['top1']} %",
                label=_short(row),
            )
            for row in sorted(rows, key=lambda row: float(row["top1"]))
            if row["family"] == family
        ]
        series.append(Series(family, points, COLOURS[family], mark="circle" if family == "WBMM" else "square"))
    title = f"{PRECISIONS[precision]}, batch {rows[0]['batch']}, CPU"
    ticks = [76, 78, 80, 82, 84]
    x, y = Axis("images/s, measured"), Axis("ImageNet top-1 %, published", ticks=ticks)
    return Chart(f"peers-{precision}", title, x, y, series)

"""What `wbmm bench model` and `wbmm bench train` share: which models take turns, in which cells, and their figures.

Models are named one by one, or by a preset of the paper: WBMM against UniRepLKNet, size by size. A preset answers two
questions. *Reference* against *reference*: both nets as one would write them first, which is what the paper measured.
*Ours* against *ours*: both nets with every fast path of this package.
"""

import argparse
import csv
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

import torch

from wbmm.handler import is_out_of_memory
from wbmm.text import first_line
from wbmm.timing import Timing

from .operators import LAYOUTS
from .results import (
    Cell,
    Entry,
    Record,
    Result,
    RunLog,
    add_log_arguments,
    check_out,
    plan_text,
    present,
    run_cells,
    speed_record,
    typed_argv,
)
from .setting import LKA, Setting, add_setting_arguments, layout_of, split, why_not

__all__ = [
    "Contest",
    "Job",
    "add_paper_figures",
    "add_speed_arguments",
    "check_numbers",
    "contests",
    "net_of",
    "paper_model_speeds",
    "run_speed",
    "time_each",
]

SIZES = ("p", "n", "t", "s")
QUICK = {"sizes": ["p", "t"], "px": [224], "rounds": 5}
NETS = {"wbmm": "W", "unireplknet": "UN"}


@dataclass(frozen=True)
class Contest:
    """Models that take turns.

    Attributes:
        size: p, n, t or s in a preset; empty otherwise.
        over: each model, and the model that its ratio is to.
    """

    size: str
    over: dict[str, str]


@dataclass(frozen=True)
class Job:
    """One cell: these models on a batch of images of a size."""

    specs: Sequence[str]
    batch: int
    size: tuple[int, int]
    args: argparse.Namespace
    setting: Setting


def add_speed_arguments(
    parser: argparse.ArgumentParser, models: Sequence[str], forms: Sequence[str], presets: Sequence[str]
) -> None:
    parser.add_argument(
        "models",
        nargs="*",
        metavar="NAME[:FORM]",
        help=f"forms: {', '.join(forms)} (default: {' '.join(models)})",
    )
    parser.add_argument("--preset", choices=presets, help="the paper's table; models by name stand beside it")
    parser.add_argument("--sizes", nargs="+", choices=(*SIZES, "b"), help="of a preset (default: p n t s)")
    parser.add_argument("--px", type=int, nargs="+", help="sides of square images, in place of --size")
    parser.add_argument("--baseline", default="convnext_tiny", help="ratios are to this model (default: convnext_tiny)")
    parser.add_argument("--batch", type=int, nargs="+")
    parser.add_argument("--size", type=int, nargs=2, default=(224, 224), metavar=("H", "W"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of rest before each call (default: 0)")
    parser.add_argument("--compile", action="store_true", help="torch.compile each model; compiling is not timed")
    parser.add_argument(
        "--layout",
        choices=("own", "best", *LAYOUTS),
        help="memory format; own: NCHW for the reference implementation, channels-last for all others; best: each "
        "model in the faster one (default: best on CUDA, own on a CPU)",
    )
    parser.add_argument("--quick", action="store_true", help="P and T at 224 px, 5 rounds: minutes on 2 cores")
    add_setting_arguments(parser)
    add_log_arguments(parser)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the log, a table and a CSV; a second call goes on")


def check_numbers(args: argparse.Namespace) -> None:
    numbers = [*(args.batch or ()), *(args.px or ()), args.rounds, *args.size]
    if min(numbers) < 1 or args.pause < 0:
        raise ValueError(
            f"--batch {args.batch}, --size {tuple(args.size)}, --px {args.px}, --rounds {args.rounds}, --pause "
            f"{args.pause}: expected at least 1, and no pause below 0"
        )
    if args.sizes and not args.preset:
        raise ValueError("--sizes is for a preset: say --preset paper as well")
    if args.models and args.preset == "edge":
        raise ValueError(f"--preset edge names its models itself; leave {args.models[0]!r} out")


def contests(
    args: argparse.Namespace, default: Sequence[str], forms: tuple[str, ...], pair: Sequence[str]
) -> list[Contest]:
    """Who takes turns with whom; an error before anything is built.

    Args:
        default: models without a preset.
        forms: that may be asked for.
        pair: the forms of a preset, reference first.
    """
    if args.preset is None:
        specs = list(dict.fromkeys([args.baseline, *(args.models or default)]))
        for spec in specs:
            split(spec, forms)
        return [Contest("", dict.fromkeys(specs, args.baseline))]
    found, beside = [], [spec for spec in args.models if split(spec, forms)]
    for size in args.sizes or (QUICK["sizes"] if args.quick else SIZES):
        over = {}
        for form in pair:
            other = f"unireplknet_{size}:{form}"
            over |= dict.fromkeys((f"wbmm_{size}:{form}", other, f"{other}{LKA}"), other)
        found.append(Contest(size, over | dict.fromkeys(beside, f"unireplknet_{size}:{pair[-1]}")))
    return found


Measure = Callable[[Job], dict[str, Result]]
Call = Callable[[], object]


def run_speed(
    args: argparse.Namespace,
    bench: str,
    groups: Sequence[Contest],
    batches: Sequence[int],
    measure: Measure,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    note: str,
    finish: Callable[[Record, Contest, Entry], None] = lambda record, contest, entry: None,
) -> int:
    """Measures every contest at every size and batch, cell by cell, and presents what was found.

    Args:
        bench: name of the log.
        note: what the figures mean.
        finish: adds to a record what is particular to a benchmark.
    """
    setting = Setting.from_args(args)
    if args.out is not None:
        check_out(args.out, bench)
    argv = typed_argv(add_arguments, args)
    args.rounds = min(args.rounds, QUICK["rounds"]) if args.quick else args.rounds
    args.layout = args.layout or ("best" if setting.on_cuda else "own")
    px = args.px or (QUICK["px"] if args.quick and args.preset else None)
    sizes = [(side, side) for side in px] if px else [tuple(args.size)]
    cells = [
        _cell(contest, Job(list(contest.over), batch, size, args, setting), measure)
        for contest in groups
        for size in sizes
        for batch in batches
    ]
    cells.sort(key=lambda cell: cell.work)
    log = RunLog(args.out, bench, shlex.join(["wbmm", "bench", bench, *argv]), args.device, args.fresh)
    if args.dry_run:
        print(plan_text(cells, log))
        return 0
    entries, owners = run_cells(cells, log, args.budget), {contest.size: contest for contest in groups}
    records = [record for entry in entries for record in _records(entry, owners[entry.cell["size"]], finish)]
    columns = {"rounds": args.rounds, "compiled": args.compile, **setting.columns()}
    text = f"{'compiled' if args.compile else 'eager'}, {setting.describe()}; {note}".strip()
    missing = {n: r["why_not"] for entry in entries for n, r in entry.results.items() if "why_not" in r}
    text += "".join(f" {name}: {why}." for name, why in missing.items()) + _limits_text(entries)
    return present(args, bench, records, columns, argv, text)


def _limits_text(entries: Sequence[Entry]) -> str:
    """The fastest product of each cell that measured some."""
    text = ""
    for entry in entries:
        found = entry.results.get("limit")
        if found is not None:
            rows, inputs, outputs = found["shape"]
            where = f"Limit at {entry.cell['height']}x{entry.cell['width']}, batch {entry.cell['batch']}"
            text += f" {where}: {found['gmacs_per_s']:.1f} GMAC/s ({rows}x{inputs} by {inputs}x{outputs})."
    return text


def _cell(contest: Contest, job: Job, measure: Measure) -> Cell:
    setting = job.setting.columns()
    values = {"size": contest.size, "height": job.size[0], "width": job.size[1], "batch": job.batch, **setting}
    values |= {"layout": job.args.layout, "compiled": job.args.compile}
    weight = {"": 1, "p": 1.5, "n": 2.7, "t": 4.8, "s": 9, "b": 16}[contest.size]
    names = [*job.specs, *(("limit",) if getattr(job.args, "limit", False) else ())]
    return Cell(values, names, partial(measure, job), weight * job.batch * job.size[0] * job.size[1])


def time_each(
    job: Job,
    prepare: Callable[[str, torch.memory_format], Call],
    warmup: int = 2,
    extra: Callable[[], dict[object, Call]] = dict,
) -> tuple[dict[str, Result], dict[object, Timing]]:
    """Times the models of a job in turn, each in its layout or in the faster one.

    Args:
        prepare: makes the call of a model in a memory format. What needs more memory than there is, is left out.
        extra: further calls, asked for when the models are ready; they take turns with them.

    Returns:
        A result for each model, and the timings of the extra calls.
    """
    found: dict[str, Result] = {}
    calls: dict[tuple[str, str], Call] = {}
    for spec in job.specs:
        reason = why_not(spec, job.setting)
        if reason is not None:
            found[spec] = {"why_not": reason}
            continue
        for layout in _layouts(spec, job.args.layout):
            try:
                call = prepare(spec, LAYOUTS[layout])
                with job.setting.running():
                    call()
                calls[spec, layout] = call
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                found[spec] = {"why_not": f"out of memory: {first_line(error)[:200]}"}
    more, label = extra(), f"{job.size[0]}x{job.size[1]}, batch {job.batch}, rounds"
    timings = job.setting.time({**calls, **more}, label, job.args.rounds, warmup=warmup, pause=job.args.pause)
    best: dict[str, float] = {}
    for spec, layout in calls:
        timing = timings[spec, layout]
        if timing.median < best.get(spec, math.inf):
            best[spec] = timing.median
            found[spec] = {"seconds": list(timing.seconds), "layout": layout}
    return found, {key: timings[key] for key in more}


def _layouts(spec: str, asked: str) -> list[str]:
    if asked == "best":
        return list(LAYOUTS)
    if asked == "own":
        return [next(name for name, layout in LAYOUTS.items() if layout is layout_of(spec))]
    return [asked]


def _records(entry: Entry, contest: Contest, finish: Callable[[Record, Contest, Entry], None]) -> list[Record]:
    records = []
    for spec, other in contest.over.items():
        timing, base = entry.timing(spec), entry.timing(other)
        if timing is None or base is None:
            continue
        record = speed_record(spec, entry.cell["batch"], timing, base)
        height, width = entry.cell["height"], entry.cell["width"]
        record |= {"image": f"{height}x{width}", "height": height, "width": width, "size": contest.size}
        record |= {"over": other, "layout": entry.results[spec]["layout"]}
        for key in ("gmacs", "peak_mb"):
            if key in entry.results[spec]:
                record[key] = entry.results[spec][key]
        finish(record, contest, entry)
        records.append(record)
    return records


def paper_model_speeds(table: str) -> dict[tuple[str, str, str, int, int], float]:
    """The paper's images a second by (machine, size, net, px, batch); `table` is desktop or edge."""
    text = resources.files("wbmm.bench").joinpath("paper_models.csv").read_text(encoding="utf-8")
    return {
        (row["machine"], row["size"], row["net"], int(row["px"]), int(row["batch"])): float(row["images_per_s"])
        for row in csv.DictReader(text.splitlines())
        if row["table"] == table
    }


def net_of(spec: str) -> str | None:
    """W, UN or UA, as the paper names them."""
    net = NETS.get(split(spec)[0].rsplit("_", 1)[0])
    return "UA" if net == "UN" and spec.endswith(LKA) else net


def add_paper_figures(record: Record, contest: Contest, machine: str) -> None:
    """Images a second of the same net, image and batch in the paper, and their ratio."""
    if not contest.size or record["height"] != record["width"]:
        return
    paper, at = paper_model_speeds("desktop"), (record["height"], record["batch"])
    own, other = (paper.get((machine, contest.size, net_of(spec), *at)) for spec in (record["model"], record["over"]))
    if own and other:
        record |= {"paper_images_per_s": own, "paper_ratio": own / other}

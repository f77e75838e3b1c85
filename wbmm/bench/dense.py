"""What `wbmm bench seg` and `wbmm bench det` share: whole nets on one backbone after another, timed cell by cell."""

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.nn as nn

from wbmm.handler import is_out_of_memory
from wbmm.layers.depthwise import find_implicit_gemm
from wbmm.text import first_line

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
from .setting import Setting, add_setting_arguments

__all__ = ["BACKBONES", "LKA_BACKBONE", "add_dense_arguments", "configuration", "run_dense"]

LKA_BACKBONE = "unireplknet-lka"
# Where the name of a configuration begins, {} being t or s, and what is changed in its backbone.
BACKBONES = {
    "conv3x3": ("wbmm-{}-dense", {"mixer": "dw3"}),
    "conv5x5": ("wbmm-{}-dense", {"mixer": "dw5"}),
    "unireplknet": ("unireplknet-{}", {}),
    LKA_BACKBONE: ("unireplknet-{}", {"large_kernel": "implicit_gemm"}),
    "7x7": ("wbmm-{}-dense", {}),
    "hier": ("wbmm-{}-hier", {}),
}
Build = Callable[[str, str], nn.Module]


def add_dense_arguments(
    parser: argparse.ArgumentParser, models: list[str], backbones: list[str], sizes: list[str], batch: list[int]
) -> None:
    parser.add_argument("--models", nargs="+", choices=("t", "s"), default=models, help="Tiny, Small")
    parser.add_argument("--backbones", nargs="+", choices=BACKBONES, default=backbones)
    parser.add_argument("--sizes", nargs="+", default=sizes, metavar="HxW", help=f"default: {' '.join(sizes)}")
    parser.add_argument("--batch", type=int, nargs="+", default=batch, help=f"default: {' '.join(map(str, batch))}")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="the first size and batch alone, 3 rounds")
    parser.add_argument(
        "--layout", choices=("best", *LAYOUTS), help="memory format (default: best on CUDA, channels_last on a CPU)"
    )
    add_setting_arguments(parser)
    add_log_arguments(parser)
    parser.add_argument("--cost", action="store_true", help="parameters and FLOPs alone, nothing is timed")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the log, a table and a CSV; a second call goes on")


def configuration(path: str, name: str, letter: str):
    """The configuration of a segmentor or detector on one of `BACKBONES`, for a single process.

    Args:
        path: of its file, with {} for the backbone.
        name: the backbone.
        letter: t or s.
    """
    from wbmm.mm.networks import load_mm_config

    stem, changes = BACKBONES[name]
    changes = {"sync_bn": False, **changes}
    return load_mm_config(
        path.format(stem.format(letter)), {f"model.backbone.{key}": value for key, value in changes.items()}
    )


def read_size(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--sizes {text}: expected HxW, such as 512x1024")
    return int(parts[0]), int(parts[1])


def check(args: argparse.Namespace) -> list[tuple[int, int]]:
    """The sizes; an error if a number makes no sense."""
    if min(*args.batch, args.rounds) < 1:
        raise ValueError(f"--batch {args.batch}, --rounds {args.rounds}: each must be at least 1")
    return [read_size(text) for text in args.sizes]


def run_dense(
    args: argparse.Namespace,
    bench: str,
    build: Build,
    baseline: str,
    paper: Mapping[tuple, float],
    note: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
) -> int:
    """Times every backbone at every size and batch.

    Args:
        build: a fused net of a backbone and a letter.
        baseline: the backbone that ratios are to.
        paper: images a second by (letter, backbone, height, width, batch).
    """
    sizes, setting = check(args), Setting.from_args(args)
    if args.out is not None:
        check_out(args.out, bench)
    argv = typed_argv(add_arguments, args)
    layout = args.layout or ("best" if setting.on_cuda else "channels_last")
    layouts = list(LAYOUTS) if layout == "best" else [layout]
    names = [name for name in BACKBONES if name in args.backbones or name == baseline]
    rounds, batches = args.rounds, args.batch
    if args.quick:
        sizes, batches, rounds = sizes[:1], batches[:1], min(rounds, 3)
    make = lru_cache(maxsize=len(names) * len(layouts))(partial(_place, build, setting))
    cells = [
        Cell(
            {
                "size": letter,
                "height": size[0],
                "width": size[1],
                "batch": batch,
                **setting.columns(),
                "layout": layout,
            },
            names,
            partial(measure, make, names, letter, size, batch, rounds, layouts, setting),
            batch * size[0] * size[1] * {"t": 1, "s": 1.1}[letter],
        )
        for letter in args.models
        for size in sizes
        for batch in batches
    ]
    log = RunLog(args.out, bench, shlex.join(["wbmm", "bench", bench, *argv]), args.device, args.fresh)
    if args.dry_run:
        print(plan_text(cells, log))
        return 0
    entries = run_cells(sorted(cells, key=lambda cell: cell.work), log, args.budget)
    records = [record for entry in entries for record in _records(entry, baseline, paper)]
    missing = {n: r["why_not"] for entry in entries for n, r in entry.results.items() if "why_not" in r}
    text = f"{note}, {setting.describe()}, layout {layout}; ratios to {baseline} in the same interleaved run."
    text += "".join(f" {name}: {why}." for name, why in missing.items())
    return present(args, bench, records, {"rounds": rounds, **setting.columns()}, argv, text, "backbone")


def _place(build: Build, setting: Setting, name: str, letter: str, layout: str) -> nn.Module:
    return setting.place(build(name, letter), LAYOUTS[layout])


def measure(
    make: Callable[[str, str, str], nn.Module],
    names: Sequence[str],
    letter: str,
    size: tuple[int, int],
    batch: int,
    rounds: int,
    layouts: Sequence[str],
    setting: Setting,
) -> dict[str, Result]:
    """Interleaved forward passes at one size and batch size, each backbone in the faster of the layouts."""
    found: dict[str, Result] = {}
    calls = {}
    images = {layout: setting.place(torch.randn(batch, 3, *size), LAYOUTS[layout]) for layout in layouts}
    with torch.inference_mode():
        for name in names:
            if name == LKA_BACKBONE and (not setting.on_cuda or find_implicit_gemm() is None):
                found[name] = {"why_not": "the large-kernel CUDA package is not installed, or there is no CUDA device"}
                continue
            for layout in layouts:
                try:
                    call = partial(setting.forward, make(name, letter, layout), images[layout])
                    with setting.running():
                        call()
                    calls[name, layout] = call
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    found[name] = {"why_not": f"out of memory: {first_line(error)[:200]}"}
        label = f"{letter.upper()}, {size[0]}x{size[1]}, batch {batch}, rounds"
        timings = setting.time(calls, label, rounds, warmup=1)
    for (name, layout), timing in sorted(timings.items(), key=lambda item: -item[1].median):
        found[name] = {"seconds": list(timing.seconds), "layout": layout}  # the fastest comes last
    return found


def _records(entry: Entry, baseline: str, paper: Mapping[tuple, float]) -> list[Record]:
    cell, records = entry.cell, []
    base = entry.timing(baseline)
    for name in BACKBONES:
        timing = entry.timing(name)
        if timing is None or base is None:
            continue
        record = speed_record(f"{name}, {cell['size'].upper()}", cell["batch"], timing, base)
        record |= {"image": f"{cell['height']}x{cell['width']}", "size": cell["size"], "backbone": name}
        record["layout"] = entry.results[name]["layout"]
        at = cell["height"], cell["width"], cell["batch"]
        own, other = (paper.get((cell["size"], backbone, *at)) for backbone in (name, baseline))
        if own and other:
            record |= {"paper_images_per_s": own, "paper_ratio": own / other}
        records.append(record)
    return records

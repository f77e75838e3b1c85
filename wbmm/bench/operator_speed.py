"""`wbmm bench op`: the operator alone against depthwise convolutions, as in the paper's operator table.

Every cell is one batch size and one map size. All operators of a cell take turns in every round, and each cell is
measured in several independent runs. Results are appended to a file as they come, so a run that was stopped continues
where it was.
"""

import argparse
import json
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from wbmm.handler import is_out_of_memory
from wbmm.io.atomic import write_text
from wbmm.machine import PRECISIONS, check_device, machine_facts, measured_line, set_precision
from wbmm.text import first_line, render_table
from wbmm.timing import time_interleaved

from .operators import BASELINE, DTYPES, LAYOUTS, MODES, Case, Operator, operators, paper_figures
from .results import to_csv

__all__ = ["append", "measure", "plan", "read_log", "records", "run"]

EXAMPLE = "wbmm bench op --quick --out results/op"
CHANNELS = 256
BATCHES, MAPS = (4, 16, 64, 128, 256), (7, 14, 28, 56, 112, 224)
QUICK_BATCHES, QUICK_MAPS, QUICK_RUNS = (4, 16), (7, 14, 28, 56), 3
LOG, NONE = "op.jsonl", "--"
LEAST_S = 0.02  # an operator that takes less is called several times in a row

Measured = dict[Case, dict[str, list[float] | str]]  # seconds a call in each run, or why it did not run
Record = dict[str, object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, nargs="+", help=f"default: {' '.join(map(str, BATCHES))}")
    parser.add_argument("--map", type=int, nargs="+", help=f"sides of the maps; default: {' '.join(map(str, MAPS))}")
    parser.add_argument("--channels", type=int, default=CHANNELS)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=["nchw"])
    parser.add_argument("--mode", nargs="+", choices=MODES, default=["forward"], help="training: forward and backward")
    parser.add_argument("--precision", choices=PRECISIONS, default="tf32", help="of float32 on a GPU (default: tf32)")
    parser.add_argument("--compile", action="store_true", help="compiled rows as well")
    parser.add_argument("--runs", type=int, default=5, help="independent runs of each cell (default: 5)")
    parser.add_argument("--rounds", type=int, default=10, help="of each run (default: 10)")
    parser.add_argument("--quick", action="store_true", help="small batches and maps, 3 runs: minutes on 2 cores")
    parser.add_argument("--budget", type=float, metavar="MINUTES", help="start no cell after this time")
    parser.add_argument("--dry-run", action="store_true", help="what would run and how much memory it needs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"where {LOG}, op.csv and op.md go; a second call goes on"
    )
    parser.add_argument("--markdown", action="store_true")


def run(args: argparse.Namespace) -> int:
    _check(args)
    set_precision(args.precision)
    cases, rows = plan(args), operators(args.compile)
    if args.dry_run:
        print(render_table(("cell", "operators", "most memory, GB"), [_planned(case, rows) for case in cases]))
        return 0
    log = None if args.out is None else args.out / LOG
    done = {} if log is None else read_log(log)
    started = time.monotonic()
    measured = {}
    for number, case in enumerate(cases, 1):
        seconds = done.get(case, {})
        todo = [row for row in rows if row.name not in seconds]
        if todo and args.budget is not None and time.monotonic() - started > 60 * args.budget:
            print(f"--budget {args.budget:g}: {len(cases) - number + 1} cells were left out", file=sys.stderr)
            break
        if todo:
            print(f"{number}/{len(cases)}: {_describe(case)}", file=sys.stderr, flush=True)
            new = measure(case, todo, args.runs, args.rounds)
            seconds = {**seconds, **new}
            if log is not None:
                append(log, case, new)
        measured[case] = seconds
    return _present(args, measured, rows)


def _check(args: argparse.Namespace) -> None:
    if args.quick:
        args.batch, args.map = args.batch or list(QUICK_BATCHES), args.map or list(QUICK_MAPS)
        args.runs = min(args.runs, QUICK_RUNS)
    args.batch, args.map = args.batch or list(BATCHES), args.map or list(MAPS)
    for name in ("channels", "runs", "rounds"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: expected at least 1")
    for name in ("batch", "map"):
        if min(getattr(args, name)) < 1:
            raise ValueError(f"--{name} {min(getattr(args, name))}: expected at least 1")
    check_device(args.device)
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out}: it is a file; expected a folder")


def plan(args: argparse.Namespace) -> list[Case]:
    """The cells in the order in which they run: small ones first, so that a short budget fills most of the table."""
    cases = [
        Case(batch, side, args.channels, dtype, layout, mode, args.device)
        for dtype in args.dtype
        for layout in args.layout
        for mode in args.mode
        for batch in args.batch
        for side in args.map
    ]
    return sorted(cases, key=Case.bytes)


def _describe(case: Case) -> str:
    what = MODES[case.mode]
    return f"batch {case.batch}, {case.map}x{case.map}, {case.dtype}, {case.layout}, {what}"


def memory(case: Case, row: Operator) -> int:
    """Bytes that a call needs: the map and its result, their gradients in training, and what the operator adds."""
    return (4 if case.mode == "training" else 2) * case.bytes() + row.extra_bytes(case)


def _planned(case: Case, rows: list[Operator]) -> list[str]:
    able = [row for row in rows if row.why_not(case) is None]
    return [_describe(case), str(len(able)), f"{max(memory(case, row) for row in able) / 1e9:.2f}"]


def measure(case: Case, rows: list[Operator], runs: int, rounds: int) -> dict[str, list[float] | str]:
    """Seconds a call of each operator in each run; a sentence for one that cannot run here."""
    result: dict[str, list[float] | str] = {}
    able = []
    for row in rows:
        why = row.why_not(case)
        if why is None and case.device == "cpu" and memory(case, row) > _free_memory():
            why = f"out of memory: {memory(case, row) / 1e9:.1f} GB"
        if why is None:
            able.append(row)
        else:
            result[row.name] = why
    for _ in range(runs):
        calls, repeats = {}, {}
        for row in able:
            try:
                calls[row.name], repeats[row.name] = _prepare(case, row)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                result[row.name] = f"out of memory: {first_line(error)[:200]}"
        able = [row for row in able if row.name in calls]
        timings = time_interleaved(calls, rounds=rounds, warmup=1, device=case.device)
        for name, timing in timings.items():
            result.setdefault(name, []).append(timing.median / repeats[name])
    return result


def _prepare(case: Case, row: Operator) -> tuple[Callable[[], None], int]:
    """A call for the clock, and how often it calls the operator: once, or more often for a very fast one."""
    x, weights = case.images(), row.weights(case)
    weights = [weight.requires_grad_(case.mode == "training") for weight in weights]

    def once() -> None:
        if case.mode == "training":
            out = row.call(x, weights)
            torch.autograd.grad(out, [x, *weights], torch.ones_like(out))
        else:
            with torch.no_grad():
                row.call(x, weights)

    once()  # kept matrices, compilation
    seconds = time_interleaved({"": once}, rounds=2, warmup=1, device=case.device)[""].best
    repeats = min(1000, max(1, round(LEAST_S / max(seconds, 1e-7))))
    return (lambda: [once() for _ in range(repeats)]), repeats


def _free_memory() -> int:
    """Bytes that can be taken without swapping; no limit where the system does not tell."""
    info = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text()) if info.is_file() else None
    return int(found[1]) * 1024 if found else sys.maxsize


def append(log: Path, case: Case, measured: dict[str, list[float] | str]) -> None:
    """Adds what a cell gave, one line for each operator."""
    log.parent.mkdir(parents=True, exist_ok=True)
    cut_off = log.is_file() and not log.read_bytes().endswith(b"\n")  # a kill in the middle of a line
    with open(log, "a", encoding="utf-8") as file:
        file.write("\n" if cut_off and log.stat().st_size else "")
        for name, value in measured.items():
            file.write(json.dumps({**asdict(case), "operator": name, "seconds": value}) + "\n")


def read_log(log: Path) -> Measured:
    """What was measured before; a line that was cut off by a kill is left out, and its operator measured again."""
    found: Measured = {}
    if not log.is_file():
        return found
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
            name, seconds = values.pop("operator"), values.pop("seconds")
            found.setdefault(Case(**values), {})[name] = seconds
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
            continue
    return found


def records(measured: Measured, rows: list[Operator]) -> list[Record]:
    """A row for each operator and cell: images a second, their spread over the runs, the ratio, and the paper's."""
    paper, result = paper_figures(), []
    for case, seconds in measured.items():
        speed = {name: case.batch / statistics.median(s) for name, s in seconds.items() if isinstance(s, list)}
        for row in rows:
            value = seconds.get(row.name)
            record: Record = {"model": row.name, **asdict(case)}
            if isinstance(value, list):
                record |= {
                    "images_per_s": speed[row.name],
                    "low": case.batch / max(value),
                    "high": case.batch / min(value),
                }
                if BASELINE in speed:
                    record["ratio"] = speed[row.name] / speed[BASELINE]
            else:
                record["why_not"] = value
            key = (row.method, row.size, case.batch, case.map)
            base = ("DW-Std", 5, case.batch, case.map)
            if not row.suffix and case.mode == "forward" and key in paper and base in paper:
                record |= {"paper_images_per_s": paper[key], "paper_ratio": paper[key] / paper[base]}
            result.append(record)
    return result


def table_text(measured: list[Record], markdown: bool = False) -> str:
    """One table for each batch size, type, layout and mode: operators down, maps across, images/s and the ratio."""
    parts = []
    keys = ("batch", "dtype", "layout", "mode", "channels", "device")
    for group in dict.fromkeys(tuple(record[key] for key in keys) for record in measured):
        cells = [record for record in measured if tuple(record[key] for key in keys) == group]
        sides = sorted({record["map"] for record in cells})
        names = list(dict.fromkeys(record["model"] for record in cells))
        by = {(record["model"], record["map"]): record for record in cells}
        lines = [[name, *(_cell(by.get((name, side), {})) for side in sides)] for name in names]
        batch, dtype, layout, mode, *_ = group
        what = MODES[mode]
        title = f"Batch {batch}, {dtype}, {layout}, {what}: images/s (ratio to {BASELINE})"
        parts.append(f"{title}\n\n{render_table(('operator', *(f'{s}x{s}' for s in sides)), lines, markdown=markdown)}")
    return "\n\n".join(parts)


def _cell(record: Record) -> str:
    if "images_per_s" not in record:
        return NONE
    ratio = f" ({record['ratio']:.2f}x)" if "ratio" in record else ""
    return f"{record['images_per_s']:.4g}{ratio}"


def _present(args: argparse.Namespace, measured: Measured, rows: list[Operator]) -> int:
    found = records(measured, rows)
    print(table_text(found, args.markdown))
    facts = machine_facts(args.device)
    note = (
        f"{args.channels} channels, {args.runs} runs of {args.rounds} rounds, medians; float32 products on a GPU: "
        f"{args.precision}. WBMM-C and WBMM-NC are the paper's operator, a batched product, with the matrix kept and "
        "made anew; WBMM (backend) is the same operator as this package computes it."
    )
    print(f"\n{note}\n{measured_line(facts)}")
    for name, why in _left_out(measured).items():
        print(f"{NONE} {name}: {why}")
    if args.out is not None:
        page = f"# wbmm bench op\n\n{table_text(found, markdown=True)}\n\n{note}\n\n{measured_line(facts)}\n"
        write_text(args.out / "op.md", f"{page}\n```sh\n{_command(args)}\n```\n")
        write_text(args.out / "op.csv", to_csv([record | facts for record in found]))
        print(f"written to {args.out}: {LOG}, op.csv, op.md")
    return 0


def _command(args: argparse.Namespace) -> str:
    """What was typed, with defaults written out."""
    lists = {name: map(str, getattr(args, name)) for name in ("batch", "map", "dtype", "layout", "mode")}
    words = [word for name, values in lists.items() for word in (f"--{name}", *values)]
    words += [f"--{name}={getattr(args, name)}" for name in ("channels", "runs", "rounds", "precision", "device")]
    return shlex.join(["wbmm", "bench", "op", *words, *(["--compile"] if args.compile else [])])


def _left_out(measured: Measured) -> dict[str, str]:
    """Operators that ran in no cell, and the reason that the last one gave."""
    reasons: dict[str, str] = {}
    ran = {name for cell in measured.values() for name, value in cell.items() if isinstance(value, list)}
    for cell in measured.values():
        reasons |= {name: value for name, value in cell.items() if isinstance(value, str) and name not in ran}
    return reasons

"""`wbmm bench op`: the operator alone against depthwise convolutions, as in the paper's operator table.

Every cell is one batch size and one map size. All operators of a cell take turns in every round, and each cell is
measured in several independent runs. The machine's limits, a product and a copy, are measured in the same run. Results
are appended to a file as they come, so a run that was stopped continues where it was.
"""

import argparse
import csv
import math
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from wbmm import ops
from wbmm.handler import is_out_of_memory
from wbmm.io.atomic import write_text
from wbmm.layers.depthwise import find_implicit_gemm, large_kernel_conv2d
from wbmm.machine import PRECISIONS, available_memory, check_device, machine_facts, measured_line, set_precision
from wbmm.ops import Kept, num_offsets, reference, use_backend
from wbmm.ops.backends import Backend, Call
from wbmm.text import first_line, render_table
from wbmm.timing import time_interleaved

from .limit import LIMITS, measure_limits
from .results import Cell, Entry, Record, Result, RunLog, add_log_arguments, plan_text, run_cells, to_csv
from .setting import DTYPES, Setting, dtype_name

__all__ = [
    "BASELINE",
    "DTYPES",
    "LAYOUTS",
    "MODES",
    "Case",
    "Operator",
    "measure",
    "operators",
    "paper_figures",
    "plan",
    "records",
    "run",
]

KERNELS, LKA_KERNELS, WINDOWS = (3, 5, 7, 13, 27), (7, 13, 27), (7, 14)
BASELINE = "DW-Std 5x5"
LAYOUTS = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}
MODES = {"forward": "forward", "training": "forward + backward"}


@dataclass(frozen=True)
class Case:
    """One cell and what is the same in it."""

    batch: int
    map: int
    channels: int
    dtype: str
    layout: str
    mode: str
    device: str

    def images(self) -> Tensor:
        x = torch.randn(self.batch, self.channels, self.map, self.map, dtype=DTYPES[self.dtype], device=self.device)
        return x.contiguous(memory_format=LAYOUTS[self.layout]).requires_grad_(self.mode == "training")

    def on_meta(self) -> "Case":
        """The same without memory."""
        return replace(self, device="meta")

    def bytes(self) -> int:
        """Of the input map."""
        return self.batch * self.channels * self.map**2 * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Operator:
    """A row of the table.

    Attributes:
        name: of the row; `method` and `size` are the paper's.
        weights: made for a case.
        call: of the map and the weights.
        why_not: None, or why it cannot run a case.
        extra_bytes: memory that it needs besides the map, its result and their gradients.
        suffix: what tells it from the paper's operator of the same method and size.
    """

    method: str
    size: int
    weights: Callable[[Case], list[Tensor]]
    call: Callable[[Tensor, list[Tensor]], Tensor]
    why_not: Callable[[Case], str | None]
    extra_bytes: Callable[[Case], int]
    suffix: str = ""

    @property
    def name(self) -> str:
        return f"{self.method} {self.size}x{self.size}{self.suffix}"

    def macs(self, case: Case) -> int:
        """Multiply-adds of a forward pass, by definition: each window as a product, each kernel at every position."""
        positions = self.size**2
        if self.method.startswith("WBMM"):
            outputs = (math.ceil(case.map / self.size) * self.size) ** 2
        else:
            outputs = case.map**2
        return case.batch * case.channels * outputs * positions

    def least_bytes(self, case: Case) -> int:
        """What a forward pass has to move at least: the map in, the result out, and the weights once."""
        weights = sum(weight.numel() * weight.itemsize for weight in self.weights(case.on_meta()))
        return 2 * case.bytes() + weights


def operators(compiled: bool = False) -> list[Operator]:
    """Depthwise convolutions, the paper's operator with and without a cached matrix, and our backends of it."""
    rows = [_depthwise(size) for size in KERNELS]
    rows += [_depthwise(size, lka=True) for size in LKA_KERNELS]
    rows += [_product(size, cached=True) for size in WINDOWS]
    rows += [_product(size, cached=False) for size in WINDOWS]
    rows += [_backend(backend, size) for backend in ops.BACKENDS for size in WINDOWS]
    if compiled:
        rows += [_compiled(row) for row in rows if row.method in ("DW-Std", "WBMM-C", "WBMM-NC")]
    return rows


def _depthwise(size: int, lka: bool = False) -> Operator:
    def weights(case: Case) -> list[Tensor]:
        weight = torch.randn(case.channels, 1, size, size, dtype=DTYPES[case.dtype], device=case.device)
        return [weight.contiguous(memory_format=LAYOUTS[case.layout])]

    def call(x: Tensor, weights: list[Tensor]) -> Tensor:
        if lka:
            return large_kernel_conv2d(x, weights[0])
        return F.conv2d(x, weights[0], padding=size // 2, groups=x.shape[1])

    def why_not(case: Case) -> str | None:
        if lka and (not case.device.startswith("cuda") or find_implicit_gemm() is None):
            return "its CUDA package is not installed, or there is no CUDA device"
        return None

    return Operator("DW-LKA" if lka else "DW-Std", size, weights, call, why_not, lambda case: 0)


def _table(case: Case, size: int) -> Tensor:
    return torch.randn(case.channels, num_offsets((size, size)), device=case.device) * 0.02


def _matrix_bytes(case: Case, size: int) -> int:
    return case.channels * size**4 * DTYPES[case.dtype].itemsize


def _larger_than_map(case: Case, size: int) -> str | None:
    return f"a {size}x{size} window is larger than the map" if size > case.map else None


def _product(size: int, cached: bool) -> Operator:
    """The paper's operator, a batched product. Without a cached matrix it is made from the table in every call."""

    def weights(case: Case) -> list[Tensor]:
        table = _table(case, size).to(DTYPES[case.dtype])
        return [ops.expand([table], (size, size))] if cached else [table]

    def call(x: Tensor, weights: list[Tensor]) -> Tensor:
        return reference.windowed(x, weights, (size, size))

    def why_not(case: Case) -> str | None:
        if cached and case.mode == "training":
            return "the cached matrix is for inference"
        return _larger_than_map(case, size)

    def extra_bytes(case: Case) -> int:
        return 2 * case.bytes() + _matrix_bytes(case, size)  # the windows before and after the product, and the matrix

    return Operator("WBMM-C" if cached else "WBMM-NC", size, weights, call, why_not, extra_bytes)


def _backend(backend: Backend, size: int) -> Operator:
    """The same operator by one of our backends, with what it keeps in inference."""
    kept = Kept().eval()

    def call(x: Tensor, weights: list[Tensor]) -> Tensor:
        with use_backend(backend.name):
            return ops.windowed(x, weights, (size, size), kept=kept)

    def why_not(case: Case) -> str | None:
        x = replace(case, batch=1).images().detach().expand(case.batch, -1, -1, -1)  # its shape, without its memory
        table = _table(case, size).to(DTYPES[case.dtype])
        question = Call("windowed", x, (table,), case.mode == "training", (size, size), 1)
        return _larger_than_map(case, size) or backend.can_run(question)

    return Operator(
        "WBMM",
        size,
        lambda case: [_table(case, size).to(DTYPES[case.dtype])],
        call,
        why_not,
        lambda case: 2 * case.bytes(),
        f" ({backend.name})",
    )


def _compiled(row: Operator) -> Operator:
    call = torch.compile(row.call, dynamic=False)
    return Operator(row.method, row.size, row.weights, call, row.why_not, row.extra_bytes, ", compiled")


def paper_figures() -> dict[tuple[str, int, int, int], float]:
    """The paper's images a second on an A800 by (method, size, batch, map)."""
    text = resources.files("wbmm.bench").joinpath("paper_operators.csv").read_text(encoding="utf-8")
    return {
        (row["method"], int(row["size"]), int(row["batch"]), int(row["map"])): float(row["kfps"]) * 1e3
        for row in csv.DictReader(text.splitlines())
    }


EXAMPLE = "wbmm bench op --quick --out results/op"
CHANNELS = 256
BATCHES, MAPS = (4, 16, 64, 128, 256), (7, 14, 28, 56, 112, 224)
QUICK_BATCHES, QUICK_MAPS, QUICK_RUNS, QUICK_ROUNDS = (4, 16), (7, 14, 28, 56), 3, 5
NONE = "--"
LEAST_S = 0.02  # an operator that takes less is called several times in a row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, nargs="+", help=f"default: {' '.join(map(str, BATCHES))}")
    parser.add_argument("--map", type=int, nargs="+", help=f"sides of the maps; default: {' '.join(map(str, MAPS))}")
    parser.add_argument("--channels", type=int, default=CHANNELS)
    parser.add_argument("--dtype", nargs="+", type=dtype_name, choices=DTYPES, default=["float32"])
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=["nchw"])
    parser.add_argument("--mode", nargs="+", choices=MODES, default=["forward"], help="training: forward and backward")
    parser.add_argument("--precision", choices=PRECISIONS, default="tf32", help="of float32 products (default: tf32)")
    parser.add_argument("--compile", action="store_true", help="compiled rows as well")
    parser.add_argument("--runs", type=int, default=5, help="independent runs of each cell (default: 5)")
    parser.add_argument("--rounds", type=int, default=10, help="of each run (default: 10)")
    parser.add_argument(
        "--quick", action="store_true", help="small batches and maps, 3 runs of 5 rounds: minutes on 2 cores"
    )
    add_log_arguments(parser)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where op.jsonl, op.csv and op.md go; a second call goes on"
    )
    parser.add_argument("--markdown", action="store_true")


def run(args: argparse.Namespace) -> int:
    _check(args)
    set_precision(args.precision)
    rows, cases = operators(args.compile), plan(args)
    log = RunLog(args.out, "op", _command(args), args.device, args.fresh)
    cells = [_cell(case, rows, args) for case in cases]
    if args.dry_run:
        needs = {str(cell): _most_memory(case, rows) for cell, case in zip(cells, cases, strict=True)}
        print(plan_text(cells, log, most_memory_GB=lambda cell: needs[str(cell)]))
        return 0
    limits = [_limits_cell(args, dtype) for dtype in args.dtype]
    entries = run_cells([*limits, *cells], log, args.budget)
    return _present(args, [entry for entry in entries if "map" in entry.cell], rows)


def _check(args: argparse.Namespace) -> None:
    if args.quick:
        args.batch, args.map = args.batch or list(QUICK_BATCHES), args.map or list(QUICK_MAPS)
        args.runs, args.rounds = min(args.runs, QUICK_RUNS), min(args.rounds, QUICK_ROUNDS)
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


def _cell(case: Case, rows: list[Operator], args: argparse.Namespace) -> Cell:
    values = {**asdict(case), "precision": args.precision}
    work = sum(row.macs(case) for row in rows)
    return Cell(values, [row.name for row in rows], partial(measure, case, rows, args.runs, args.rounds), work)


def _limits_cell(args: argparse.Namespace, dtype: str) -> Cell:
    setting = Setting(args.device, dtype, precision=args.precision)
    values = {"limits": True, "dtype": dtype, "device": args.device, "precision": args.precision}
    return Cell(values, LIMITS, partial(measure_limits, setting, args.rounds))


def memory(case: Case, row: Operator) -> int:
    """Bytes that a call needs: the map and its result, their gradients in training, and what the operator adds."""
    return (4 if case.mode == "training" else 2) * case.bytes() + row.extra_bytes(case)


def _most_memory(case: Case, rows: list[Operator]) -> str:
    return f"{max(memory(case, row) for row in rows if row.why_not(case) is None) / 1e9:.2f}"


def measure(case: Case, rows: list[Operator], runs: int, rounds: int) -> dict[str, Result]:
    """Seconds a call of each operator in each run; a sentence for one that cannot run here."""
    result: dict[str, Result] = {}
    able = []
    for row in rows:
        why = row.why_not(case)
        if why is None and case.device == "cpu" and memory(case, row) > available_memory():
            why = f"out of memory: {memory(case, row) / 1e9:.1f} GB"
        if why is None:
            able.append(row)
        else:
            result[row.name] = {"why_not": why}
    repeats: dict[str, int] = {}
    for _ in range(runs):
        calls, x = {}, None  # one map for all, or a large cell would hold one for each of them
        for row in able:
            try:
                x = case.images() if x is None else x
                calls[row.name], repeats[row.name] = _prepare(case, row, x, repeats.get(row.name))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                result[row.name] = {"why_not": f"out of memory: {first_line(error)[:200]}"}
        able = [row for row in able if row.name in calls]
        timings = time_interleaved(calls, rounds=rounds, warmup=0, device=case.device)  # they were called before
        for row in able:
            found = result.setdefault(row.name, {"seconds": [], "macs": row.macs(case), "bytes": row.least_bytes(case)})
            found["seconds"].append(timings[row.name].median / repeats[row.name])
    return result


def _prepare(case: Case, row: Operator, x: Tensor, repeats: int | None) -> tuple[Callable[[], None], int]:
    """A call for the clock, and how often it calls the operator: `repeats`, or once, or more often for a fast one."""
    weights = [weight.requires_grad_(case.mode == "training") for weight in row.weights(case)]

    def once() -> None:
        if case.mode == "training":
            out = row.call(x, weights)
            torch.autograd.grad(out, [x, *weights], torch.ones_like(out))
        else:
            with torch.no_grad():
                row.call(x, weights)

    once()  # kept matrices, compilation
    if repeats is None:
        seconds = time_interleaved({"": once}, rounds=1, warmup=0, device=case.device)[""].best
        repeats = min(1000, max(1, round(LEAST_S / max(seconds, 1e-7))))
    return (lambda: [once() for _ in range(repeats)]), repeats


def records(entries: list[Entry], rows: list[Operator]) -> list[Record]:
    """A row for each operator and cell: images a second, their spread over the runs, the ratio, and the paper's."""
    paper, result = paper_figures(), []
    for entry in entries:
        batch, side = entry.cell["batch"], entry.cell["map"]
        base = entry.timing(BASELINE)
        for row in rows:
            timing = entry.timing(row.name)
            record: Record = {"model": row.name, **entry.cell}
            if timing is None:
                record["why_not"] = entry.results[row.name]["why_not"]
            else:
                speeds = (timing.median, max(timing.seconds), min(timing.seconds))
                record |= {key: batch / s for key, s in zip(("images_per_s", "low", "high"), speeds, strict=True)}
                if base is not None:
                    record["ratio"] = base.median / timing.median
            key, base_key = (row.method, row.size, batch, side), ("DW-Std", 5, batch, side)
            if not row.suffix and entry.cell["mode"] == "forward" and key in paper and base_key in paper:
                record |= {"paper_images_per_s": paper[key], "paper_ratio": paper[key] / paper[base_key]}
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
        lines = [[name, *(_figure(by.get((name, side), {})) for side in sides)] for name in names]
        batch, dtype, layout, mode, *_ = group
        what = MODES[mode]
        title = f"Batch {batch}, {dtype}, {layout}, {what}: images/s (ratio to {BASELINE})"
        parts.append(f"{title}\n\n{render_table(('operator', *(f'{s}x{s}' for s in sides)), lines, markdown=markdown)}")
    return "\n\n".join(parts)


def _figure(record: Record) -> str:
    if "images_per_s" not in record:
        return NONE
    ratio = f" ({record['ratio']:.2f}x)" if "ratio" in record else ""
    return f"{record['images_per_s']:.4g}{ratio}"


def _present(args: argparse.Namespace, entries: list[Entry], rows: list[Operator]) -> int:
    found = records(entries, rows)
    print(table_text(found, args.markdown))
    facts = machine_facts(args.device)
    note = (
        f"{args.channels} channels, {args.runs} runs of {args.rounds} rounds, medians; float32 products on a GPU: "
        f"{args.precision}. WBMM-C and WBMM-NC are the paper's operator, a batched product, with the matrix kept and "
        "made anew; WBMM (backend) is the same operator as this package computes it."
    )
    print(f"\n{note}\n{measured_line(facts)}")
    for name, why in _left_out(entries).items():
        print(f"{NONE} {name}: {why}")
    if args.out is not None:
        page = f"# wbmm bench op\n\n{table_text(found, markdown=True)}\n\n{note}\n\n{measured_line(facts)}\n"
        write_text(args.out / "op.md", f"{page}\n```sh\n{_command(args)}\n```\n")
        write_text(args.out / "op.csv", to_csv([record | facts for record in found]))
        print(f"written to {args.out}: op.jsonl, op.csv, op.md")
    return 0


def _command(args: argparse.Namespace) -> str:
    """What was typed, with defaults written out."""
    lists = {name: map(str, getattr(args, name)) for name in ("batch", "map", "dtype", "layout", "mode")}
    words = [word for name, values in lists.items() for word in (f"--{name}", *values)]
    words += [f"--{name}={getattr(args, name)}" for name in ("channels", "runs", "rounds", "precision", "device")]
    return shlex.join(["wbmm", "bench", "op", *words, *(["--compile"] if args.compile else [])])


def _left_out(entries: list[Entry]) -> dict[str, str]:
    """Operators that ran in no cell, and the reason that the last one gave."""
    reasons: dict[str, str] = {}
    ran = {name for entry in entries for name, result in entry.results.items() if "seconds" in result}
    for entry in entries:
        reasons |= {name: result["why_not"] for name, result in entry.results.items() if name not in ran}
    return reasons

"""Fills the blocks of docs/speed.md, docs/results/before_after.md and README.md from the CSV files in docs/results.

A block stands between `<!-- NAME -->` and `<!-- end -->`. What has not been measured yet says so. With `--check`,
nothing is written, and the exit status is 1 if a block differs from the files.
"""

import csv
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import zip_longest
from pathlib import Path

from wbmm.io.atomic import write_text

ROOT = Path(__file__).parents[1]
PAGES = ("docs/speed.md", "docs/results/before_after.md", "README.md")
PAPER = ROOT / "wbmm" / "bench" / "paper_models.csv"
MISSING = "Not measured yet: `bash scripts/measure_cpu.sh --only {}`."
PRECISIONS = {"float32": "float32", "bfloat16": "bfloat16", "int8": "INT8 (OpenVINO)"}
Row = dict[str, str]
Lines = list[str]


def results() -> Path:
    return ROOT / "docs" / "results"


def read(name: str) -> list[Row]:
    """The rows of a file; empty if there is none."""
    path = results() / name
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def lines_of(headers: Iterable[str], rows: Iterable[Iterable[str]], text_columns: int = 1) -> Lines:
    headers = list(headers)
    rules = ["---"] * text_columns + ["---:"] * (len(headers) - text_columns)
    return [f"| {' | '.join(cells)} |" for cells in (headers, rules, *rows)]


def measured(rows: list[Row]) -> Lines:
    """Where, when and by which command."""
    row = rows[0]
    numbers = row.get("dtype") or "float32"
    numbers = f"{numbers} by autocast" if row.get("autocast") == "True" else numbers
    numbers = "" if "precision" in row and row["precision"] in PRECISIONS else f"{numbers}, "
    where = f"{row['threads']} threads of {row['machine']}, {numbers}{row['date']}, torch {row['torch']}"
    return ["", f"Measured: {where}; `{row['command']}`."]


def speed(row: Row | None) -> str:
    return "--" if row is None else f"{float(row['images_per_s']):.1f} ({float(row['ratio']):.2f}x)"


def peers() -> Lines:
    """Every net with its published top-1, and its throughput in each precision."""
    rows = read("cpu/peers.csv")
    if not rows:
        return [MISSING.format("peers")]
    found = {(row["model"], row["precision"]): row for row in rows}
    names = sorted({row["model"]: row for row in rows}.values(), key=lambda row: float(row["top1"]))
    shown = [name for name in PRECISIONS if any(row["precision"] == name for row in rows)]
    table = [
        [f"`{row['model']}`", f"{float(row['top1']):.1f}", *(speed(found.get((row["model"], name))) for name in shown)]
        for row in names
    ]
    heads = ["net", "top-1 %, published", *(f"{PRECISIONS[name]}, images/s" for name in shown)]
    sources = sorted({row["top1_source"] for row in rows})
    note = f"In brackets: ratios to `convnext_tiny` in the same precision. Top-1 from {', '.join(sources)}."
    return [*pictures("results/cpu"), *lines_of(heads, table), "", note, *measured(rows)]


def pictures(folder: str, most: int = 3) -> Lines:
    """The pictures that there are, beside each other; `folder` as a page links to it."""
    found = [name for name in PRECISIONS if (results() / "cpu" / f"peers-{name}.svg").is_file()][:most]
    width = 100 // max(len(found), 2) - 1
    tags = [
        f'<img src="{folder}/peers-{name}.svg" width="{width}%" '
        f'alt="ImageNet top-1 against images a second on a CPU, {PRECISIONS[name]}">'
        for name in found
    ]
    return [*tags, ""] if tags else []


def readme_picture() -> Lines:
    tags = pictures("docs/results/cpu", most=2)
    return tags[:-1] or ["The chart of throughput against accuracy has not been measured yet."]


def runtimes() -> Lines:
    """Runtime x precision x batch, ours and ConvNeXt-T."""
    rows = read("cpu/runtime/runtime.csv")
    if not rows:
        return [MISSING.format("runtime")]
    precisions = {"int8": "INT8", "bf16": "bfloat16"}
    table = [
        [precisions.get(row["model"].rpartition(", ")[2], "float32"), row["model"], row["batch"], speed(row)]
        for row in rows
    ]
    heads = ("precision", "net and runtime", "batch", "images/s (ratio to convnext_tiny, same runtime and precision)")
    return [*lines_of(heads, table, 2), *measured(rows)]


def training() -> Lines:
    """Training steps beside ConvNeXt, in float32 and under autocast, and of small nets."""
    parts = [rows for name in ("float32", "bfloat16", "small") if (rows := read(f"cpu/training-{name}/train.csv"))]
    if not parts:
        return [MISSING.format("training")]
    table = [
        [
            f"`{row['model']}`",
            f"{row.get('dtype') or 'float32'}{' autocast' if row.get('autocast') == 'True' else ''}",
            row["height"],
            row["batch"],
            speed(row),
            f"{float(row['peak_mb']):.0f}" if row.get("peak_mb") else "--",
        ]
        for rows in parts
        for row in rows
    ]
    heads = ("net", "numbers", "px", "batch", "images/s (ratio to ConvNeXt)", "peak memory, MB")
    return [*lines_of(heads, table, 2), *(line for rows in parts for line in measured(rows))]


def sizes() -> Lines:
    """Larger images, hierarchical windows and the smallest net."""
    parts = [rows for name in ("cpu/512/model.csv", "cpu/small/model.csv") if (rows := read(name))]
    if not parts:
        return [MISSING.format("sizes")]
    table = [
        [f"`{row['model']}`", row["height"], row["batch"], f"{speed(row)}", f"`{row['over']}`"]
        for rows in parts
        for row in rows
    ]
    heads = ("net", "px", "batch", "images/s (ratio)", "ratio to")
    return [*lines_of(heads, table), *(line for rows in parts for line in measured(rows))]


def paper_cpu() -> Lines:
    """WBMM over UniRepLKNet on a CPU, both in the reference implementation and both in ours, beside the paper's."""
    printed = {
        (row["size"], row["net"], int(row["px"]), int(row["batch"])): float(row["images_per_s"])
        for row in csv.DictReader(PAPER.read_text(encoding="utf-8").splitlines())
        if row["machine"] == "i7-13700K"
    }
    rows = [row for row in read("cpu/model.csv") if row["height"] == "224"]
    if not rows:
        return [MISSING.format("model")]
    speeds = {(row["model"], int(row["batch"])): float(row["images_per_s"]) for row in rows}
    table = []
    for size, batch in sorted({(m[5:6], b) for m, b in speeds if m[:5] == "wbmm_" and m[6:] == ":plain"}):
        found = [
            speeds[f"wbmm_{size}:{form}", batch] / speeds[f"unireplknet_{size}:{form}", batch]
            for form in ("plain", "compact")
        ]
        paper = printed.get((size, "W", 224, batch), 0) / printed.get((size, "UN", 224, batch), 1)
        cells = [f"{ratio:.2f}x" if ratio else "--" for ratio in (*found, paper)]
        table.append([size.upper(), str(batch), *cells])
    heads = ("net, 224 px", "batch", "reference on both sides", "ours on both sides", "the paper's i7")
    return [*lines_of(heads, table), *measured(rows)]


def products() -> Lines:
    """The product with 7x7 windows beside 14x14 ones that cover the same map, from `bench op`."""
    rows = [row for row in read("cpu/op.csv") if row.get("images_per_s")]
    speeds = {(row["model"], row["batch"], row["map"]): float(row["images_per_s"]) for row in rows}
    table = []
    for batch, side in sorted(
        {(b, m) for name, b, m in speeds if name == "WBMM-C 14x14"}, key=lambda k: [*map(int, k)]
    ):
        names = ("WBMM-C 7x7", "WBMM-C 14x14", "WBMM 14x14 (onednn)", "DW-Std 13x13")
        found = [speeds.get((name, str(batch), str(side))) for name in names]
        cells = ["--" if value is None else f"{value:.4g}" for value in found]
        table.append([f"{batch} x {side}x{side}", *cells])
    if not table:
        return [MISSING.format("op")]
    heads = ("256 channels", "product, 7x7", "product, 14x14", "14x14 as convolutions", "13x13 depthwise convolution")
    where = f"{rows[0]['threads']} threads of {rows[0]['machine']}, {rows[0]['date']}, torch {rows[0]['torch']}"
    return [*lines_of(heads, table), "", f"Images/s, forward, {rows[0]['dtype']}. Measured: {where}; `wbmm bench op`."]


def profile(kind: str) -> Lines:
    """Where the time goes, as the benchmark wrote it."""
    rows = read(f"cpu/profile-{kind}/profile.csv")
    if not rows:
        return [MISSING.format("profile")]
    table = [[row["model"], f"{float(row['calls']):g}", f"{float(row['part']):.2f}"] for row in rows]
    return [*lines_of(("operator", "calls", "share of the time"), table), *measured(rows)]


def profiles_in_bf16() -> Lines:
    """Where the time of one image goes in bfloat16, ours and ConvNeXt, in milliseconds."""
    parts = [read(f"cpu/profile-bf16-{name}/profile.csv") for name in ("wbmm_t", "convnext_tiny")]
    if not all(parts):
        return [MISSING.format("profile")]
    table = [
        [cell for row in pair for cell in ((row["model"], f"{float(row['ms']):.1f}") if row else ("", ""))]
        for pair in zip_longest(*parts)
    ]
    heads = ("`wbmm_t`", "ms", "`convnext_tiny`", "ms")
    return [*lines_of(heads, table), *(line for rows in parts for line in measured(rows))]


RUNTIME, SMALL, LARGE = "cpu/runtime/runtime.csv", "cpu/small/model.csv", "cpu/512/model.csv"
STEPS, STEPS_BF16, STEPS_SMALL = (f"cpu/training-{name}/train.csv" for name in ("float32", "bfloat16", "small"))
# What is compared, what it was, and where it is now: a file and what its row has.
BEFORE: list[tuple[str, str, str, Row]] = [
    *(
        (f"WBMM-T, {label}, batch {batch}", was, RUNTIME, {"runtime": way, "computed_in": precision, "batch": batch})
        for label, way, precision, batch, was in (
            ("eager float32", "eager", "float32", "1", "1.02x"),
            ("eager float32", "eager", "float32", "16", "1.20x"),
            ("eager bf16", "eager", "bf16", "1", "0.58x"),
            ("eager bf16", "eager", "bf16", "16", "0.73x"),
            ("compiled with freezing, float32", "compiled", "float32", "1", "0.63x"),
            ("compiled with freezing, bf16", "compiled", "bf16", "1", "0.71x"),
            ("OpenVINO float32", "openvino", "float32", "1", "0.93x"),
            ("OpenVINO bf16", "openvino", "bf16", "1", "0.90x"),
            ("OpenVINO INT8", "openvino", "int8", "1", "0.72x"),
        )
    ),
    ("wbmm_a, eager float32, batch 1", "0.83x", SMALL, {"model": "wbmm_a:compact", "batch": "1"}),
    ("training wbmm_a, 56 px, batch 32", "0.52x", STEPS_SMALL, {"model": "wbmm_a", "height": "56"}),
    ("training wbmm_a, 112 px, batch 32", "0.69x", STEPS_SMALL, {"model": "wbmm_a", "height": "112"}),
    ("training WBMM-T, float32, batch 16", "0.98x", STEPS, {"model": "wbmm_t"}),
    ("training WBMM-T, bf16 autocast, batch 16", "--", STEPS_BF16, {"model": "wbmm_t"}),
    ("WBMM-T hier over 7x7 windows, 512 px, batch 8", "0.94x", LARGE, {"model": "wbmm_t_hier:compact", "batch": "8"}),
]


def ours(name: str, wanted: Row) -> Row | None:
    """Our net's row of a file that has these values."""
    found = (row for row in read(name) if row["model"].startswith("wbmm") and wanted.items() <= row.items())
    return next(found, None)


def before_and_now() -> Lines:
    """The ratios of the first look beside those of the files."""
    table = []
    for what, was, name, wanted in BEFORE:
        row = ours(name, wanted)
        table.append([what, was, "--" if row is None else f"{float(row['ratio']):.2f}x"])
    compiled, eager = (
        ours(RUNTIME, {"runtime": way, "computed_in": "float32", "batch": "1"}) for way in ("compiled", "eager")
    )
    if compiled and eager:
        own = float(compiled["images_per_s"]) / float(eager["images_per_s"])
        table.append(["WBMM-T, compiled over our own eager, float32, batch 1", "0.68x", f"{own:.2f}x"])
    sources = [rows[0] for name in dict.fromkeys(name for _, _, name, _ in BEFORE) if (rows := read(name))]
    if not sources:
        return [MISSING.format("runtime")]
    commands = [f"- `{row['command']}`, {row['date']}" for row in sources]
    where = f"{sources[0]['threads']} threads of {sources[0]['machine']}, torch {sources[0]['torch']}:"
    return [*lines_of(("", "before", "now"), table), "", f"Measured: {where}", "", *commands]


BLOCKS: dict[str, Callable[[], Lines]] = {
    "peers": peers,
    "runtimes": runtimes,
    "training": training,
    "sizes": sizes,
    "paper cpu": paper_cpu,
    "products": products,
    "profile openvino": partial(profile, "openvino"),
    "profile eager": partial(profile, "eager"),
    "profile training": partial(profile, "training"),
    "before and now": before_and_now,
    "profiles of bfloat": profiles_in_bf16,
    "picture": readme_picture,
}


def fill(text: str) -> str:
    """A page with its blocks filled; others than `BLOCKS` are left alone."""

    def block(found: re.Match) -> str:
        if found[1] not in BLOCKS:
            return found[0]
        return f"<!-- {found[1]} -->\n" + "\n".join(BLOCKS[found[1]]()) + "\n<!-- end -->"

    return re.sub(r"<!-- (?!end )([a-z ]+) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)


def main(argv: list[str]) -> int:
    pages = [ROOT / name for name in PAGES]
    before = [page.read_text(encoding="utf-8") for page in pages]
    after = [fill(text) for text in before]
    if "--check" in argv:
        return int(before != after)
    for page, text in zip(pages, after, strict=True):
        write_text(page, text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

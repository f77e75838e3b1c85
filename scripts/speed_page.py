"""Fills the tables of docs/speed.md from the CSV files of `wbmm bench` in docs/results/speed.

A table stands between `<!-- NAME -->` and `<!-- end -->`. With `--check`, nothing is written, and the exit status is 1
if a table differs from the files.
"""

import csv
import re
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results" / "speed"
DOCS_RESULTS = DOCS / "results"
PAPER = DOCS.parent / "wbmm" / "bench" / "paper_models.csv"
OURS = "wbmm_t:compact"
# what is compared, and the other model of the ratio
INFERENCE = (
    ("fused WBMM-T over its reference implementation, fused", "wbmm_t:plain"),
    ("over UniRepLKNet-T fused, reference implementation", "unireplknet_t:plain"),
    ("over UniRepLKNet-T fused, in our layout", "unireplknet_t:compact"),
    ("over timm's convnext_tiny", "convnext_tiny"),
    ("over convnextv2_tiny", "convnextv2_tiny"),
    ("over swin_tiny", "swin_tiny_patch4_window7_224"),
    ("over inception_next_tiny", "inception_next_tiny"),
)
TRAINING = (
    ("training step over the reference implementation", "wbmm_t:plain-training"),
    ("over UniRepLKNet-T, reference implementation", "unireplknet_t:plain-training"),
    ("over UniRepLKNet-T, in our layout", "unireplknet_t"),
    ("over convnext_tiny", "convnext_tiny"),
)
# folder, pixels, batch, model, beside what
SIZES = (
    ("512", 512, 1, OURS, "convnext_tiny"),
    ("512", 512, 1, OURS, "wbmm_t:plain"),
    ("hier", 512, 1, "wbmm_t_hier:compact", "wbmm_t_dense:compact"),
    ("hier", 512, 8, "wbmm_t_hier:compact", "wbmm_t_dense:compact"),
    ("1024", 1024, 1, OURS, "convnext_tiny"),
    ("1024", 1024, 1, OURS, "wbmm_t:plain"),
    ("sizes", 224, 1, "wbmm_p:compact", "wbmm_p:plain"),
    ("sizes", 224, 1, "wbmm_s:compact", "wbmm_s:plain"),
    ("sizes", 224, 1, "wbmm_s:compact", "convnext_small"),
)
Rows = dict[tuple[str, int], dict[str, str]]


def read(name: str) -> Rows:
    with (RESULTS / name).open(newline="", encoding="utf-8") as file:
        return {(row["model"], int(row["batch"])): row for row in csv.DictReader(file)}


def ratio(rows: Rows, model: str, other: str, batch: int) -> str:
    """Of medians, and of bests in brackets."""
    one, two = rows[model, batch], rows[other, batch]
    median, best = (float(one[key]) / float(two[key]) for key in ("images_per_s", "images_per_s_best"))
    return f"{median:.2f}x ({best:.2f}x)"


def inference() -> list[str]:
    rows = read("224/model.csv")
    lines = ["| | batch 1 | batch 16 |", "| --- | ---: | ---: |"]
    for what, other in INFERENCE:
        one, sixteen = (ratio(rows, OURS, other, batch) for batch in (1, 16))
        lines.append(f"| {what} | {one} | {sixteen} |")
    return lines


def training() -> list[str]:
    rows = read("224/train.csv")
    lines = ["| | batch 16 | peak memory of the other, MB |", "| --- | ---: | ---: |"]
    for what, other in TRAINING:
        peak = float(rows[other, 16]["peak_mb"])
        lines.append(f"| {what} | {ratio(rows, 'wbmm_t', other, 16)} | {peak:.0f} |")
    return [*lines, f"| WBMM-T itself | | {float(rows['wbmm_t', 16]['peak_mb']):.0f} |"]


def sizes() -> list[str]:
    lines = ["| px | batch | | ratio |", "| ---: | ---: | --- | ---: |"]
    for folder, pixels, batch, model, other in SIZES:
        found = ratio(read(f"{folder}/model.csv"), model, other, batch)
        lines.append(f"| {pixels} | {batch} | `{model}` over `{other}` | {found} |")
    return lines


def paper_cpu() -> list[str]:
    """WBMM over UniRepLKNet on a CPU, both in the reference implementation and both in ours, beside the paper's."""
    printed = {
        (row["size"], row["net"], int(row["px"]), int(row["batch"])): float(row["images_per_s"])
        for row in csv.DictReader(PAPER.read_text(encoding="utf-8").splitlines())
        if row["machine"] == "i7-13700K"
    }
    lines = ["| net, 224 px | batch | reference on both sides | ours on both sides | the paper's i7 |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for name in ("cpu/model.csv", "speed/224/model.csv"):  # the preset's, where it was measured; then the older one
        path = DOCS_RESULTS / name
        rows = _at_224(path) if path.is_file() else {}
        for size, batch in sorted({(m[5:6], b) for m, b in rows if m[:5] == "wbmm_" and m[6:] == ":plain"}):
            cells = [
                ratio(rows, f"wbmm_{size}:{form}", f"unireplknet_{size}:{form}", batch) for form in ("plain", "compact")
            ]
            paper = printed[size, "W", 224, batch] / printed[size, "UN", 224, batch]
            lines.append(f"| {size.upper()} | {batch} | {cells[0]} | {cells[1]} | {paper:.2f}x |")
        if rows:
            break
    return lines


def _at_224(path: Path) -> Rows:
    with path.open(newline="", encoding="utf-8") as file:
        found = [row for row in csv.DictReader(file) if row["height"] == "224"]
    return {(row["model"], int(row["batch"])): row for row in found}


def products() -> list[str]:
    """The product with 7x7 windows beside 14x14 ones that cover the same map."""
    with (RESULTS / "paths.csv").open(newline="", encoding="utf-8") as file:
        times = {
            row["model"]: float(row["first"].split()[1]) for row in csv.DictReader(file) if "product" in row["first"]
        }
    lines = ["| map of 320 channels | 7x7 windows, product | 14x14 windows, product | time of 14x14 over 7x7 |"]
    lines.append("| --- | ---: | ---: | ---: |")
    for count in (1, 4, 16, 64):
        small, large = times[f"{4 * count} windows of 7x7"], times[f"{count} windows of 14x14"]
        lines.append(f"| {count} x 14x14 | {small:.2f} ms | {large:.2f} ms | {large / small:.2f}x |")
    return lines


def as_written(name: str) -> Callable[[], list[str]]:
    """The table of a page that a benchmark wrote."""
    return lambda: [line for line in (RESULTS / name).read_text(encoding="utf-8").splitlines() if line.startswith("|")]


TABLES = {
    "paper cpu": paper_cpu,
    "products": products,
    "inference": inference,
    "training": training,
    "sizes": sizes,
    "runtime": as_written("224/runtime.md"),
    "profile openvino": as_written("profile/openvino/profile.md"),
    "profile eager": as_written("profile/eager/profile.md"),
    "profile training": as_written("profile/training/profile.md"),
}


def fill(text: str) -> str:
    def block(found: re.Match) -> str:
        return f"<!-- {found[1]} -->\n" + "\n".join(TABLES[found[1]]()) + "\n<!-- end -->"

    return re.sub(r"<!-- ([a-z ]+) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)


def main(argv: list[str]) -> int:
    page = DOCS / "speed.md"
    before = page.read_text(encoding="utf-8")
    after = fill(before)
    if "--check" in argv:
        return int(before != after)
    page.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

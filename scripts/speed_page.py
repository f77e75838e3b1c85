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
OURS = "wbmm_t:compact"
# what is compared, the models of the ratio, and the aims at batch 1 and 16
INFERENCE = (
    ("fused WBMM-T over its reference implementation, fused", "wbmm_t:plain", "1.5x", "1.35x"),
    ("over UniRepLKNet-T fused, reference implementation", "unireplknet_t:plain", "1.9x", "1.9x"),
    ("over UniRepLKNet-T fused, in our layout", "unireplknet_t:compact", "", ""),
    ("over timm's convnext_tiny", "convnext_tiny", "0.95x", "1.0x"),
    ("over convnextv2_tiny", "convnextv2_tiny", "", ""),
    ("over swin_tiny", "swin_tiny_patch4_window7_224", "", ""),
    ("over inception_next_tiny", "inception_next_tiny", "", ""),
)
TRAINING = (
    ("training step over the reference implementation", "wbmm_t:plain-training", "1.5x"),
    ("over UniRepLKNet-T, reference implementation", "unireplknet_t:plain-training", "3x"),
    ("over UniRepLKNet-T, in our layout", "unireplknet_t", ""),
    ("over convnext_tiny", "convnext_tiny", "1.0x"),
)
# folder, pixels, batch, model, beside what, aim
SIZES = (
    ("512", 512, 1, OURS, "convnext_tiny", ""),
    ("512", 512, 1, OURS, "wbmm_t:plain", ""),
    ("hier", 512, 1, "wbmm_t_hier:compact", "wbmm_t_dense:compact", "0.90x"),
    ("hier", 512, 8, "wbmm_t_hier:compact", "wbmm_t_dense:compact", "0.95x"),
    ("1024", 1024, 1, OURS, "convnext_tiny", ""),
    ("1024", 1024, 1, OURS, "wbmm_t:plain", ""),
    ("sizes", 224, 1, "wbmm_p:compact", "wbmm_p:plain", ""),
    ("sizes", 224, 1, "wbmm_s:compact", "wbmm_s:plain", ""),
    ("sizes", 224, 1, "wbmm_s:compact", "convnext_small", ""),
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
    lines = ["| | batch 1 | aim | batch 16 | aim |", "| --- | ---: | ---: | ---: | ---: |"]
    for what, other, *aims in INFERENCE:
        one, sixteen = (f"{ratio(rows, OURS, other, batch)} | {aim}" for batch, aim in zip((1, 16), aims, strict=True))
        lines.append(f"| {what} | {one} | {sixteen} |")
    return lines


def training() -> list[str]:
    rows = read("224/train.csv")
    lines = ["| | batch 16 | aim | peak memory of the other, MB |", "| --- | ---: | ---: | ---: |"]
    for what, other, aim in TRAINING:
        peak = float(rows[other, 16]["peak_mb"])
        lines.append(f"| {what} | {ratio(rows, 'wbmm_t', other, 16)} | {aim} | {peak:.0f} |")
    return [*lines, f"| WBMM-T itself | | | {float(rows['wbmm_t', 16]['peak_mb']):.0f} |"]


def sizes() -> list[str]:
    lines = ["| px | batch | | ratio | aim |", "| ---: | ---: | --- | ---: | ---: |"]
    for folder, pixels, batch, model, other, aim in SIZES:
        found = ratio(read(f"{folder}/model.csv"), model, other, batch)
        lines.append(f"| {pixels} | {batch} | `{model}` over `{other}` | {found} | {aim} |")
    return lines


def as_written(name: str) -> Callable[[], list[str]]:
    """The table of a page that a benchmark wrote."""
    return lambda: [line for line in (RESULTS / name).read_text(encoding="utf-8").splitlines() if line.startswith("|")]


TABLES = {
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

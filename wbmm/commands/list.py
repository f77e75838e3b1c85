"""`wbmm list`: the family."""

import argparse
import fnmatch

from wbmm.text import render_table
from wbmm.zoo import load_counts, load_zoo

EXAMPLE = "wbmm list 'wbmm_t*'"
HEADERS = (
    "model",
    "task",
    "params M",
    "fused M",
    "paper",
    "FLOPs G",
    "paper",
    "Top-1 (paper)",
    "blocks",
    "windows",
    "weights",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("filter", nargs="?", default="*", help="names to show, with wildcards")
    parser.add_argument("--markdown", action="store_true", help="as a Markdown table")


def rows(name_filter: str = "*") -> list[list[str]]:
    """One row per model: what scripts/count_zoo.py counted, at 224x224, and the paper's figures."""
    table, counts = [], load_counts()
    for model in load_zoo().values():
        if not fnmatch.fnmatch(model.name, name_filter):
            continue
        paper = {key: model.paper.get(key, "-") for key in ("params", "flops", "top1")}
        table.append(
            [
                model.name,
                model.task,
                f"{counts[model.name]['params'] / 1e6:.2f}",
                f"{counts[model.name]['params_fused'] / 1e6:.2f}",
                str(paper["params"]),
                f"{counts[model.name]['macs'] / 1e9:.2f}",
                str(paper["flops"]),
                str(paper["top1"]),
                " ".join(model.pattern),
                " ".join(map(str, model.window)) if model.mixer == "wbmm" else model.mixer,
                ", ".join(model.weights) or "-",
            ]
        )
    return table


def run(args: argparse.Namespace) -> int:
    table = rows(args.filter)
    if not table:
        raise ValueError(f"no model matches {args.filter!r}; `wbmm list` shows them all")
    print(render_table(HEADERS, table, markdown=args.markdown))
    if not args.markdown:
        print("\nparams and FLOPs (multiply-adds at 224x224, fused) are computed; `paper` is what the paper reports")
    return 0

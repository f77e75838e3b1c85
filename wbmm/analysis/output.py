"""Where an analysis goes: one folder with a JSON file, figures as PNG and PDF, and a page in Markdown."""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wbmm.extras import need
from wbmm.io.atomic import check_target, write_text
from wbmm.io.figures import new_figure, save_figure
from wbmm.machine import machine_facts, measured_line

__all__ = ["COLUMN", "PALETTE", "Output", "add_output_arguments", "drawing"]

COLUMN = 3.25  # inches: a column of a paper
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito's
STYLE = {
    **{"font.size": 7, "axes.titlesize": 7.5, "axes.labelsize": 7, "legend.fontsize": 6.5, "figure.titlesize": 8},
    **{"xtick.labelsize": 6.5, "ytick.labelsize": 6.5, "axes.linewidth": 0.6, "lines.linewidth": 1.2},
    **{"pdf.fonttype": 42, "savefig.dpi": 220},
    **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False},
    **{"xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.major.size": 2.5, "ytick.major.size": 2.5},
}


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("analysis"), metavar="DIR", help="made if it is missing")
    parser.add_argument("--force", action="store_true", help="replace an earlier analysis in --out")


@contextmanager
def drawing(height: float, what: str, width: float = COLUMN) -> Iterator[Any]:
    """A figure of a paper's column width with its small print; draw and save it inside the block."""
    matplotlib = need("matplotlib", what)
    with matplotlib.rc_context(STYLE):
        figure = new_figure(width, height, what)
        yield figure


class Output:
    """The files of one analysis: `NAME.json`, `NAME.md` and figures that start with `NAME`.

    Args:
        folder: made if it is missing.
        name: of the analysis, such as `weights`.
        force: replace the files of an earlier one.
    """

    def __init__(self, folder: Path, name: str, force: bool) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot make the folder {folder}: {error.strerror}") from None
        self.folder, self.name = folder, name
        check_target(folder / f"{name}.json", force)
        self.written: list[Path] = []

    def figure(self, figure: Any, suffix: str = "") -> str:
        """Saves a figure as PNG and PDF; the name of the PNG."""
        for ending in ("png", "pdf"):
            path = self.folder / f"{self.name}{f'-{suffix}' if suffix else ''}.{ending}"
            self.written.append(save_figure(figure, path))
        return self.written[-2].name

    def finish(self, facts: dict, page: str, device: str) -> Path:
        """Writes the JSON file and the page, and says where they are."""
        facts = {"command": _command(), **facts, "machine": machine_facts(device)}
        write_text(self.folder / f"{self.name}.json", json.dumps(_plain(facts), indent=1) + "\n")
        foot = f"`{_command()}`\n\n{measured_line(facts['machine'])} What the figures mean: docs/analysis.md.\n"
        write_text(self.folder / f"{self.name}.md", f"{page.rstrip()}\n\n{foot}")
        page_path = self.folder / f"{self.name}.md"
        print(f"\npage: {page_path}; numbers: {self.name}.json; {len(self.written)} pictures beside them")
        return page_path


def _command() -> str:
    return shlex.join(["wbmm", *sys.argv[1:]])


def _plain(value: Any) -> Any:
    """Numbers that JSON has: five significant digits, null for what is not finite."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value

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

from PIL import Image

from wbmm.extras import need
from wbmm.io.atomic import check_target, replacing, write_text
from wbmm.io.figures import new_figure, save_figure
from wbmm.machine import machine_facts, measured_line

__all__ = ["COLUMN", "PALETTE", "Output", "add_output_arguments", "drawing"]

COLUMN = 3.25  # inches: a column of a paper
ANALYSES = ("weights", "erf", "features", "cam", "mistakes")
DPI, SMALL_DPI = 220, 140
LARGE_FILE = 250_000  # bytes
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito's
STYLE = {
    **{"font.size": 7, "axes.titlesize": 7.5, "axes.labelsize": 7, "legend.fontsize": 6.5, "figure.titlesize": 8},
    **{"xtick.labelsize": 6.5, "ytick.labelsize": 6.5, "axes.linewidth": 0.6, "lines.linewidth": 1.2},
    **{"pdf.fonttype": 42},
    **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False},
    **{"xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.major.size": 2.5, "ytick.major.size": 2.5},
}


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("analysis"), metavar="DIR", help="made if it is missing")
    parser.add_argument("--force", action="store_true", help="replace an earlier analysis in --out")
    parser.add_argument("--small", action="store_true", help="small PNG files and no PDF, for a page in a repository")


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
        args: with what `add_output_arguments` adds.
        name: of the analysis, such as `weights`.

    Attributes:
        endings: of each figure.
        written: the figures so far.
    """

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot make the folder {args.out}: {error.strerror}") from None
        self.folder, self.name, self.small = args.out, name, args.small
        check_target(args.out / f"{name}.json", args.force)
        self.endings = ("png",) if args.small else ("png", "pdf")
        self.written: list[Path] = []

    def figure(self, figure: Any, suffix: str = "") -> str:
        """Saves a figure with each ending; the name of the PNG."""
        name = f"{self.name}{f'-{suffix}' if suffix else ''}"
        with need("matplotlib").rc_context({"savefig.dpi": SMALL_DPI if self.small else DPI}):
            self.written += [save_figure(figure, self.folder / f"{name}.{ending}") for ending in self.endings]
        return f"{name}.png"

    def finish(self, facts: dict, page: str, device: str) -> Path:
        """Writes the JSON file and the page, and says where they are."""
        if self.small:
            for path in self.written:
                if path.stat().st_size > LARGE_FILE:
                    _shrink(path)
        facts = {"command": _command(), **facts, "machine": machine_facts(device)}
        write_text(self.folder / f"{self.name}.json", json.dumps(_plain(facts), indent=1) + "\n")
        foot = f"`{_command()}`\n\n{measured_line(facts['machine'])} What the figures mean: docs/analysis.md.\n"
        write_text(self.folder / f"{self.name}.md", f"{page.rstrip()}\n\n{foot}")
        write_text(self.folder / "README.md", _contents(self.folder))
        page_path = self.folder / f"{self.name}.md"
        print(f"\npage: {page_path}; numbers: {self.name}.json; {len(self.written)} pictures beside them")
        return page_path


def _command() -> str:
    return shlex.join(["wbmm", *sys.argv[1:]])


def _contents(folder: Path) -> str:
    """The pages of a folder, each with its heading."""
    lines = []
    for name in ANALYSES:
        path = folder / f"{name}.md"
        if path.is_file():
            heading = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
            lines.append(f"- [{heading}]({path.name})")
    return "\n".join(["# What the model learned", "", *lines, "", "Made by `wbmm analyze`.", ""])


def _shrink(path: Path) -> None:
    """A PNG with 256 colours: a third of its size. For photographs: lines of a plot may change their colour."""
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(256, method=Image.Quantize.MEDIANCUT)
    with replacing(path) as temporary:
        small.save(temporary, format="png", optimize=True)


def _plain(value: Any) -> Any:
    """Numbers that JSON has: five significant digits, null for what is not finite."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value

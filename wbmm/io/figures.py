"""Figures as files: matplotlib without a screen, PNG or PDF by the file's ending, colours that colour-blind people tell
apart."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wbmm.extras import need
from wbmm.text import printable

from .atomic import replacing

__all__ = ["BLUE", "GREY", "ORANGE", "draw_mosaic", "new_figure", "save_figure", "shorten", "to_pictures"]

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#767676"  # of Okabe and Ito's palette
DPI = 110
CELL = 1.75  # inches of a picture in a mosaic
CAPTION = 0.17  # inches of a line of text below it
LINE = 24  # characters of such a line


def new_figure(width: float, height: float, what: str = "this picture") -> Any:
    """An empty figure of so many inches, which needs no screen; `what` is for the error where matplotlib is missing."""
    need("matplotlib", what)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: str | Path) -> Path:
    """Writes a figure, whole or not at all: PNG, or PDF with the text as text."""
    path = Path(path)
    kind = path.suffix.lower().lstrip(".")
    if kind not in ("png", "pdf"):
        raise ValueError(f"{path}: a figure ends with .png or .pdf")
    dates = {"CreationDate": None} if kind == "pdf" else None  # the same figure is the same file
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        figure.savefig(temporary, format=kind, metadata=dates)
    return path


def shorten(name: object, most: int) -> str:
    """A name as one line of at most `most` characters, its end cut; `$` would start a formula in matplotlib."""
    text = printable(name).replace("$", r"\$")
    return text if len(text) <= most else f"{text[: most - 1]}…"


def to_pictures(images: Any, mean: Sequence[float], std: Sequence[float]) -> list[np.ndarray]:
    """Normalised images `[N, C, H, W]` as the bytes that they stand for, `[H, W, 3]` or `[H, W]` each."""
    images = images.detach().float().cpu().numpy()
    scale, shift = (np.asarray(values, dtype=np.float32).reshape(1, -1, 1, 1) for values in (std, mean))
    pixels = (255 * (images * scale + shift)).round().clip(0, 255).astype(np.uint8)
    return [picture[0] if len(picture) == 1 else picture.transpose(1, 2, 0) for picture in pixels]


def draw_mosaic(
    pictures: Sequence[Any],
    captions: Sequence[str],
    path: str | Path,
    title: str = "",
    columns: int = 6,
    colours: Sequence[str] | None = None,
) -> Path:
    """Pictures in rows, a caption of one or more lines below each.

    Args:
        pictures: PIL images or arrays of bytes, `[H, W]` or `[H, W, 3]`; of any sizes.
        captions: one a picture; lines are cut at `LINE` characters.
        path: of the .png or .pdf file.
        title: above all.
        columns: at most so many beside each other.
        colours: of the captions; black where none are given.
    """
    if len(pictures) != len(captions) or not pictures:
        raise ValueError(f"{len(pictures)} pictures and {len(captions)} captions: give one of each, or more")
    texts = ["\n".join(shorten(line, LINE) for line in caption.split("\n")) for caption in captions]
    lines = max(text.count("\n") + 1 for text in texts)
    columns = min(columns, len(pictures))
    rows = math.ceil(len(pictures) / columns)
    step, gap = CELL + lines * CAPTION + 0.1, 0.05
    width, height = max(columns * CELL, 3.2), rows * step + (0.45 if title else 0.0)
    figure = new_figure(width, height, "a mosaic of pictures")
    figure.set_layout_engine(None)
    axis = figure.add_axes((0, 0, 1, 1))  # one for all, in inches: an axis a picture takes seconds to lay out
    axis.set(xlim=(0, width), ylim=(0, height))
    axis.set_axis_off()
    if title:
        text = textwrap.fill(title, round(width * 11))
        axis.text(width / 2, height - 0.22, text, ha="center", va="center", fontsize=11)
    for place, (picture, text) in enumerate(zip(pictures, texts, strict=True)):
        row, column = divmod(place, columns)
        left, top = column * CELL + gap, rows * step - row * step
        pixels = np.asarray(picture.convert("RGB") if hasattr(picture, "convert") else picture)
        extent = _fit(pixels.shape[1], pixels.shape[0], left, top - CELL + gap, CELL - 2 * gap)
        axis.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="bicubic", extent=extent, aspect="auto")
        colour = colours[place] if colours else "black"
        axis.text(left + CELL / 2 - gap, top - CELL, text, ha="center", va="top", fontsize=8, color=colour)
    axis.set(xlim=(0, width), ylim=(0, height))  # which imshow has changed
    return save_figure(figure, path)


def _fit(width: int, height: int, left: float, bottom: float, side: float) -> tuple[float, float, float, float]:
    """Where a picture goes in a square cell: left, right, bottom, top."""
    wide, high = (side * length / max(width, height) for length in (width, height))
    x, y = left + (side - wide) / 2, bottom + (side - high) / 2
    return x, x + wide, y, y + high

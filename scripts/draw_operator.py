"""Draws the pictures of docs/operator.md and README into docs/images, from the same index as the operator.

python scripts/draw_operator.py
"""

from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "images"
CELL, SIDE, WINDOW = 14, 12, 4  # pixels of a cell, cells of the map, cells of a window
GREY, BLUE, ORANGE, INK = "#d0d7de", "#54aeff", "#e16f24", "#768390"  # readable on white and on dark pages
PALE, PURPLE = "#eaeef2", "#8250df"
Place = tuple[int, int]


def text(x: float, y: float, line: str, size: int = 13, anchor: str = "middle", weight: str = "normal") -> str:
    style = f'font-family="sans-serif" font-size="{size}" font-weight="{weight}" fill="{INK}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style}>{line}</text>'


def lines(x: float, y: float, *rows: str) -> list[str]:
    return [text(x, y + 18 * i, row) for i, row in enumerate(rows)]


def grid(left: int, top: int, rows: int, columns: int, colour, size: int = CELL) -> list[str]:
    """Cells with the colour that `colour(row, column)` says."""
    box = f'width="{size - 1}" height="{size - 1}"'
    return [
        f'<rect x="{left + j * size + 0.5}" y="{top + i * size + 0.5}" {box} fill="{colour(i, j)}"/>'
        for i in range(rows)
        for j in range(columns)
    ]


def borders(left: int, top: int, rows: int, columns: int, step: int, size: int = CELL) -> Iterator[str]:
    """The lines between windows of `step` cells."""
    width, height = columns * size, rows * size
    sides = [(x * size, 0, x * size, height) for x in range(0, columns + 1, step)]
    sides += [(0, y * size, width, y * size) for y in range(0, rows + 1, step)]
    for x1, y1, x2, y2 in sides:
        at = f'x1="{left + x1}" y1="{top + y1}" x2="{left + x2}" y2="{top + y2}"'
        yield f'<line {at} stroke="{PURPLE}" stroke-width="2.5"/>'


def square(row: int, column: int, side: int) -> set[Place]:
    return {(row + i, column + j) for i in range(side) for j in range(side)}


def picture(width: int, height: int, parts: list[str]) -> str:
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">\n{body}\n</svg>\n'


def shade(offset: Place, reach: int) -> str:
    """One colour for each offset: the row chooses the hue, the column the lightness."""
    hue = round(205 + 180 * (offset[0] + reach) / (2 * reach)) % 360
    light = round(42 + 40 * (offset[1] + reach) / (2 * reach))
    return f"hsl({hue}, 70%, {light}%)"


def entry(i: int, j: int, window: int) -> Place:
    """The offset, input minus output, of the matrix entry from position i to position j."""
    return i // window - j // window, i % window - j % window


def draw_operator() -> str:
    """What one output pixel reads in a depthwise convolution and in WBMM."""
    top, left, right = 34, 24, SIDE * CELL + 84

    def colour(seen: set[Place]):
        return lambda i, j: ORANGE if (i, j) == (5, 6) else BLUE if (i, j) in seen else GREY

    middle, below = SIDE * CELL / 2, top + SIDE * CELL
    parts = [text(left + middle, 20, "depthwise convolution", 15, weight="bold")]
    parts += grid(left, top, SIDE, SIDE, colour(square(3, 4, 5)))
    parts += lines(
        left + middle, below + 24, "each pixel gathers its own", "k x k neighbourhood", "the cost grows with k"
    )
    parts += [text(right + middle, 20, "WBMM", 15, weight="bold")]
    parts += grid(right, top, SIDE, SIDE, colour(square(4, 4, WINDOW)))
    parts += borders(right, top, SIDE, SIDE, WINDOW)
    notes = "each pixel reads its whole window:", "one batched matrix product", "3x3 convolutions link windows"
    parts += lines(right + middle, below + 24, *notes)
    x = right + SIDE * CELL + 76
    parts += [text(x + 2 * CELL, top + 12, "the matrix", weight="bold")]
    parts += grid(x, top + 28, 4, 4, lambda i, j: shade(entry(i, j, 2), 1))
    notes = "(2x2 window shown)", "one per channel,", "built from a table:", "equal colours are", "the same entry"
    parts += lines(x + 2 * CELL, top + 28 + 4 * CELL + 22, *notes)
    return picture(2 * SIDE * CELL + 270, SIDE * CELL + 118, parts)


def draw_table() -> str:
    """The table of a 3x3 window, and the matrix that it becomes."""
    window, size, top = 3, 20, 40
    parts = [text(50, 20, "window", weight="bold")]
    parts += grid(20, top, window, window, lambda i, j: PALE, size)
    for position in range(window * window):
        x, y = 20 + position % window * size + size / 2, top + position // window * size + 15
        parts.append(text(x, y, str(position), 11))
    parts += lines(50, top + 84, "9 positions")
    parts += [text(200, 20, "table R", weight="bold")]
    parts += grid(150, top, 5, 5, lambda i, j: shade((i - 2, j - 2), 2), size)
    parts += lines(200, top + 124, "5 x 5 offsets,", "25 weights a channel")
    parts += [text(420, 20, "matrix M = R[I]", weight="bold")]
    parts += grid(330, top, 9, 9, lambda i, j: shade(entry(i, j, window), 2), size)
    parts += [text(320, top + 15 + i * size, str(i), 11, "end") for i in range(9)]
    parts += [text(340 + i * size, top + 9 * size + 16, str(i), 11) for i in range(9)]
    parts += [text(285, top + 94, "input"), text(420, top + 9 * size + 36, "output")]
    return picture(560, 270, parts)


def draw_windows() -> str:
    """A map that does not divide into windows: padded, multiplied, cropped; and the 3x3 convolution of a D block."""
    rows, columns, top = 7, 10, 40

    def padded(i: int, j: int) -> str:
        return PALE if i >= rows or j >= columns else BLUE if i < WINDOW and WINDOW <= j < 2 * WINDOW else GREY

    def crossing(i: int, j: int) -> str:
        return ORANGE if (i, j) == (3, 4) else BLUE if (i, j) in square(2, 3, 3) else GREY

    parts = [text(94, 20, "W: windows of 4 x 4", weight="bold")]
    parts += grid(10, top, 8, 12, padded)
    parts += borders(10, top, 8, 12, WINDOW)
    parts += lines(
        94, top + 8 * CELL + 24, "7 x 10 map, padded with", "zeros to 8 x 12; the rim", "is cropped afterwards"
    )
    parts += [text(310, 20, "D: 3x3 convolution", weight="bold")]
    parts += grid(254, top, 8, 8, crossing)
    parts += borders(254, top, 8, 8, WINDOW)
    parts += lines(
        310, top + 8 * CELL + 24, "reads across the borders:", "after W and D, windows", "know their neighbours"
    )
    return picture(420, 226, parts)


def draw_fusion() -> str:
    """Branches as tables over the same offsets: their sum is one table."""
    size, top, reach = 16, 44, 3  # a 4x4 window has offsets -3 to 3

    def learned(i: int, j: int) -> str:
        return shade((i - reach, j - reach), reach)

    def within(k: int, colour: str):
        return lambda i, j: colour if max(abs(i - reach), abs(j - reach)) <= k else PALE

    def summed(i: int, j: int) -> str:
        distance = max(abs(i - reach), abs(j - reach))
        return learned(i, j) if distance > 1 else ORANGE if distance else INK

    names = ("WBMM", "learned table"), ("shortcut", "1 at offset 0"), ("3x3 kernel", "its nine taps")
    parts, x = [], 40
    for (name, note), colour in zip(names, (learned, within(0, INK), within(1, ORANGE)), strict=True):
        parts += [text(x + 56, 24, name, weight="bold"), *grid(x, top, 7, 7, colour, size)]
        parts += lines(x + 56, top + 134, note)
        parts += [text(x + 128, top + 62, "+" if name != names[-1][0] else "=", 22)]
        x += 144
    parts += [text(x + 56, 24, "fused table", weight="bold"), *grid(x, top, 7, 7, summed, size)]
    parts += lines(x + 56, top + 134, "batch norm: a scale", "and one bias")
    return picture(600, 210, parts)


def draw_hierarchical() -> str:
    """Two window scales in one matrix; a 4x4 window over 2x2 ones is drawn, the models have 14 over 7."""
    size, top, order = 13, 40, [(r + i, c + j) for r in (0, 2) for c in (0, 2) for i in (0, 1) for j in (0, 1)]

    def matrix(i: int, j: int) -> str:
        (a, b), (c, d) = order[i], order[j]
        local = (a // 2, b // 2) == (c // 2, d // 2)
        return shade((a - c, b - d), 1) if local else f"hsl(210, 12%, {72 + 3 * (abs(a - c) + abs(b - d))}%)"

    parts = [text(66, 20, "one window", weight="bold")]
    parts += grid(10, top, 4, 4, lambda i, j: shade((i % 2, j % 2), 1), 28)
    parts += borders(10, top, 4, 4, 2, 28)
    parts += lines(66, top + 136, "global: all of it", "local: each quarter")
    parts += [text(294, 20, "one matrix", weight="bold")]
    parts += grid(190, top, 16, 16, matrix, size)
    parts += borders(190, top, 16, 16, 4, size)
    parts += lines(
        294, top + 16 * size + 24, "grey: the global table; in colour, on the", "four diagonal blocks: global + local"
    )
    return picture(430, 300, parts)


DRAWINGS = {
    "operator": draw_operator,
    "table": draw_table,
    "windows": draw_windows,
    "fusion": draw_fusion,
    "hierarchical": draw_hierarchical,
}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")

"""Draws docs/images/operator.svg: what one output pixel reads in a depthwise convolution and in WBMM, and its weights.

python scripts/draw_operator.py
"""

from pathlib import Path

TARGET = Path(__file__).parents[1] / "docs" / "images" / "operator.svg"
CELL, SIDE, WINDOW = 14, 12, 4  # pixels of a cell, cells of the map, cells of a window
GREY, BLUE, ORANGE, INK = "#d0d7de", "#54aeff", "#e16f24", "#57606a"  # readable on white and on dark pages


def text(x: float, y: float, line: str, size: int = 13, anchor: str = "middle", weight: str = "normal") -> str:
    style = f'font-family="sans-serif" font-size="{size}" font-weight="{weight}" fill="{INK}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style}>{line}</text>'


def cell(x: float, y: float, colour: str) -> str:
    return f'<rect x="{x + 0.5}" y="{y + 0.5}" width="{CELL - 1}" height="{CELL - 1}" fill="{colour}"/>'


def draw_map(left: int, top: int, seen: set[tuple[int, int]], pixels: set[tuple[int, int]], windows: bool) -> list[str]:
    """A feature map: `pixels` are computed from `seen`."""
    parts = []
    for row in range(SIDE):
        for column in range(SIDE):
            here = (row, column)
            colour = ORANGE if here in pixels else BLUE if here in seen else GREY
            parts.append(cell(left + column * CELL, top + row * CELL, colour))
    if windows:
        for step in range(0, SIDE + 1, WINDOW):
            at, end = step * CELL, SIDE * CELL
            for x1, y1, x2, y2 in ((at, 0, at, end), (0, at, end, at)):
                line = f'x1="{left + x1}" y1="{top + y1}" x2="{left + x2}" y2="{top + y2}"'
                parts.append(f'<line {line} stroke="{INK}" stroke-width="2"/>')
    return parts


def square(row: int, column: int, side: int) -> set[tuple[int, int]]:
    return {(row + i, column + j) for i in range(side) for j in range(side)}


def draw_matrix(left: int, top: int) -> list[str]:
    """The matrix of a 2x2 window, coloured by offset: equal colours are one entry of the table."""
    shades = ["#0969da", "#54aeff", "#80ccff", "#b6e3ff", "#e16f24", "#ffb77c", "#ffd8b5", "#8250df", "#c297ff"]
    parts = []
    for i in range(4):
        for j in range(4):
            offset = (i // 2 - j // 2 + 1) * 3 + i % 2 - j % 2 + 1
            parts.append(cell(left + j * CELL, top + i * CELL, shades[offset]))
    return parts


def draw() -> str:
    width, height, top = 2 * SIDE * CELL + 270, SIDE * CELL + 118, 34
    left, right = 24, SIDE * CELL + 84
    parts = [text(left + SIDE * CELL / 2, 20, "depthwise convolution", 15, weight="bold")]
    parts += draw_map(left, top, square(3, 4, 5), {(5, 6)}, windows=False)
    parts += [text(right + SIDE * CELL / 2, 20, "WBMM", 15, weight="bold")]
    parts += draw_map(right, top, square(4, 4, WINDOW), {(5, 6)}, windows=True)
    below = top + SIDE * CELL
    notes = (
        (left, ("each pixel gathers its own", "k x k neighbourhood", "the cost grows with k")),
        (right, ("each pixel reads its whole window:", "one batched matrix product", "3x3 convolutions link windows")),
    )
    for x, lines in notes:
        parts += [text(x + SIDE * CELL / 2, below + 24 + 18 * i, line) for i, line in enumerate(lines)]
    x = right + SIDE * CELL + 76
    parts += [text(x + 2 * CELL, top + 12, "the matrix", weight="bold"), *draw_matrix(x, top + 28)]
    lines = ("(2x2 window shown)", "one per channel,", "built from a table:", "equal colours are", "the same entry")
    parts += [text(x + 2 * CELL, top + 28 + 4 * CELL + 22 + 18 * i, line) for i, line in enumerate(lines)]
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">\n{body}\n</svg>\n'


if __name__ == "__main__":
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(draw(), encoding="utf-8")

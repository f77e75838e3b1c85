"""Text for people: tables, lists of names, and what a file says made safe to print."""

import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

LONGEST = 200  # characters of a name that came from a file
NARROWEST = 20  # characters of a column that is wrapped


def printable(text: object, limit: int = LONGEST) -> str:
    r"""Text from a file as one line that a terminal shows and does not obey.

    A control character, a line break, an override of the writing direction or anything else that has no picture becomes
    its escape: ESC is written `\x1b`. What is longer than `limit` is cut.
    """
    text = str(text)
    cut = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def first_line(error: BaseException) -> str:
    """What an error says, in one line of printable text; its type where it says nothing."""
    return printable((str(error).strip().splitlines() or [type(error).__name__])[0], limit=300)


def some(names: Sequence[str], most: int = 3) -> str:
    """The first `most` names and how many more there are: `a, b, c and 4 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(printable, names[:most])) + more


def counted(number: int, noun: str) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def terminal_width() -> int | None:
    """The columns of the terminal that standard output goes to; None where it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def render_table(
    headers: Sequence[str], rows: Sequence[Sequence[object]], markdown: bool = False, width: int | None = None
) -> str:
    """Columns aligned for a terminal, or a Markdown table; numbers go to the right.

    Args:
        headers, rows: what stands in the cells.
        markdown: with bars, for a file.
        width: wrap the widest columns so that lines have at most so many characters; None for lines of any length.
    """
    cells = [[printable(cell, limit=10_000) for cell in row] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(headers, *cells, strict=True)]
    right = [all(_is_number(row[i]) for row in cells) for i in range(len(headers))]

    if markdown:
        rule = "| " + " | ".join("---:" if r else "---" for r in right) + " |"
        return "\n".join([f"| {' | '.join(headers)} |", rule, *(f"| {' | '.join(row)} |" for row in cells)])
    while width and sum(widths) + 2 * len(widths) - 2 > width and max(widths) > NARROWEST:
        widths[widths.index(max(widths))] -= 1

    def line(row: Sequence[str]) -> str:
        parts = [text.rjust(w) if r else text.ljust(w) for text, w, r in zip(row, widths, right, strict=True)]
        return "  ".join(parts).rstrip()

    def lines(row: Sequence[str]) -> list[str]:
        wrapped = [textwrap.wrap(text, w) if len(text) > w else [text] for text, w in zip(row, widths, strict=True)]
        return [line(part) for part in zip_longest(*wrapped, fillvalue="")]

    rule = ["-" * w for w in widths]
    return "\n".join(text for row in (headers, rule, *cells) for text in lines(row))


def _is_number(text: str) -> bool:
    return text in ("", "-") or text.strip("x%").replace(".", "", 1).replace(",", "").isdigit()

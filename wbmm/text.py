"""Tables as text or Markdown."""

from collections.abc import Sequence


def render_table(headers: Sequence[str], rows: Sequence[Sequence[object]], markdown: bool = False) -> str:
    """Columns aligned for a terminal, or a Markdown table; numbers go to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(headers, *cells, strict=True)]
    right = [all(_is_number(row[i]) for row in cells) for i in range(len(headers))]

    def line(row: Sequence[str], gap: str) -> str:
        parts = [text.rjust(w) if r else text.ljust(w) for text, w, r in zip(row, widths, right, strict=True)]
        return gap.join(parts).rstrip()

    if markdown:
        rule = "| " + " | ".join("---:" if r else "---" for r in right) + " |"
        return "\n".join([f"| {' | '.join(headers)} |", rule, *(f"| {' | '.join(row)} |" for row in cells)])
    return "\n".join([line(headers, "  "), line(["-" * w for w in widths], "  "), *(line(row, "  ") for row in cells)])


def _is_number(text: str) -> bool:
    return text in ("", "-") or text.strip("x%").replace(".", "", 1).replace(",", "").isdigit()

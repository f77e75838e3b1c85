"""A report as blocks, written once as HTML with everything inside and once as Markdown with its pictures beside it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from wbmm.text import render_table

from .chart import STYLE, Chart

__all__ = ["VERDICTS", "Block", "Code", "Figures", "Heading", "Paragraph", "TableBlock", "to_html", "to_markdown"]

VERDICTS = {"holds": "holds here", "partly": "in part", "fails": "does not", "unknown": "not measured"}


@dataclass(frozen=True)
class Heading:
    """A section, or with `level` 3 a part of one."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Code:
    """Commands."""

    text: str


@dataclass(frozen=True)
class TableBlock:
    """Columns of text.

    Attributes:
        headers, rows: in order.
        theirs: columns that hold the paper's figures, which are set apart.
        marks: (row, column) to one of `VERDICTS`, `worse` or `better`.
        folded: a summary; the table opens under it.
        stacked: on a phone, a row is a card and not a line.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    theirs: Sequence[int] = ()
    marks: tuple[tuple[int, int, str], ...] = ()
    folded: str = ""
    stacked: bool = False


@dataclass(frozen=True)
class Figures:
    """Pictures side by side, with a caption."""

    charts: Sequence[Chart]
    caption: str


Block = Heading | Paragraph | Code | TableBlock | Figures

CSS = """
:root{color-scheme:light dark;--ink:#1c2430;--faint:#5b6675;--rule:#dde3ea;--ground:#f4f6f9;--card:#fff;
--theirs:#f3efe4;
--good:#1d7a3e;--goodback:#e2f4e8;--mid:#8a6100;--midback:#fdf1d3;--bad:#b3261e;--badback:#fde7e5;--none:#5b6675;
--noneback:#e9edf2;
--link:#1f5fbf}
@media(prefers-color-scheme:dark){:root{--ink:#e6ebf2;--faint:#9aa6b5;--rule:#2c3642;--ground:#0f141a;--card:#171d25;
--theirs:#242117;--good:#7fd89b;--goodback:#16321f;--mid:#f0c24b;--midback:#33290d;--bad:#ff8f88;--badback:#3a1715;
--none:#9aa6b5;
--noneback:#232b35;--link:#7db0ff}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 18px 60px}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 6px} h2{font-size:1.3rem;margin:44px 0 10px;padding-top:14px;
border-top:1px solid var(--rule)}
h3{font-size:1.05rem;margin:28px 0 8px} p{margin:8px 0 14px;max-width:78ch} a{color:var(--link)}
p,td,th,li,figcaption{overflow-wrap:break-word}
nav{display:flex;flex-wrap:wrap;gap:6px 16px;margin:14px 0 4px;font-size:.92rem}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--rule);border-radius:10px;margin:10px 0 18px}
table{border-collapse:collapse;width:100%;font-size:.86rem;font-variant-numeric:tabular-nums}
th,td{padding:6px 10px;text-align:left;border-bottom:1px solid var(--rule);vertical-align:top}
th{color:var(--faint);font-weight:600;white-space:nowrap} tr:last-child td{border-bottom:0}
td.n,th.n{text-align:right;white-space:nowrap} td:first-child{min-width:11em} td.wide{min-width:17em}
.theirs{background:var(--theirs)}
tbody tr:hover td{background:color-mix(in srgb,var(--link) 7%,transparent)}
.badge{display:inline-block;padding:1px 9px;border-radius:99px;font-size:.8rem;font-weight:600;white-space:nowrap}
.holds,.better{color:var(--good);background:var(--goodback)} .partly{color:var(--mid);background:var(--midback)}
.fails,.worse{color:var(--bad);background:var(--badback)} .unknown{color:var(--none);background:var(--noneback)}
td.worse,td.better{font-weight:600}
figure{margin:12px 0 22px} figcaption{color:var(--faint);font-size:.9rem;margin-top:8px;max-width:82ch}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr));gap:12px}
.charts>div{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:8px 6px 4px;min-width:0;
max-width:560px}
.charts svg{display:block;width:100%;height:auto}
pre{overflow-x:auto;background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:10px 12px;
font-size:.82rem}
details{margin:10px 0} summary{cursor:pointer;color:var(--link)}
@media(max-width:600px){main{padding:18px 12px 40px} h1{font-size:1.4rem} table{font-size:.8rem}
th,td{padding:5px 7px}
.stacked thead{display:none} .stacked tr{display:block;padding:10px 4px;border-bottom:1px solid var(--rule)}
.stacked td{display:block;border:0;padding:2px 8px;min-width:0!important} .stacked td:first-child{font-weight:600}
.stacked td:nth-child(n+3)::before{content:attr(data-head) ": ";color:var(--faint)}}
@media print{.scroll{overflow:visible}}
""".strip()


def to_html(title: str, lead: str, blocks: Sequence[Block]) -> str:
    """One file with styles and pictures inside; it asks for nothing from anywhere."""
    headings = [block for block in blocks if isinstance(block, Heading)]
    nav = "".join(f'<a href="#s{i}">{escape(block.text)}</a>' for i, block in enumerate(headings) if block.level == 2)
    numbers = {id(block): i for i, block in enumerate(headings)}
    body = "\n".join(_html(block, numbers.get(id(block))) for block in blocks)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title>\n<style>{CSS}\n{STYLE}</style></head>\n<body><main>\n<h1>{escape(title)}</h1>"
        f"<p>{_inline(lead)}</p><nav>{nav}</nav>\n{body}\n</main></body></html>\n"
    )


def _inline(text: str) -> str:
    """Text with `code` and *emphasis* in it."""
    parts = escape(text).split("`")
    return "".join(
        f"<code>{part}</code>" if i % 2 else re.sub(r"\*(\w[^*]*)\*", r"<em>\1</em>", part)
        for i, part in enumerate(parts)
    )


def _html(block: Block, number: int | None) -> str:
    """`number` is that of a heading, which the links above lead to."""
    if isinstance(block, Heading):
        return f'<h{block.level} id="s{number}">{escape(block.text)}</h{block.level}>'
    if isinstance(block, Paragraph):
        return f"<p>{_inline(block.text)}</p>"
    if isinstance(block, Code):
        return f"<pre><code>{escape(block.text)}</code></pre>"
    if isinstance(block, Figures):
        pictures = "".join(f"<div>{chart.svg()}</div>" for chart in block.charts)
        return f'<figure><div class="charts">{pictures}</div><figcaption>{_inline(block.caption)}</figcaption></figure>'
    table = _html_table(block)
    return f"<details><summary>{escape(block.folded)}</summary>{table}</details>" if block.folded else table


def _html_table(table: TableBlock) -> str:
    marks = {(row, column): mark for row, column, mark in table.marks}
    numeric = [all(_is_figure(row[i]) for row in table.rows) for i in range(len(table.headers))]
    wide = [max((len(row[i]) for row in table.rows), default=0) > 60 for i in range(len(table.headers))]

    def classes(column: int, *more: str) -> str:
        kinds = ["n"] * numeric[column] + ["theirs"] * (column in table.theirs) + ["wide"] * wide[column]
        found = " ".join([*kinds, *more])
        return f' class="{found}"' if found else ""

    def cell(row: int, column: int, text: str) -> str:
        mark = marks.get((row, column), "")
        head = f' data-head="{escape(table.headers[column])}"' if table.stacked else ""
        if mark in VERDICTS:
            return f'<td{classes(column)}{head}><span class="badge {mark}">{_inline(text)}</span></td>'
        return f"<td{classes(column, *([mark] if mark else []))}{head}>{_inline(text)}</td>"

    head = "".join(f"<th{classes(i)}>{_inline(text)}</th>" for i, text in enumerate(table.headers))
    rows = "".join(
        f"<tr>{''.join(cell(r, c, text) for c, text in enumerate(row))}</tr>" for r, row in enumerate(table.rows)
    )
    kind = ' class="stacked"' if table.stacked else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


_FIGURE = re.compile(r"(--)?|[-+±]?[\d.:]+[x%kMG]?([, ]+[-+±]?[\d.:]+[x%kMG]?)*( h \d+ min| \([\d.]+ to [\d.]+\))?")


def _is_figure(text: str) -> bool:
    return _FIGURE.fullmatch(text) is not None


def to_markdown(title: str, lead: str, blocks: Sequence[Block], pictures: str) -> str:
    """The same in Markdown; `pictures` is the folder of the pictures, relative to the page."""
    return "\n\n".join([f"# {title}", lead, *(_markdown(block, pictures) for block in blocks)]) + "\n"


def _markdown(block: Block, pictures: str) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Paragraph):
        return block.text
    if isinstance(block, Code):
        return f"```sh\n{block.text}\n```"
    if isinstance(block, Figures):
        images = "\n".join(f"![{chart.title}]({pictures}/{chart.name}.svg)" for chart in block.charts)
        return f"{images}\n\n{block.caption}"
    marks = {(row, column): mark for row, column, mark in block.marks}
    bold = {"worse", "better", *VERDICTS}
    rows = [
        [f"**{text}**" if marks.get((r, c)) in bold and text else text for c, text in enumerate(row)]
        for r, row in enumerate(block.rows)
    ]
    table = render_table(block.headers, rows, markdown=True)
    return f"<details><summary>{block.folded}</summary>\n\n{table}\n\n</details>" if block.folded else table

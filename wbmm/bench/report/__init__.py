"""`wbmm bench report`: the logs of benchmarks as one page, with the paper's figures beside ours and what holds here."""

import argparse
from collections import Counter
from pathlib import Path

from wbmm.io.atomic import write_text
from wbmm.machine import measured_line
from wbmm.text import some

from .chart import Chart
from .findings import findings_table, net_findings, operator_findings
from .measured import Machine, against_blocks, as_in_the_paper, load_runs, op_groups, op_speeds, paper_operators
from .net_sections import SECTIONS
from .operator_section import operator_blocks
from .page import Block, Code, Figures, Heading, Paragraph, to_html, to_markdown

__all__ = ["build_blocks", "run"]

EXAMPLE = "wbmm bench report results --out results/report"
TITLE = "WBMM: the paper's speed tables, measured here"
PICTURES = "figures"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of --out, or .jsonl files in them")
    parser.add_argument("--against", type=Path, metavar="OLD", help="an older run; what became slower is marked")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the pages go (default: the first RUN's folder)")


def run(args: argparse.Namespace) -> int:
    machines = load_runs(args.runs)
    out = args.out or (args.runs[0] if args.runs[0].is_dir() else args.runs[0].parent)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: it is a file; expected a folder")
    blocks = build_blocks(machines)
    if args.against is not None:
        blocks = [*against_blocks(machines, load_runs([args.against]), str(args.against)), *blocks]
    _draw(out / PICTURES, [chart for block in blocks if isinstance(block, Figures) for chart in block.charts])
    write_text(out / "report.html", to_html(TITLE, _lead(machines), blocks))
    write_text(out / "report.md", to_markdown(TITLE, _lead(machines), blocks, PICTURES))
    print(f"written to {out}: report.html, report.md, {PICTURES}/")
    return 0


def _draw(folder: Path, charts: list[Chart]) -> None:
    """Writes the pictures, and removes those of an earlier report that this one does not have."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in set(folder.glob("*.svg")) - {folder / f"{chart.name}.svg" for chart in charts}:
        if 'class="chart"' in path.read_text(encoding="utf-8")[:200]:
            path.unlink()
    for chart in charts:
        write_text(folder / f"{chart.name}.svg", chart.svg(standalone=True) + "\n")


def _lead(machines: list[Machine]) -> str:
    return (
        f"Measured on {some([machine.name for machine in machines])}. The paper's figures are from an NVIDIA A800, an "
        "Intel i7-13700K and a Jetson Orin Nano; they stand in columns and curves of their own. Speed is a ratio from "
        "one run in which all candidates take turns."
    )


def build_blocks(machines: list[Machine]) -> list[Block]:
    """The page of some machines, one after another."""
    if len(machines) == 1:
        return _machine_blocks(machines[0])
    blocks: list[Block] = []
    for number, machine in enumerate(machines, 1):
        own = _machine_blocks(machine)
        for chart in (chart for block in own if isinstance(block, Figures) for chart in block.charts):
            chart.name = f"{number}-{chart.name}"
        blocks += [Heading(machine.name), *own]
    return blocks


def _machine_blocks(machine: Machine) -> list[Block]:
    benches = machine.benches
    like = {name: [entry for entry in entries if as_in_the_paper(entry)] for name, entries in benches.items()}
    operators = next(iter(op_groups(like.get("op", [])).values()), [])
    findings = [*operator_findings(op_speeds(operators), paper_operators()), *net_findings(like)]
    counts = Counter(finding.verdict for finding in findings)
    plural = {"holds": "hold here", "partly": "hold in part", "fails": "do not", "unknown": "were not measured"}
    text = ", ".join(f"{counts[key]} {label}" for key, label in plural.items() if counts[key])
    blocks: list[Block] = [
        Heading("What holds here"),
        Paragraph(
            f"The paper's findings on speed, one by one, as tests of single cells: {text}. The same rule is put to the "
            "paper's own figures. A ratio within a few per cent of 1 is noise: the tables below have its spread."
        ),
        findings_table(findings),
    ]
    if op_groups(benches.get("op", [])):
        blocks += operator_blocks(benches["op"])
    for name, section in SECTIONS.items():
        if name in benches:
            blocks += section(benches[name])
    versions = measured_line({**machine.facts, "date": machine.dates()})
    return [*blocks, Heading("How it was measured"), Paragraph(versions), Code("\n".join(machine.commands()))]

"""What a report is about: logs by machine and benchmark, and the paper's figures under the same keys."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from wbmm.bench.log import Entry, read_log
from wbmm.bench.operators import paper_figures
from wbmm.paper_tables import load_tables
from wbmm.timing import Timing

__all__ = [
    "BENCHES",
    "Machine",
    "OpKey",
    "OpSpeeds",
    "load_runs",
    "op_groups",
    "op_speeds",
    "paper_models",
    "paper_operators",
    "paper_segmentors",
    "paper_training",
    "ratio",
    "ratio_range",
]

BENCHES = ("op", "model", "edge", "train", "seg", "det")
SAME = ("machine", "threads", "device", "torch")

OpKey = tuple[str, int, int, int]  # method, side of the kernel or window, batch, side of the map
OpSpeeds = dict[OpKey, float]


@dataclass
class Machine:
    """What was measured on one machine with one set of versions.

    Attributes:
        facts: of `wbmm.machine.machine_facts`.
        benches: name to cells.
    """

    facts: dict[str, str]
    benches: dict[str, list[Entry]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        if self.facts.get("device", "cpu").startswith("cuda"):
            return self.facts["machine"]
        return f"{self.facts.get('threads', '?')} threads of {self.facts.get('machine', 'an unknown machine')}"

    def commands(self) -> list[str]:
        return list(dict.fromkeys(entry.command for entries in self.benches.values() for entry in entries))

    def dates(self) -> str:
        found = sorted({entry.facts.get("date", "") for entries in self.benches.values() for entry in entries} - {""})
        return "" if not found else found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def load_runs(paths: Sequence[Path]) -> list[Machine]:
    """The logs in files or folders, one `Machine` for each that they were measured on."""
    found: dict[tuple, Machine] = {}
    for path in paths:
        files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        entries = [entry for file in files if file.is_file() for entry in read_log(file) if entry.bench in BENCHES]
        if not entries:
            raise ValueError(
                f"{path}: there is no log of a benchmark; expected a folder that `wbmm bench op --out` wrote, or a "
                ".jsonl file in one"
            )
        for entry in entries:
            machine = found.setdefault(tuple(entry.facts.get(key) for key in SAME), Machine(entry.facts))
            machine.benches.setdefault(entry.bench, []).append(entry)
    return list(found.values())


def op_groups(entries: Sequence[Entry]) -> dict[tuple, list[Entry]]:
    """Cells of the operator by (type, layout, mode, precision, channels); what the paper measured comes first."""
    keys = ("dtype", "layout", "mode", "precision", "channels")
    groups: dict[tuple, list[Entry]] = {}
    for entry in entries:
        if "map" in entry.cell:
            groups.setdefault(tuple(entry.cell[key] for key in keys), []).append(entry)
    return dict(sorted(groups.items(), key=lambda item: item[0][:3] != ("float32", "nchw", "forward")))


def op_speeds(entries: Sequence[Entry]) -> OpSpeeds:
    """Images a second; a backend's method is `WBMM (name)`, a compiled one's ends in `, compiled`."""
    found: OpSpeeds = {}
    for entry in entries:
        for name in entry.results if "map" in entry.cell else ():
            timing = entry.timing(name)
            if timing is not None:
                found[(*split_name(name), entry.cell["batch"], entry.cell["map"])] = entry.cell["batch"] / timing.median
    return found


def split_name(name: str) -> tuple[str, int]:
    """`WBMM 7x7 (onednn)` as `WBMM (onednn)` and 7."""
    method, _, rest = name.partition(" ")
    size, _, more = rest.partition("x")
    tail = more[len(size) :]
    return f"{method}{tail}", int(size)


def paper_operators() -> OpSpeeds:
    return paper_figures()


def _sheet(name: str) -> list[dict[str, str]]:
    text = resources.files("wbmm.bench").joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def paper_models(table: str) -> dict[tuple[str, str, str, int, int], float]:
    """The paper's images a second by (machine, size, net, px, batch); `table` is desktop or edge."""
    return {
        (f"{row['machine']}", row["size"], row["net"], int(row["px"]), int(row["batch"])): float(row["images_per_s"])
        for row in _sheet("paper_models.csv")
        if row["table"] == table
    }


def paper_segmentors() -> dict[tuple[str, str, int, int, int], float]:
    """The paper's images a second on an A800 by (size, backbone, height, width, batch)."""
    return {
        (row["size"], row["backbone"], int(row["height"]), int(row["width"]), int(row["batch"])): float(
            row["images_per_s"]
        )
        for row in _sheet("paper_segmentors.csv")
    }


def paper_training() -> dict[tuple[str, str], tuple[float, float]]:
    """Seconds of an ImageNet epoch on 8 A800 and GB of each of them, by (size, net)."""
    found = {}
    for table in ("imagenet", "base"):
        for row in load_tables()[table].rows:
            net = "W" if row.model.startswith("wbmm") else "UA" if row.large_kernel else "UN"
            minutes, seconds = row.paper["time"].split(":")
            found[row.model.rsplit("_", 1)[1], net] = 60 * int(minutes) + int(seconds), float(row.paper["memory"])
    return found


def ratio(timing: Timing | None, over: Timing | None) -> float | None:
    """How much faster `timing` is than `over`."""
    return None if timing is None or over is None else over.median / timing.median


def ratio_range(timing: Timing, over: Timing) -> tuple[float, float]:
    """The ratio at the quartiles of both."""
    return over.low / timing.high, over.high / timing.low

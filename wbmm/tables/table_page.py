"""A measured table as Markdown and CSV, with the places where the paper disagrees with itself."""

import csv
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from wbmm.bench.segmentors import paper_speeds
from wbmm.config_files import resolve_config
from wbmm.io.atomic import atomic_path
from wbmm.machine import machine_facts, measured_line
from wbmm.paper_tables import Row, Table, get_table, load_dense_tables, load_tables
from wbmm.text import render_table

from .measure import Measured, records

__all__ = [
    "check_pages",
    "contradictions",
    "csv_text",
    "dense_contradictions",
    "differences",
    "markdown_text",
    "read_trained",
    "write_pages",
]

SAME = {"top1": "Top-1", "miou": "mIoU"}


def _net(table: Table, row: Row) -> str | None:
    """The name of the row's net, the same for the same net; None where it has no recipe of its own."""
    return resolve_config(f"table:{table.name}/{row.id}")[1]["out"] if row.recipe and not row.large_kernel else None


def contradictions(name: str) -> list[str]:
    """The same net with other figures elsewhere, and claims that a table's figures do not bear out."""
    if name not in load_tables():
        return []
    return [*_same_nets(name), *_memory(name), *_consistent(name)]


def _same_nets(name: str) -> list[str]:
    table, found = get_table(name), []
    others = [(other, row) for other in load_tables().values() for row in other.rows if other.recipe_changes == {}]
    for row in table.rows:
        net = _net(table, row)
        for key, label in SAME.items():
            if net is None or key not in row.paper:
                continue
            places = {
                f"{other.name}/{twin.id}": twin.paper[key]
                for other, twin in others
                if key in twin.paper and (other.name, twin.id) != (name, row.id) and _net(other, twin) == net
            }
            places = {where: value for where, value in places.items() if _differ(value, row.paper[key])}
            if places:
                listed = ", ".join(f"{value} in `{where}`" for where, value in places.items())
                found.append(f"`{row.id}` has {label} {row.paper[key]} here and, for the same net, {listed}.")
    return found


def _differ(one: object, other: object) -> bool:
    """Whether two printed figures differ by more than the rounding of the one with fewer digits."""
    digits = min(len(str(value).partition(".")[2]) for value in (one, other))
    return abs(float(one) - float(other)) > 0.5 * 10**-digits + 1e-9


def _memory(name: str) -> list[str]:
    if name != "cross-operator":
        return []
    ours, large = (get_table(name).row(row).paper["memory"] for row in ("wbmm", "dw13"))
    if ours <= large:
        return []
    return [f"The text says that w = 7 takes less memory than 13x13; the table has {ours} against {large} GB."]


def _consistent(name: str) -> list[str]:
    if name != "windows":
        return []
    speeds, found = paper_speeds(), []
    for (size, backbone, height, width, batch), speed in speeds.items():
        ratio = speed / speeds[size, "unireplknet", height, width, batch]
        if backbone == "hier" and ratio < 1:
            found.append(f"{ratio:.3f}x for {size.upper()} at {height}x{width}, batch {batch}")
    text = (
        "The text says that hierarchical windows are consistently faster than UniRepLKNet in segmentors; its table has"
    )
    return [f"{text} {' and '.join(found)}."] if found else []


def dense_contradictions() -> list[str]:
    """What the table of ADE20K prints for nets of other tables."""
    printed = {row.id: row.paper["miou"] for row in load_dense_tables()["ade20k"].rows}
    pairs = {"7x7-t": ("windows", "w7"), "hier-t": ("windows", "hier")}
    return [
        f"`{here}` has mIoU {printed[here]} here and {get_table(table).row(row).paper['miou']} in `{table}/{row}`."
        for here, (table, row) in pairs.items()
        if _differ(printed[here], get_table(table).row(row).paper["miou"])
    ]


NONE = "--"
Column = tuple[str, Callable[[dict], object]]


def _heading(name: str) -> str:
    return f"# wbmm table {name}\n"


def _number(key: str, digits: int, suffix: str = "") -> Callable[[dict], str]:
    return lambda r: NONE if r.get(key) is None else f"{r[key]:.{digits}f}{suffix}"


def _printed(key: str) -> Callable[[dict], str]:
    """As the paper prints it, with what follows its plus-minus sign."""

    def show(r: dict) -> str:
        if r[f"{key}_paper"] is None:
            return NONE
        spread = r.get(f"{key}_pm_paper")
        return str(r[f"{key}_paper"]) if spread is None else f"{r[f'{key}_paper']} ± {spread}"

    return show


def _table(rows: list[dict], columns: list[Column]) -> str:
    """Without the columns that no row has a value in."""
    filled = [(head, show) for head, show in columns if any(show(r) != NONE for r in rows)]
    cells = [[show(r) for _, show in filled] for r in rows]
    return render_table([head for head, _ in filled], cells, markdown=True)


def _sizes(rows: list[dict]) -> str:
    return _table(
        rows,
        [
            ("row", lambda r: r["label"]),
            ("id", lambda r: f"`{r['row']}`"),
            ("params M, paper", _printed("params_m")),
            ("params M, training form", _number("params_m", 2)),
            ("params M, fused", _number("params_m_fused", 2)),
            ("FLOPs G, paper", _printed("flops_g")),
            ("FLOPs G, training form", _number("flops_g", 2)),
            ("FLOPs G, fused", _number("flops_g_fused", 2)),
            ("Top-1, paper", _printed("top1")),
            ("mIoU, paper", _printed("miou")),
        ],
    )


ROUNDING = 0.0501  # of the paper's sizes, which have one digit


def differences(row: dict) -> list[str]:
    """The sizes, `params_m` or `flops_g`, that in neither form are the paper's within its rounding."""
    found = []
    for key in ("params_m", "flops_g"):
        paper, counts = row[f"{key}_paper"], (row[key], row[f"{key}_fused"])
        if paper is not None and all(abs(count - paper) > ROUNDING for count in counts):
            found.append(key)
    return found


def _unlike(rows: list[dict]) -> list[str]:
    names = {"params_m": "parameters", "flops_g": "FLOPs"}
    found = [f"{row['label']} ({names[key]})" for row in rows for key in differences(row)]
    if not found:
        return []
    where = "docs/models.md and docs/baselines.md"
    return [f"Further from the paper than its rounding, in either form: {', '.join(found)}. {where} say why.\n"]


def _speeds(rows: list[dict], measured: Measured) -> str:
    inference = [
        column
        for batch in measured.inference
        for column in (
            (f"inference at batch {batch}, measured ratio", _number(f"inference_b{batch}_ratio", 2, "x")),
            (f"images/s at batch {batch}", _number(f"inference_b{batch}_images_per_s", 2)),
            *_layout(rows, f"inference_b{batch}", f"layout at batch {batch}"),
        )
    ]
    batch = measured.training_batch
    return _table(
        rows,
        [
            ("row", lambda r: r["label"]),
            ("training, paper's ratio", _number("training_ratio_paper", 2, "x")),
            (f"training at batch {batch}, measured ratio", _number("training_ratio", 2, "x")),
            ("training, paper's printed speed-up", _number("speedup_paper", 2, "x")),
            (f"training images/s at batch {batch}", _number("training_images_per_s", 2)),
            ("ImageNet epoch, paper (8 A800)", _printed("epoch_time")),
            ("ImageNet epoch here, extrapolated", lambda r: r["epoch_here"] or NONE),
            ("memory GB, paper", _printed("memory_gb")),
            ("peak MB here", _number("peak_mb", 0)),
            *_layout(rows, "training", "training layout"),
            ("inference, paper's ratio", _number("inference_ratio_paper", 2, "x")),
            *inference,
            ("ratio to", lambda r: f"`{r['baseline']}`"),
        ],
    )


def _layout(rows: list[dict], name: str, heading: str) -> list[Column]:
    """A column with each row's memory format, unless it is the same for all."""
    key = f"{name}_layout"
    return [(heading, lambda r: r[key] or NONE)] if len({r[key] for r in rows if r[key]}) > 1 else []


def _accuracies(rows: list[dict]) -> str:
    return _table(
        rows,
        [
            ("row", lambda r: r["label"]),
            ("small net", lambda r: f"`{r['small_model']}`"),
            ("params M", _number("small_params_m", 2)),
            ("top-1 of each seed, %", lambda r: r["small_top1_seeds"] or NONE),
            ("mean", _number("small_top1_mean", 2)),
            ("standard deviation", _number("small_top1_std", 2)),
            ("spread (highest - lowest)", _number("small_top1_spread", 2)),
        ],
    )


def _small_section(rows: list[dict], measured: Measured) -> str:
    run = next(iter(measured.small.values())).runs[0]
    return (
        f"{SMALL}\n"
        f"The rows' small nets, one recipe for all (`{measured.recipe}`): {run.get('data.size')} px, "
        f"{run.get('schedule.epochs')} epochs, {run.step} steps of {run.get('global_batch')} images, from random "
        "weights. Top-1 on the validation set after the last epoch. A difference below the spread of the seeds says "
        "nothing, and none of them predicts ImageNet: docs/ablations.md.\n\n"
        f"{_accuracies(rows)}\n\n"
    )


@dataclass(frozen=True)
class Trained:
    """Small-scale accuracy of an older page.

    Attributes:
        section: as it stands there, with where and when it was measured.
        columns: of the sheet, by row id.
    """

    section: str
    columns: dict[str, dict[str, str]]


SMALL = "## Small-scale accuracy, measured\n"
_KEPT = "These accuracies are of an earlier run than the speed above. "


def read_trained(folder: Path, name: str) -> Trained:
    """The small-scale accuracy of the page in a folder, with the line that says where and when it was measured."""
    page, sheet = folder / f"{name}.md", folder / f"{name}.csv"
    text = page.read_text(encoding="utf-8") if page.is_file() and sheet.is_file() else ""
    found = re.search(rf"{re.escape(SMALL)}.*?(?=^`--`: )", text, re.DOTALL | re.MULTILINE)
    measured = re.search(r"^Measured: .+$", text, re.MULTILINE)
    command = re.search(r"^wbmm table .+$", text, re.MULTILINE)
    if not found or not measured or not command:
        raise ValueError(f"--keep-trained: {page} has no small-scale accuracy to keep; train with --train")
    section = found[0]
    if _KEPT not in section:  # else it was kept before, and says so already
        section = section.rstrip() + f"\n\n{_KEPT}{measured[0]} `{command[0]}`\n\n"
    with sheet.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = {row["row"]: {key: row[key] for key in row if key.startswith("small_")} for row in rows}
    return Trained(section, columns)


def markdown_text(measured: Measured, command: str, how: str = "", trained: Trained | None = None) -> str:
    """The page: sizes, speed, small-scale accuracy, and how it was made.

    Args:
        measured: what was measured.
        command: that writes this page.
        how: the settings of the speed.
        trained: of an older page, to be kept.
    """
    table, rows = measured.table, records(measured)
    parts = [
        _heading(table.name),
        f"{table.title} (the paper's `{table.label}`). Columns named *paper* are what the paper prints; all others are "
        f"measured here. {table.note}".rstrip()
        + "\n",
        "## Size\n",
        f"FLOPs are multiply-adds of convolutions, linears and products at 224x224.\n\n{_sizes(rows)}\n",
        *_unlike(rows),
        *(f"The paper disagrees with itself: {text}\n" for text in contradictions(table.name)),
    ]
    if measured.training or measured.inference:
        parts += [
            "## Speed\n",
            "A ratio is a row's speed over its baseline's: above 1 is faster. The paper's are from its time an epoch "
            f"and its images/s on A800 GPUs. {how}\n\n{_speeds(rows, measured)}\n",
        ]
    text = "\n".join(parts) + "\n"
    if measured.small:
        text += _small_section(rows, measured)
    if trained is not None:
        text += trained.section
    device = measured.setting.device if measured.setting else "cpu"
    return (
        f"{text}`--`: not printed by the paper, or not run here (LKA rows need their CUDA package).\n\n"
        f"{measured_line(machine_facts(device))}\n\n```sh\n{command}\n```\n"
    )


def csv_text(measured: Measured, trained: Trained | None = None) -> str:
    """One line a row; an empty field is a figure that was not printed or not measured."""
    kept = {} if trained is None else trained.columns
    rows = [record | kept.get(record["row"], {}) for record in records(measured)]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    return out.getvalue()


def check_pages(folder: Path, name: str, keeps: Callable[[dict], bool] = lambda row: True) -> tuple[Path, Path]:
    """Where the two files go; an error if something other than this table's stands there, or more of it.

    Args:
        folder: of both files.
        name: of the table.
        keeps: whether what an older sheet has on a row will be there again.
    """
    page, sheet = folder / f"{name}.md", folder / f"{name}.csv"
    if page.exists() and not page.read_text(encoding="utf-8").startswith(_heading(name)):
        raise ValueError(f"{page} is not a page of `wbmm table {name}`: choose another --out")
    if sheet.exists():
        with sheet.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        if {row.get("table") for row in rows} != {name}:
            raise ValueError(f"{sheet} does not hold `wbmm table {name}`: choose another --out")
        lost = [row["row"] for row in rows if not keeps(row)]
        if lost:
            raise ValueError(
                f"{sheet} has more than this command measures (of {', '.join(lost[:3])}, ...): choose another --out, "
                "or remove it"
            )
    return page, sheet


def write_pages(folder: Path, name: str, markdown: str, sheet: str) -> tuple[Path, Path]:
    """Writes both files, each whole or not at all."""
    paths = check_pages(folder, name)
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, (markdown, sheet), strict=True):
        with atomic_path(path, force=True) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return paths

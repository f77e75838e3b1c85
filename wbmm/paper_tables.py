"""The paper's tables and their rows as data, read from `paper_tables.yaml`."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib import resources
from pathlib import Path

import yaml

__all__ = [
    "DenseRow",
    "DenseTable",
    "Row",
    "Table",
    "get_table",
    "load_commands",
    "load_dense_tables",
    "load_recipes",
    "load_tables",
    "read_tables",
]

PAPER = ("params", "flops", "memory", "time", "speedup", "speed", "top1", "top1_pm", "miou", "miou_pm")


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        id: its name in commands and files.
        label: as the paper calls it.
        model, args: for `timm.create_model`.
        baseline: the id of the row that ratios are to.
        large_kernel: whether the row is one that the large-kernel CUDA package runs.
        small_model, small_args: the same in the small recipe.
        recipe: the file of configs/imagenet that trains it, without its ending.
        paper: what the paper prints; see the head of paper_tables.yaml.
    """

    id: str
    label: str
    model: str
    args: dict
    baseline: str
    large_kernel: bool
    small_model: str
    small_args: dict
    recipe: str | None
    paper: dict


@dataclass(frozen=True)
class Table:
    """One table of the paper; the head of paper_tables.yaml says what each field means."""

    name: str
    label: str
    title: str
    rows: tuple[Row, ...]
    note: str = ""
    ade20k: bool = False
    size: int = 224
    recipe_changes: dict = field(default_factory=dict)

    def row(self, row_id: str) -> Row:
        known = {row.id: row for row in self.rows}
        if row_id not in known:
            raise ValueError(f"table {self.name!r} has no row {row_id!r}; its rows: {', '.join(known)}")
        return known[row_id]

    def select(self, ids: Sequence[str] | None) -> list[Row]:
        """The rows of given ids and the rows that their ratios are to, in the table's order; all with None."""
        if ids is None:
            return list(self.rows)
        wanted = {self.row(row_id).id for row_id in ids}
        wanted |= {self.row(row_id).baseline for row_id in wanted}
        return [row for row in self.rows if row.id in wanted]


SHARED = {"model", "args", "recipe", "small", "baseline", "large_kernel"}
OF_TABLE = SHARED - {"baseline", "large_kernel"} | {f.name for f in fields(Table)} - {"name"}
OF_ROW = SHARED | {"label", "paper"}


def _check_keys(where: str, entry: dict, known: set[str] | tuple[str, ...]) -> None:
    unknown = sorted(set(entry) - set(known))
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; expected one of {', '.join(sorted(known))}")


def _read_row(row_id: str, entry: dict, table: dict, where: str) -> Row:
    """A row with what its table says for all of them."""
    small, common_small = entry.get("small", {}), table.get("small", {})
    _check_keys(where, entry, OF_ROW)
    _check_keys(f"{where}, paper", entry.get("paper", {}), PAPER)
    _check_keys(f"{where}, small", {**small, **common_small}, ("model", "args"))
    args = {**table.get("args", {}), **entry.get("args", {})}
    # The small recipe's own pattern or windows win over the table's, a row's over both.
    small_args = {**table.get("args", {}), **common_small.get("args", {}), **entry.get("args", {})}
    model = entry.get("model", table.get("model"))
    small_model = small.get("model", common_small.get("model"))
    if not model or not small_model:
        raise ValueError(f"{where}: needs `model`, and a model under `small`, in the row or its table")
    return Row(
        id=row_id,
        label=entry["label"],
        model=model,
        args=args,
        baseline=entry.get("baseline", next(iter(table["rows"]))),
        large_kernel=entry.get("large_kernel", False),
        small_model=small_model,
        small_args={**small_args, **small.get("args", {})},
        recipe=entry.get("recipe", table.get("recipe")),
        paper=entry.get("paper", {}),
    )


def read_tables(path: Path | None = None) -> dict[str, Table]:
    """The tables of a file, in its order; the paper's without one."""
    source = path or resources.files("wbmm").joinpath("paper_tables.yaml")
    tables = {}
    for name, entry in yaml.safe_load(source.read_text(encoding="utf-8"))["tables"].items():
        _check_keys(f"{source.name}, {name}", entry, OF_TABLE)
        rows = tuple(
            _read_row(row_id, row, entry, f"{source.name}, {name}, {row_id}") for row_id, row in entry["rows"].items()
        )
        own = {key: value for key, value in entry.items() if key not in SHARED}
        tables[name] = Table(name=name, **{**own, "rows": rows})
        for row in rows:
            tables[name].row(row.baseline)
    return tables


@dataclass(frozen=True)
class DenseRow:
    """A whole segmentor or detector, its backbone by the name of `wbmm bench seg`."""

    id: str
    size: str
    backbone: str
    paper: dict


@dataclass(frozen=True)
class DenseTable:
    """A table of segmentors or detectors."""

    name: str
    label: str
    title: str
    note: str
    rows: tuple[DenseRow, ...]

    def costs(self) -> dict[tuple[str, str], tuple[int, int]]:
        """The paper's parameters (M) and FLOPs (G) by (size, backbone)."""
        return {(row.size, row.backbone): (row.paper["params"], row.paper["flops"]) for row in self.rows}


def _read(key: str) -> dict:
    return yaml.safe_load(resources.files("wbmm").joinpath("paper_tables.yaml").read_text(encoding="utf-8"))[key]


@lru_cache(maxsize=1)
def load_dense_tables() -> dict[str, DenseTable]:
    """The paper's tables of segmentors and detectors by name."""
    return {
        name: DenseTable(name, **{**entry, "rows": tuple(DenseRow(key, **row) for key, row in entry["rows"].items())})
        for name, entry in _read("dense").items()
    }


@lru_cache(maxsize=1)
def load_recipes() -> dict[str, object]:
    """What the paper prints of its ImageNet recipes, by the key of a training configuration; a list is for P N T S."""
    return _read("recipes")


@lru_cache(maxsize=1)
def load_commands() -> dict[str, str]:
    """Every table of the paper by its label, and the command for it."""
    return _read("commands")


@lru_cache(maxsize=1)
def load_tables() -> dict[str, Table]:
    """The paper's tables by name."""
    return read_tables()


def get_table(name: str, tables: dict[str, Table] | None = None) -> Table:
    tables = load_tables() if tables is None else tables
    if name not in tables:
        raise ValueError(
            f"no table {name!r}; expected one of {', '.join(tables)}; `wbmm table list` has all of the paper's"
        )
    return tables[name]

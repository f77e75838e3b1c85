"""The files of configs/ablations: one a row and a recipe, written from the tables."""

from collections.abc import Iterator
from pathlib import Path

import yaml

from .rows import Row, Table, load_tables

__all__ = ["HEADER", "ablation_files", "write_ablations"]

HEADER = "# Written by tools/write_ablations.py from wbmm/tables/tables.yaml: change it there.\n"
SMALL = "fashion_mnist"
SEGMENTATION = "wbmm-t-hier_upernet_8xb2-160k_ade20k-512x512.py"


def _row_args(row: Row) -> dict:
    return {**row.args, "large_kernel": "implicit_gemm"} if row.large_kernel else row.args


def _given(args: dict) -> dict:
    return {"args": args} if args else {}


def _run_folder(recipe: str, table: Table, row: Row) -> str:
    return f"runs/ablations/{recipe}/{table.name}/{row.id}"


def _comment(table: Table, row: Row) -> str:
    return f"{HEADER}# {table.title}: {row.label}\n"


def _yaml(base: str, model: dict, out: str, changes: dict) -> str:
    values = {"base": base, "model": {**model, **changes.get("model", {})}}
    values |= {key: value for key, value in changes.items() if key != "model"}
    return yaml.safe_dump({**values, "out": out}, sort_keys=False, default_flow_style=None, width=120)


def _training_file(table: Table, row: Row) -> str:
    model = {"name": row.model, **_given(_row_args(row))}
    base = f"../../../imagenet/{row.recipe}.yaml"
    return _comment(table, row) + _yaml(base, model, _run_folder("imagenet", table, row), table.recipe_changes)


def _small_file(table: Table, row: Row) -> str:
    model = {"name": row.small_model, **_given(row.small_args)}
    return _comment(table, row) + _yaml("../_base.yaml", model, _run_folder(SMALL, table, row), {})


def _literal(value) -> str:
    """As ruff writes it: double quotes."""
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _segmentation_file(table: Table, row: Row) -> str:
    """Starts from the row's own ImageNet run; where it has none, from that of the configuration it is based on."""
    lines = [f"{key}={_literal(value)}," for key, value in {"arch": row.model, **_row_args(row)}.items()]
    if row.recipe:
        lines.append(f'init_cfg=dict(checkpoint="{_run_folder("imagenet", table, row)}/best.pt"),')
    backbone = "".join(f"        {line}\n" for line in lines)
    return (
        f'{_comment(table, row)}_base_ = ["../../../ade20k/{SEGMENTATION}"]\n\n'
        f"model = dict(\n    backbone=dict(\n{backbone}    ),\n)\n"
    )


def _files_of(table: Table, row: Row) -> Iterator[tuple[str, str]]:
    if row.recipe:
        yield f"imagenet/{table.name}/{row.id}.yaml", _training_file(table, row)
    if table.ade20k:
        yield f"ade20k/{table.name}/{row.id}.py", _segmentation_file(table, row)
    if not row.large_kernel:  # how a net is run makes no difference to what it learns
        yield f"{SMALL}/{table.name}/{row.id}.yaml", _small_file(table, row)


def ablation_files() -> dict[str, str]:
    """Path under configs/ablations to text."""
    return dict(file for table in load_tables().values() for row in table.rows for file in _files_of(table, row))


def write_ablations(folder: Path) -> list[Path]:
    """Writes every file and removes those it wrote before for rows that are gone; returns what changed."""
    wanted = {folder / name: text for name, text in ablation_files().items()}
    changed = []
    for path in [path for path in folder.rglob("*.*") if path.is_file() and path not in wanted]:
        if path.suffix in (".yaml", ".py") and path.read_text(encoding="utf-8").startswith(HEADER):
            path.unlink()
            changed.append(path)
    for path, text in wanted.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed

"""The notebooks run, their outputs belong to their code, and they are small and say nothing of a machine."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
pytest.importorskip("nbclient", reason="nbclient is not installed")

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "scripts" / "run_notebooks.py")
run_notebooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(run_notebooks)

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
every = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_there_are_four():
    names = ["fine_tune_on_a_folder", "fuse_export_quantise", "look_inside", "quick_start"]
    assert [path.stem for path in NOTEBOOKS] == names


@every
def test_outputs_belong_to_the_code(path):
    """If this fails: `make notebooks`."""
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata[run_notebooks.KEY] == run_notebooks.code_sha256(notebook)
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)


@every
def test_small_and_without_traces_of_a_machine(path):
    assert path.stat().st_size < 400_000
    outputs = json.dumps([cell.outputs for cell in code_cells(path)])
    assert re.findall(r"/(?:home|root|tmp|work|Users)/", outputs) == []


@every
def test_links_lead_to_files(path):
    text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if not (path.parent / link).is_file()] == []


HEAVY = {"fine_tune_on_a_folder", "fuse_export_quantise", "look_inside"}  # train or quantise for long
SAYS = {"quick_start": "obelisk", "fine_tune_on_a_folder": "new_stripes.png: stripes", "look_inside": "rocket: obelisk"}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.heavy] if path.stem in HEAVY else []) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_it_runs(path):
    """From the first cell to the last, in an empty folder."""
    notebook = nbformat.read(path, as_version=4)
    run_notebooks.execute(notebook)
    text = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert SAYS.get(path.stem, "") in text

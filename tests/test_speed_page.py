"""docs/speed.md has the figures of the files that the benchmarks wrote, and no others."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def page():
    spec = importlib.util.spec_from_file_location("speed_page", ROOT / "scripts" / "speed_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_files(page):
    assert page.main(["--check"]) == 0, "run python scripts/speed_page.py"


def test_every_table_is_on_the_page(page):
    text = (ROOT / "docs" / "speed.md").read_text()
    assert re.findall(r"<!-- ([a-z ]+) -->\n\|", text) == list(page.TABLES)


def test_a_changed_figure_is_noticed(page, monkeypatch, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    text = (ROOT / "docs" / "speed.md").read_text()
    (docs / "speed.md").write_text(re.sub(r"\d\.\d\dx \(", "9.99x (", text, count=1))
    monkeypatch.setattr(page, "DOCS", docs)
    assert page.main(["--check"]) == 1
    page.main([])
    assert (docs / "speed.md").read_text() == text

"""docs/speed.md has the figures of the files that the benchmarks wrote, and no others."""

import csv
import importlib.util
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FACTS = {"threads": 2, "machine": "a CPU", "date": "2026-01-01", "torch": "2", "command": "wbmm bench it"}


@pytest.fixture
def page():
    spec = importlib.util.spec_from_file_location("speed_page", ROOT / "scripts" / "speed_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def elsewhere(page, tmp_path, monkeypatch):
    """A copy of the pages in a folder without results."""
    (tmp_path / "docs" / "results").mkdir(parents=True)
    for name in page.PAGES:
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    return tmp_path


def write(folder: Path, name: str, *rows: dict) -> None:
    path = folder / "docs" / "results" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0] | FACTS))
        writer.writeheader()
        writer.writerows(row | FACTS for row in rows)


def test_tables_are_those_of_the_files(page):
    assert page.main(["--check"]) == 0, "run python scripts/speed_page.py"


def test_every_block_is_on_a_page(page):
    text = "".join((ROOT / name).read_text() for name in page.PAGES)
    assert [name for name in re.findall(r"<!-- ([a-z ]+) -->\n", text) if name != "end"] == list(page.BLOCKS)


def test_without_files_the_page_says_so(page, elsewhere):
    assert page.main([]) == 0
    text = "".join((elsewhere / name).read_text() for name in page.PAGES)
    parts = re.findall(r"Not measured yet: `bash scripts/measure_cpu.sh --only (\w+)`", text)
    assert len(parts) == len(page.BLOCKS) - 1
    script = (ROOT / "scripts" / "measure_cpu.sh").read_text()
    known = re.search(r'PARTS="(.+)"', script)[1].split()
    assert set(parts) <= set(known)
    assert "has not been measured yet" in (elsewhere / "README.md").read_text()


def test_figures_come_from_the_files(page, elsewhere):
    row = {"model": "wbmm_t", "top1": 83.2, "top1_source": "the paper", "images_per_s": 12.34, "ratio": 1.5}
    write(elsewhere, "cpu/peers.csv", row | {"precision": "float32"}, row | {"precision": "int8", "images_per_s": 50})
    (elsewhere / "docs/results/cpu/peers-float32.svg").write_text("<svg/>")
    page.main([])
    text = (elsewhere / "docs" / "speed.md").read_text()
    assert "| `wbmm_t` | 83.2 | 12.3 (1.50x) | 50.0 (1.50x) |" in text
    assert "2 threads of a CPU, 2026-01-01, torch 2; `wbmm bench it`" in text
    assert '<img src="results/cpu/peers-float32.svg"' in text
    assert '<img src="docs/results/cpu/peers-float32.svg"' in (elsewhere / "README.md").read_text()
    assert page.main(["--check"]) == 0
    (elsewhere / "docs" / "speed.md").write_text(text.replace("12.3", "99.9"))
    assert page.main(["--check"]) == 1


def test_precisions_of_training_and_runtimes(page, elsewhere):
    row = {
        "model": "eager",
        "batch": 1,
        "images_per_s": 10,
        "ratio": 1,
        "height": 224,
        "peak_mb": "",
        "dtype": "bfloat16",
    }
    write(elsewhere, "cpu/runtime/runtime.csv", row | {"model": "eager, bf16"}, row | {"model": "openvino"})
    write(elsewhere, "cpu/training-bfloat16/train.csv", row | {"model": "wbmm_t", "autocast": True})
    page.main([])
    text = (elsewhere / "docs" / "speed.md").read_text()
    assert "| bfloat16 | eager, bf16 | 1 | 10.0 (1.00x) |" in text
    assert "| float32 | openvino | 1 | 10.0 (1.00x) |" in text
    assert "| `wbmm_t` | bfloat16 autocast | 224 | 1 | 10.0 (1.00x) | -- |" in text
    assert "bfloat16 by autocast" in text


def test_the_product_beside_the_convolution(page, elsewhere):
    names = {"WBMM-C 7x7": 70, "WBMM-C 14x14": 50, "WBMM 14x14 (onednn)": 90}
    rows = [
        {"model": name, "batch": 4, "map": 14, "images_per_s": value, "dtype": "float32"}
        for name, value in names.items()
    ]
    write(elsewhere, "cpu/op.csv", *rows)
    page.main([])
    assert "| 4 x 14x14 | 70 | 50 | 90 | -- |" in (elsewhere / "docs" / "speed.md").read_text()

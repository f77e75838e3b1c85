"""Damaged files of every format through every entry point: refused cleanly, or as if nothing had happened to them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKPOINTS = ["safetensors", "pth", "bare", "run", "mmengine"]
EXPORTED = ["onnx", "openvino", "torchexport"]


def fuzz(count: int, seed: int, only: list[str], report: Path) -> dict:
    command = [sys.executable, "-m", "tests.fuzz.fuzz", "--count", str(count), "--seed", str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--only", *only, "--json", str(report)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.is_file(), done.stderr[-3000:]
    result = json.loads(report.read_text())
    assert sum(row[-1] for row in result["counts"]) == count
    assert not result["findings"], done.stdout
    return {tuple(row[:-1]): row[-1] for row in result["counts"]}


def test_checkpoints(tmp_path):
    counts = fuzz(150, 0, CHECKPOINTS, tmp_path / "report.json")
    assert {name for name, _, _ in counts} >= {"safetensors", "pth of save_model", "bare state dict", "run"}
    assert sum(value for (_, _, what), value in counts.items() if what == "refused") > 75


def test_exported_files(tmp_path):
    counts = fuzz(36, 0, EXPORTED, tmp_path / "report.json")
    assert {name for name, _, _ in counts} == set(EXPORTED)
    assert sum(value for (_, _, what), value in counts.items() if what == "refused") > 18


@pytest.mark.heavy
@pytest.mark.parametrize(("only", "count"), [(CHECKPOINTS, 1600), (EXPORTED, 400)], ids=["checkpoints", "exported"])
def test_thousands(tmp_path, only, count):
    fuzz(count, 1, only, tmp_path / "report.json")

"""Runs `interpreted.py`, whose tests need a process in which Triton interprets its kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FILE = Path(__file__).parent / "interpreted.py"
ROOT = FILE.parents[4]


def run(part: str, marked: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marked, f"{FILE}::{part}"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("part", ["TestWindowed", "TestFeedForward", "TestResidual", "TestTrial", "TestTheDoor"])
def test_against_the_reference(part):
    run(part, "not heavy")


@pytest.mark.heavy
def test_large_windows_against_the_reference():
    run("TestWindowed", "heavy")

"""A benchmark that is killed in the middle of its work, for real: the same command goes on, nothing lost or doubled."""

import json
import os
import signal
import subprocess
import sys
import time

from wbmm.bench.results import read_log

SCRIPT = """
import sys, time
from pathlib import Path
from wbmm.bench.results import Cell, RunLog, run_cells

folder = Path(sys.argv[1])

def measure(number):
    with open(folder / "calls.txt", "a") as file:
        file.write(f"{number}\\n")
    time.sleep(0.05)
    return {"a": {"seconds": [float(number)]}, "padding": {"why_not": "x" * 200_000}}

cells = [Cell({"batch": n}, ["a", "padding"], lambda n=n: measure(n)) for n in range(12)]
run_cells(cells, RunLog(folder, "op", "wbmm bench op"))
"""


def start(folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder)], env=environment, stderr=subprocess.DEVNULL)


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


def test_a_run_killed_with_sigkill_goes_on(tmp_path):
    calls, log = tmp_path / "calls.txt", tmp_path / "op.jsonl"
    process = start(tmp_path)
    patience = time.monotonic() + 120
    while len(lines(calls)) < 4 and time.monotonic() < patience:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = [entry.cell["batch"] for entry in read_log(log)]
    assert 3 <= len(before) < 12, "it was killed in the middle"
    whole = log.read_text()
    log.write_text(whole[: len(whole) - 1000])  # as if the last line had been written in part
    kept = [entry.cell["batch"] for entry in read_log(log)]
    assert kept == before[:-1]
    assert start(tmp_path).wait() == 0
    entries = read_log(log)
    assert [entry.cell["batch"] for entry in entries] == list(range(12)), "nothing is lost"
    assert [entry.timing("a").median for entry in entries] == [float(n) for n in range(12)]
    whole_lines = [line for line in lines(log) if line.endswith("}")]
    numbers = [json.loads(line)["cell"]["batch"] for line in whole_lines]
    assert sorted(numbers) == list(range(12)), "nothing is doubled"
    measured = [int(number) for number in lines(calls)]
    assert [number for number in kept if measured.count(number) > 1] == [], "what was kept is not measured again"

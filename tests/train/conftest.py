"""A training set of a few small images, and ways to start, watch and end real training processes on it."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

ROOT = Path(__file__).parents[2]
HANG_S = 240  # a process that has not ended by then hangs

TINY = {
    "model": {"name": "test_resnet", "drop_path": 0.1},
    "data": {
        "source": "idx",
        "size": 32,
        "in_chans": 1,
        "in_memory": True,
        "workers": 0,
        "crop_pct": 1.0,
        "mean": [0.5],
        "std": [0.25],
    },
    "augment": {"auto": None, "color_jitter": 0.0, "reprob": 0.25, "scale": [0.7, 1.0]},
    "mix": {"mixup": 0.8, "cutmix": 1.0},
    "optim": {"lr": 2e-3, "lr_batch": 16},
    "schedule": {"epochs": 3, "warmup_epochs": 1},
    "ema": {"decay": 0.9},
    "log": {"every": 1, "tensorboard": False},
    "save": {"every_steps": 3},
    "global_batch": 16,
    "batch": 4,
    "device": "cpu",
    "deterministic": True,
    "timeout": 60,
}


def write_idx(path: Path, array: np.ndarray):
    header = b"\x00\x00\x08" + bytes([array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.fixture(scope="session")
def idx_root(tmp_path_factory) -> Path:
    """128 training and 37 validation images in 5 classes: grey levels with noise."""
    root, random = tmp_path_factory.mktemp("idx"), np.random.default_rng(0)
    for prefix, size in (("train", 128), ("t10k", 37)):
        labels = np.arange(size) % 5
        images = 40 * labels[:, None, None] + random.integers(0, 80, (size, 28, 28))
        write_idx(root / f"{prefix}-images-idx3-ubyte", images)
        write_idx(root / f"{prefix}-labels-idx1-ubyte", labels)
    return root


@pytest.fixture(scope="session")
def make_config(idx_root, tmp_path_factory):
    """Writes the tiny configuration, with changes, to a file; one folder for each call."""

    def make(**changes) -> Path:
        folder = tmp_path_factory.mktemp("run")
        values = {key: dict(value) if isinstance(value, dict) else value for key, value in TINY.items()}
        values["data"]["root"] = str(idx_root)
        values["out"] = str(folder / "out")
        for key, value in changes.items():
            values[key] = values[key] | value if isinstance(value, dict) and key in values else value
        path = folder / "tiny.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return make


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The same arithmetic here as in the processes that the tests start, and what a run sets does not outlive it."""
    before, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(deterministic)


class Process:
    """A training process, or a torchrun agent with its workers."""

    def __init__(self, command: list[str], folder: Path, env: dict | None = None):
        self.started = time.time()
        self.output = folder / f"output-{time.monotonic_ns()}.txt"
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})}
        with open(self.output, "w") as file:
            self.popen = subprocess.Popen(
                command,
                cwd=folder,
                env=variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a process group of its own, which a test may signal
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a suite in the background ignores it
            )

    def text(self) -> str:
        return self.output.read_text()

    def wait(self) -> int:
        try:
            return self.popen.wait(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"the process hangs; it said:\n{self.text()}")

    def children(self) -> list[int]:
        return children_of(self.popen.pid)

    def tree(self) -> list[int]:
        """The process and all that it started, as far as they are alive."""
        pids = [self.popen.pid] if self.popen.poll() is None else []
        for pid in pids:  # grows while it is walked
            pids += children_of(pid)
        return pids

    def kill(self):
        for pid in self.tree():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait()


def children_of(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    with suppress(OSError):
        return [int(child) for file in files for child in file.read_text().split()]
    return []


@pytest.fixture
def start_command():
    """Starts any command; what still runs at the end of the test is killed."""
    started = []

    def begin(command: list[str], folder: Path, env: dict | None = None) -> Process:
        started.append(Process(command, folder, env))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


@pytest.fixture
def start(start_command):
    """Starts `tools/train.py` on a configuration: one process, or `torchrun` with given arguments."""

    def begin(config: Path, *overrides: str, torchrun: list[str] | None = None, env: dict | None = None) -> Process:
        launcher = [sys.executable] if torchrun is None else [sys.executable, "-m", "torch.distributed.run", *torchrun]
        return start_command([*launcher, str(ROOT / "tools" / "train.py"), str(config), *overrides], config.parent, env)

    return begin


@pytest.fixture(scope="session")
def free_port():
    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    return find


@pytest.fixture
def small_disk():
    """A context in which no file grows above a size, as on a full disk."""

    @contextmanager
    def limit(size: int):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit


def read_metrics(out: Path, kind: str = "train") -> list[dict]:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:  # being written
            break
    return [record for record in records if record["kind"] == kind]


@pytest.fixture(scope="session")
def metrics():
    return read_metrics


@pytest.fixture(scope="session")
def wait_for_step():
    """Waits until this process (not an earlier one in the same folder) has logged the step or a later one."""

    def wait(process: Process, out: Path, step: int):
        deadline = time.monotonic() + HANG_S
        while process.popen.poll() is None and time.monotonic() < deadline:
            records = read_metrics(out)
            if records and records[-1]["step"] >= step and records[-1]["time"] >= process.started:
                return
            time.sleep(0.01)
        pytest.fail(f"the process never reached step {step}; it said:\n{process.text()}")

    return wait


@pytest.fixture(scope="session")
def assert_same_state():
    """Compares two checkpoints bit by bit: model, EMA, optimiser, position."""

    def flatten(value, name=""):
        if isinstance(value, dict):
            return {k: v for key, item in value.items() for k, v in flatten(item, f"{name}.{key}").items()}
        if isinstance(value, list):
            return {k: v for key, item in enumerate(value) for k, v in flatten(item, f"{name}.{key}").items()}
        return {name: value}

    def compare(first: Path, second: Path):
        parts = ("model", "ema", "optimizer", "scheduler", "scaler", "position")
        left, right = (torch.load(path, weights_only=True) for path in (first, second))
        left, right = ({part: state[part] for part in parts} for state in (left, right))
        left, right = flatten(left), flatten(right)
        assert left.keys() == right.keys()
        for key, value in left.items():
            same = torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key]
            assert same, f"{key} differs"

    return compare

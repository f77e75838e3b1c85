"""What takes minutes: training a tiny UPerNet to 80 mIoU across a kill, two processes, and the trackers."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("mmseg")

from tests.mm.helpers import ROOT, logged, tool
from tests.mm.shapes import write_config, write_shapes

pytestmark = pytest.mark.heavy

WIDTHS = [40, 80, 160, 320]  # of wbmm_a_hier


def figure(output, name="mIoU"):
    return float(re.findall(rf" form, .*\b{name} ([\d.]+)", output)[-1])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 120 iterations that is killed after the 40th and continued: folder, configuration."""
    root = tmp_path_factory.mktemp("seg")
    data = write_shapes(root / "ade", train=64, val=16)
    config = write_config(
        root / "tiny.py", data, dims=WIDTHS, crop=128, batch=8, iterations=120, warmup=15, interval=40
    )
    out = root / "run"
    command = [sys.executable, str(ROOT / "tools" / "train_seg.py"), str(config), "--work-dir", str(out)]
    with open(root / "log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        deadline = time.monotonic() + 1200
        while not (logged(out) and logged(out)[0][-1].get("step", 0) >= 43):
            assert process.poll() is None, (root / "log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    result = tool("train_seg", config, "--work-dir", out, "--resume", timeout=3000)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "resuming from" in result.stdout + result.stderr
    return out, config


def test_resumed_at_the_same_iteration_and_rate(run):
    first, second = ([line for line in lines if "loss" in line] for lines in logged(run[0]))
    assert [line["step"] for line in second] == list(range(41, 121))
    before = {line["step"]: line["lr"] for line in first}
    assert all(line["lr"] == before[line["step"]] for line in second if line["step"] in before)


def test_accuracy_and_every_way_of_testing(run):
    out, config = run
    last = [line["mIoU"] for line in logged(out)[-1] if "mIoU" in line][-1]
    assert last >= 80
    checkpoint = out / "iter_120.pth"
    figures = {}
    for name, options in {"single": [], "fused": ["--fuse"], "dense": ["--fuse", "dense"], "multi": ["--tta"]}.items():
        result = tool("test_seg", config, checkpoint, "--work-dir", out / name, *options, timeout=1200)
        assert result.returncode == 0, result.stderr[-3000:]
        figures[name] = figure(result.stdout + result.stderr)
    print(figures)
    assert figures["single"] == pytest.approx(last, abs=0.01)
    assert figures["fused"] == pytest.approx(figures["single"], abs=0.01)
    assert figures["dense"] == pytest.approx(figures["single"], abs=0.01)
    assert figures["multi"] >= 80


def test_two_processes_over_gloo(tmp_path):
    config = write_config(tmp_path / "tiny.py", write_shapes(tmp_path / "ade"), iterations=6, interval=3)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "tools" / "train_seg.py"), str(config), "--work-dir", str(tmp_path / "run")]
    for options in ([], ["--resume", "--cfg-options", "train_cfg.max_iters=9", "param_scheduler.1.end=9"]):
        result = subprocess.run(
            [*command, *options], capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        output = result.stdout + result.stderr
        assert result.returncode == 0, output[-3000:]
        assert "SyncBN becomes BN, gloo between the 2 processes" in output
    steps = [line["step"] for lines in logged(tmp_path / "run") for line in lines if "loss" in line]
    assert steps == list(range(1, 10))
    assert [p.name for p in sorted((tmp_path / "run").glob("iter_*.pth"))] == ["iter_6.pth", "iter_9.pth"]
    result = tool("test_seg", config, tmp_path / "run" / "iter_9.pth", "--work-dir", tmp_path / "test", "--fuse")
    assert result.returncode == 0, result.stderr[-3000:]


def test_tensorboard_and_wandb(tmp_path):
    config = write_config(tmp_path / "tiny.py", write_shapes(tmp_path / "ade"))
    options = ["--work-dir", tmp_path / "run", "--track", "tensorboard", "wandb"]
    result = tool("train_seg", config, *options, env={**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    assert result.returncode == 0, result.stderr[-3000:]
    assert list((tmp_path / "run").rglob("events.out.tfevents.*"))
    assert list((tmp_path / "run").rglob("offline-run-*"))

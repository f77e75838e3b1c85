import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"

# Slurm's commands as far as the launcher uses them: a step that ends up outside the script's reach, and a signal to
# every process of it.
STUBS = {
    "srun": 'echo "$1" > "$STUB/options"; shift; setsid "$@" & echo $! > "$STUB/step"; wait $!',
    "scancel": """
        echo "scancel $*" >> "$STUB/calls"
        tree() { for child in $(cat /proc/$1/task/*/children); do tree $child; done; kill -USR1 $1; }
        tree $(cat "$STUB/step")
    """,
    "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "scontrol $*" >> "$STUB/calls"; fi',
}


@pytest.fixture
def slurm(tmp_path) -> dict[str, str]:
    """The environment of a batch script, with stand-ins for Slurm's commands first on the path."""
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return {
        "STUB": str(tmp_path),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "GPUS": "1",
        "WBMM_HOME": str(SCRIPTS.parent),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node",
        "SLURM_NNODES": "1",
        "SLURM_CPUS_PER_TASK": "3",
    }


def test_preemption_saves_and_requeues(slurm, tmp_path, make_config, start_command, wait_for_step):
    config = make_config(schedule={"epochs": 1000}, save={"every_steps": 0}, data={"in_memory": False, "workers": 1})
    out = config.parent / "out"
    command = ["bash", str(SCRIPTS / "train_slurm.sh"), str(config), f"out={out}"]
    script = start_command(command, config.parent, slurm)
    wait_for_step(script, out, 3)
    script.popen.send_signal(signal.SIGUSR1)
    assert script.wait() == 0, script.text()
    assert (tmp_path / "calls").read_text().splitlines() == ["scancel --signal=USR1 7", "scontrol requeue 7"]
    state = torch.load(out / "last.pt", weights_only=True)
    assert state["position"]["step"] >= 3
    assert "SIGUSR1: saved at step" in script.text()
    assert (tmp_path / "options").read_text() == "--cpus-per-task=3\n", "recent versions of srun do not inherit it"


@pytest.mark.heavy
def test_preemption_by_sigterm_to_the_tasks_saves_and_requeues(
    slurm, tmp_path, make_config, start_command, wait_for_step
):
    config = make_config(schedule={"epochs": 1000}, save={"every_steps": 0}, data={"in_memory": False, "workers": 1})
    out = config.parent / "out"
    script = start_command(["bash", str(SCRIPTS / "train_slurm.sh"), str(config), f"out={out}"], config.parent, slurm)
    wait_for_step(script, out, 3)
    step = int((tmp_path / "step").read_text())
    processes = script.tree()
    for pid in processes[processes.index(step) :]:  # the launcher and its descendants
        os.kill(pid, signal.SIGTERM)
    script.wait()
    assert "SIGTERM: saved at step" in script.text()
    assert (tmp_path / "calls").read_text().splitlines() == ["scontrol requeue 7"]


def test_the_slurm_script_wants_to_know_the_folder(slurm):
    result = subprocess.run(
        ["bash", str(SCRIPTS / "train_slurm.sh"), "x.yaml"],
        env={**os.environ, **slurm},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "say out=FOLDER" in result.stderr


def test_segmentors_and_detectors_are_requeued(slurm, tmp_path):
    """mmengine saves nothing at a signal; the job that follows resumes from its newest checkpoint."""
    (tmp_path / "python").write_text('#!/usr/bin/env bash\necho "$@" > "$STUB/args"; exec sleep 60\n')
    (tmp_path / "python").chmod(0o755)
    environment = {**os.environ, **slurm, "PYTHON": str(tmp_path / "python"), "TOOL": "train_seg"}
    command = ["bash", str(SCRIPTS / "train_slurm.sh"), "x.py"]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (refused.returncode, "say --work-dir FOLDER" in refused.stderr) == (2, True)
    script = subprocess.Popen([*command, "--work-dir", str(tmp_path / "run")], env=environment)
    end = time.monotonic() + 60
    while not (tmp_path / "args").is_file() and time.monotonic() < end:
        time.sleep(0.1)
    script.send_signal(signal.SIGUSR1)
    assert script.wait(60) == 0
    os.killpg(int((tmp_path / "step").read_text()), signal.SIGKILL)  # as Slurm does with a requeued job
    assert (tmp_path / "calls").read_text().splitlines() == ["scontrol requeue 7"]
    said = (tmp_path / "args").read_text().split()
    assert said[-4:] == ["x.py", "--work-dir", str(tmp_path / "run"), "--resume"]
    assert Path(said[-5]).name == "train_seg.py"


@pytest.mark.parametrize("tool", ["train", "train_seg"])
def test_the_launcher_starts_the_tool_that_is_asked_for(tool):
    environment = {**os.environ, "PYTHON": "echo", "GPUS": "2", "TOOL": tool}
    command = ["bash", str(SCRIPTS / "train_dist.sh"), "config.py", "--resume"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert "--nproc_per_node=2" in said
    assert Path(said[-3]).resolve() == SCRIPTS.parent / "tools" / f"{tool}.py"
    assert said[-2:] == ["config.py", "--resume"]

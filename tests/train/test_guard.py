import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext

import pytest
import timm
import torch

from wbmm.commands.train import main
from wbmm.train import checkpoint, engine, guard
from wbmm.train import fit as fit_module
from wbmm.train.config import load_config
from wbmm.train.fit import fit
from wbmm.train.guard import BufferSnapshot, StopSignal, lock_folder, nonfinite_layers

QUIET = {"save": {"every_steps": 1}, "schedule": {"epochs": 2}, "mix": {"mixup": 0.0, "cutmix": 0.0}}


def out_of(config):
    return config.parent / "out"


def fit_with_poison(config, monkeypatch, steps, overrides=()):
    """Trains with NaN images at the given steps (counted from 0)."""
    original = engine.prepare

    def poisoned(run, batch, micro):
        images, targets = original(run, batch, micro)
        return (images * math.nan if run.position.step in steps else images), targets

    monkeypatch.setattr(engine, "prepare", poisoned)
    return fit(load_config(config, overrides))


def test_a_few_bad_steps_are_skipped_and_the_run_goes_on(make_config, monkeypatch, metrics, capsys):
    config = make_config(**QUIET)
    result = fit_with_poison(config, monkeypatch, steps={2, 3, 9}, overrides=["max_skips=2"])
    assert result.status == "finished"
    said = capsys.readouterr().err
    assert "step skipped (2 of at most 2 in a row)" in said
    losses = [record["loss"] for record in metrics(out_of(config))]
    assert [step for step, loss in enumerate(losses) if not math.isfinite(loss)] == [2, 3, 9]
    state = torch.load(out_of(config) / "last.pt", weights_only=True)
    for name, value in {**state["model"], **state["ema"]}.items():
        assert torch.isfinite(value).all(), name


def test_too_many_bad_steps_stop_the_run_and_keep_the_last_good_checkpoint(make_config, monkeypatch):
    config = make_config(**QUIET)
    text = r"step 7, learning rate \S+: the loss is nan, after 2 skipped steps in a row; .*the input images.*intact"
    with pytest.raises(FloatingPointError, match=text):
        fit_with_poison(config, monkeypatch, steps=range(5, 100), overrides=["max_skips=2"])
    state = torch.load(out_of(config) / "last.pt", weights_only=True)
    assert state["position"]["step"] == 5
    assert torch.load(out_of(config) / "last-1.pt", weights_only=True)["position"]["step"] == 4
    assert all(torch.isfinite(value).all() for value in state["model"].values())
    assert json.loads((out_of(config) / "status.json").read_text())["status"] == "failed"


def test_the_layers_are_named_and_the_command_fails(make_config, capsys, monkeypatch):
    config = make_config(**QUIET)
    monkeypatch.setattr(fit_module, "scale_lr", lambda *_: (1e30, "far beyond what the configuration takes"))
    overrides = ["optim.name=sgd", "schedule.warmup_epochs=0", "max_skips=1"]
    assert main([str(config), *overrides]) == 1
    error = capsys.readouterr().err
    assert re.search(r"learning rate [\d.]+e\+(29|30)", error)
    assert "layers whose activations are not finite, in order: conv1" in error


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_the_layers_are_named_in_mixed_precision(make_config, monkeypatch, amp):
    """The weight is such that the layer overflows in that precision, and in fp16 not in FP32."""
    config = make_config(**QUIET)
    original = fit_module.build_model

    def build_model(*args):
        model = original(*args)
        with torch.no_grad():
            model.layer3[0].conv1.weight.fill_(1e6 if amp == "fp16" else 3e38)
        return model

    monkeypatch.setattr(fit_module, "build_model", build_model)
    text = r"the loss is nan, after 1 skipped.* not finite, in order: layer3\.0\.conv1, layer3\.0\.bn1"
    with pytest.raises(FloatingPointError, match=text):
        fit(load_config(config, [f"amp={amp}", "max_skips=1", "batch=16"]))


def test_layers_are_named_in_the_order_in_which_they_run():
    model = timm.create_model("test_resnet", num_classes=5).eval()
    images = torch.randn(2, 3, 32, 32)
    assert nonfinite_layers(model, images) == []
    with torch.no_grad():
        model.layer2[0].conv1.weight.fill_(math.inf)
    names = nonfinite_layers(model, images)
    assert names[0] == "layer2.0.conv1"
    assert not any(name.startswith("layer1") for name in names)
    assert names[-1] == "fc"


class Meeting(torch.nn.Module):
    """Waits for the other process, as SyncBatchNorm does."""

    def __init__(self, barrier):
        super().__init__()
        self.barrier = barrier

    def forward(self, images):
        self.barrier.wait()
        return images


def test_a_process_with_bad_images_does_not_leave_the_others_waiting():
    barrier = threading.Barrier(2, timeout=20)
    models = [torch.nn.Sequential(Meeting(barrier)) for _ in range(2)]  # a process has its own
    batches = [torch.full((1, 3, 4, 4), math.nan), torch.ones(1, 3, 4, 4)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(nonfinite_layers, models, batches)) == [["the input images"], []]


def test_gradients_that_are_not_finite_skip_the_step_too(make_config, monkeypatch, capsys):
    config = make_config(**QUIET)
    original = engine.forward

    def steep(run, images, targets):
        loss = original(run, images, targets)
        zero = sum(parameter.sum() for parameter in run.model.parameters()) * 0
        # sqrt has an infinite slope at 0: the loss is finite, its gradient is not
        return loss + zero.sqrt() if run.position.step == 3 else loss

    monkeypatch.setattr(engine, "forward", steep)
    assert fit(load_config(config)).status == "finished"
    assert "the gradients are not finite; step skipped (1 of at most 10" in capsys.readouterr().err


def test_batch_norm_statistics_come_back():
    model = torch.nn.BatchNorm2d(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    snapshot = BufferSnapshot(model)
    model(torch.full((2, 3, 4, 4), math.nan))
    assert not torch.isfinite(model.running_mean).any()
    snapshot.restore()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.fixture(autouse=True)
def foreground():
    """A suite that runs in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_is_remembered_and_the_handler_put_back(name):
    number = signal.Signals[name]
    before = signal.getsignal(number)
    with StopSignal() as stop:
        stop.saves = True
        assert stop.name is None
        os.kill(os.getpid(), number)
        assert stop.name == name
    assert signal.getsignal(number) == before


def test_ctrl_c_is_answered_at_once_and_a_second_one_is_obeyed(monkeypatch, capfd):
    now = 1000.0
    monkeypatch.setattr(guard.time, "monotonic", lambda: now)
    with StopSignal() as stop:
        stop.saves = True
        os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err == "Ctrl-C: saving after this step; press it again to stop now\n"
        now += 0.1
        os.kill(os.getpid(), signal.SIGINT)  # the same one, once more from a launcher
        now += 1
        with pytest.raises(KeyboardInterrupt, match="stopped at once, without saving; resume=auto"):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == ""


def test_ctrl_c_with_nothing_to_save_stops(capfd):
    with StopSignal() as stop, pytest.raises(KeyboardInterrupt, match="nothing to save"):
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.name is None


def test_a_sigterm_after_ctrl_c_is_the_second_ctrl_c_of_torchrun_alone(monkeypatch):
    for torchrun in (False, True):
        with monkeypatch.context() as patch, StopSignal(say=False) as stop:
            patch.setattr(guard, "ONE_PRESS_S", 0)
            stop.saves = True
            os.kill(os.getpid(), signal.SIGINT)
            if torchrun:
                patch.setenv("TORCHELASTIC_RUN_ID", "test")
            with pytest.raises(KeyboardInterrupt) if torchrun else nullcontext():
                os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_in_the_background_is_not_stopped_by_ctrl_c():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopSignal() as stop:
        stop.saves = True
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.name is None


@pytest.fixture(scope="module")
def whole(make_config):
    """A run that nothing disturbs."""
    config = make_config()
    fit(load_config(config))
    return config


@pytest.mark.parametrize(("name", "moment"), [("SIGTERM", "step"), ("SIGUSR1", "evaluation"), ("SIGINT", "step")])
def test_a_signal_saves_and_stops_and_resuming_leaves_no_trace(
    name, moment, whole, make_config, monkeypatch, assert_same_state, metrics
):
    stopped = make_config()
    place = "forward" if moment == "step" else "measure"
    original = getattr(engine, place)

    def interrupted(run, *args):
        if run.position.step == (11 if moment == "step" else 16):
            os.kill(os.getpid(), signal.Signals[name])
        return original(run, *args)

    with monkeypatch.context() as patch:
        patch.setattr(engine, place, interrupted)
        result = fit(load_config(stopped))
    step = 12 if moment == "step" else 16
    assert (result.status, result.step, result.signal) == ("stopped", step, name)
    assert f"| status | stopped at step {step} of 24 |" in (out_of(stopped) / "summary.md").read_text()
    assert (out_of(stopped) / "curves.png").stat().st_size > 1000
    marker = json.loads((out_of(stopped) / "interrupted.json").read_text())
    assert marker == {"signal": name, "step": step, "total_steps": 24}
    assert fit(load_config(stopped, ["resume=auto"])).status == "finished"
    assert not (out_of(stopped) / "interrupted.json").exists()
    assert "| status | finished |" in (out_of(stopped) / "summary.md").read_text()
    assert_same_state(out_of(whole) / "last.pt", out_of(stopped) / "last.pt")
    for kind in ("train", "eval"):
        got, expected = ([(r["step"], r["loss"]) for r in metrics(out_of(run), kind)] for run in (stopped, whole))
        assert got == expected
    seconds = [record["seconds"] for record in metrics(out_of(stopped))]
    assert seconds == sorted(seconds), "the working time goes on from that of the first sitting"


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 0), ("SIGINT", 130)])
def test_a_signal_to_every_process_of_the_run_saves_and_stops(name, code, make_config, start, wait_for_step):
    data = {"in_memory": False, "workers": 2}
    config = make_config(schedule={"epochs": 1000}, save={"every_steps": 0}, data=data)
    process = start(config)
    wait_for_step(process, out_of(config), 3)
    processes = process.tree()
    assert len(processes) >= 3
    os.killpg(process.popen.pid, signal.Signals[name])
    for pid in processes:
        os.kill(pid, signal.Signals[name])
    assert process.wait() == code, process.text()
    assert "Traceback" not in process.text()
    marker = json.loads((out_of(config) / "interrupted.json").read_text())
    assert marker["signal"] == name
    assert process.text().splitlines()[-1].startswith(f"{name}: saved at step {marker['step']} of 8000 and stopped")
    assert ("Ctrl-C: saving after this step" in process.text()) == (name == "SIGINT")
    assert checkpoint.read(out_of(config) / "last.pt")["position"]["step"] == marker["step"] >= 3
    assert json.loads((out_of(config) / "status.json").read_text())["status"] == "stopped"
    assert not any(os.path.exists(f"/proc/{pid}") for pid in processes), "a worker stays behind"


PATCHED = """
import os, signal, sys, time
from wbmm.train import engine, fit

def patch(module, name, action):
    original = getattr(module, name)
    def replaced(*args):
        action(*args)
        return original(*args)
    setattr(module, name, replaced)

def wait(*_):
    print("waiting", flush=True)
    time.sleep(100)

{}
from wbmm.commands.train import main
sys.exit(main(sys.argv[1:]))
"""


def wait_for_text(process, text):
    deadline = time.monotonic() + 60
    while text not in process.text():
        assert process.popen.poll() is None, process.text()
        assert time.monotonic() < deadline, process.text()
        time.sleep(0.02)


def test_a_second_ctrl_c_stops_at_once(make_config, start_command):
    """In the third step, which takes 100 s; data workers must not hold it up."""
    config = make_config(data={"in_memory": False, "workers": 1}, save={"every_steps": 1})
    script = PATCHED.format("patch(engine, 'forward', lambda run, *_: run.position.step == 2 and wait())")
    process = start_command([sys.executable, "-c", script, str(config)], config.parent)
    wait_for_text(process, "waiting")
    process.popen.send_signal(signal.SIGINT)
    wait_for_text(process, "Ctrl-C: saving after this step; press it again to stop now")
    time.sleep(1)
    workers, pressed = process.children(), time.monotonic()
    os.killpg(process.popen.pid, signal.SIGINT)
    assert process.wait() == 130
    assert time.monotonic() - pressed < 15
    last, *before = reversed(process.text().splitlines())
    assert last.startswith("train: Ctrl-C again: stopped at once, without saving")
    assert before[0].startswith("Ctrl-C: saving after this step")
    assert checkpoint.read(out_of(config) / "last.pt")["position"]["step"] == 2
    assert json.loads((out_of(config) / "status.json").read_text()) == {"status": "stopped", "step": 2}
    assert not (out_of(config) / "interrupted.json").exists()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)


def test_ctrl_c_while_the_data_are_read_is_one_line(make_config, start_command):
    config = make_config()
    script = PATCHED.format("patch(fit, 'build_data', wait)")
    process = start_command([sys.executable, "-c", script, str(config)], config.parent)
    wait_for_text(process, "waiting")
    process.popen.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert process.text() == "waiting\ntrain: Ctrl-C: stopped; there was nothing to save\n"


def test_a_console_that_is_gone_does_not_keep_the_run_from_saving(make_config):
    """As with `| tee`, which dies of the same Ctrl-C."""
    config = make_config(schedule={"epochs": 1000}, save={"every_steps": 0})
    script = PATCHED.format("signal.signal(signal.SIGINT, signal.default_int_handler)")
    command = [sys.executable, "-c", script, str(config)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=one_thread) as process:
        for _ in range(2):  # the first line, and one some seconds and steps later
            while "  step " not in process.stderr.readline():
                assert process.poll() is None
        process.stderr.close()
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert json.loads((out_of(config) / "interrupted.json").read_text())["signal"] == "SIGINT"
    assert checkpoint.read(out_of(config) / "last.pt")["position"]["step"] >= 3
    assert json.loads((out_of(config) / "status.json").read_text())["status"] == "stopped"


def test_a_full_disk_ends_the_run_in_one_line(make_config, monkeypatch, capfd, small_disk):
    config = make_config()
    original, disk = engine.forward, ExitStack()

    def forward(run, *batch):
        if run.position.step == 4:
            disk.enter_context(small_disk(100_000))
        return original(run, *batch)

    monkeypatch.setattr(engine, "forward", forward)
    with disk:
        assert main([str(config)]) == 1
    said = capfd.readouterr().err
    assert said.splitlines()[-1].startswith(f"train: cannot write {out_of(config) / 'last.pt'}: File too large (")
    assert "Traceback" not in said
    assert checkpoint.read(out_of(config) / "last.pt")["position"]["step"] == 3
    assert not list(out_of(config).glob("*.tmp*"))
    assert json.loads((out_of(config) / "status.json").read_text())["status"] == "failed"


CRASH = """
import sys
from wbmm.train import engine, fit

original = engine.forward

def forward(run, *batch):
    if run.position.step == 2:
        raise RuntimeError("the device is gone")
    return original(run, *batch)

engine.forward = forward
from wbmm.commands.train import main
sys.exit(main(sys.argv[1:]))
"""


def test_an_error_ends_the_process_and_its_data_workers(make_config, start_command):
    """The traceback keeps the workers to the end, where Python waits for them."""
    config = make_config(data={"in_memory": False, "workers": 2})
    process = start_command([sys.executable, "-c", CRASH, str(config)], config.parent)
    assert process.wait() == 1
    last = process.text().splitlines()[-1]
    assert last.startswith("train: unexpected error, RuntimeError: the device is gone. This is a bug")


def test_a_start_that_fails_leaves_no_marker_of_the_sitting_before(make_config, capsys):
    config = make_config()
    out_of(config).mkdir()
    marker = out_of(config) / "interrupted.json"
    for overrides in (["data.root=/nowhere"], ["init=gone.pt"], ["global_batch=22"]):
        marker.write_text("{}")
        assert main([str(config), "resume=auto", *overrides]) == 1
        assert not marker.exists(), overrides
    assert "global_batch=22 cannot be made" in capsys.readouterr().err


def test_a_dead_data_worker_ends_the_run_with_the_reason(make_config, monkeypatch):
    config = make_config(data={"in_memory": False, "workers": 1})
    original = engine.forward

    def deadly(run, images, targets):
        if run.position.step == 3:
            for worker in multiprocessing.active_children():
                worker.kill()
        return original(run, images, targets)

    monkeypatch.setattr(engine, "forward", deadly)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid.*(killed|exited)"):
        fit(load_config(config))
    assert json.loads((out_of(config) / "status.json").read_text())["status"] == "failed"


def test_one_run_at_a_time_in_a_folder(tmp_path):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # holds the folder until it is killed
        with lock_folder(tmp_path):
            os.write(writer, b"1")
            signal.pause()
    try:
        os.read(reader, 1)
        with pytest.raises(ValueError, match="another process is training"), lock_folder(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with lock_folder(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_one_line(make_config, capsys):
    assert main([str(make_config()), "out=/dev/null/x"]) == 1
    assert capsys.readouterr().err == "train: out '/dev/null/x' cannot be made: /dev/null is not a folder\n"

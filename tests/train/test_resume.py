import os
import random
import shutil
import signal
import sys

import pytest
import torch

from wbmm.commands.train import main
from wbmm.train.config import load_config
from wbmm.train.fit import fit


def out_of(config):
    return config.parent / "out"


def finish(config, changes=()):
    return fit(load_config(config, changes))


@pytest.fixture(scope="module")
def workers_changes():
    """Images through worker processes and timm's transforms, on one process with 4 forward passes a step."""
    return {
        "data": {"in_memory": False, "workers": 1},
        "augment": {"auto": "rand-m9-mstd0.5-inc1", "color_jitter": 0.4},
    }


def kill_and_resume(config, start, wait_for_step, steps, torchrun=None):
    """Kills the run with SIGKILL as it passes each of `steps` (the last rank of several); then lets it end."""
    for step in steps:
        process = start(config, "resume=auto", torchrun=torchrun)
        wait_for_step(process, out_of(config), step)
        os.kill(process.children()[-1] if torchrun else process.popen.pid, signal.SIGKILL)
        assert process.wait() != 0
    process = start(config, "resume=auto", torchrun=torchrun)
    assert process.wait() == 0, process.text()
    assert "resumed from" in process.text()


def assert_each_step_once(metrics, config, reference):
    got, expected = (metrics(out_of(item)) for item in (config, reference))
    assert [record["step"] for record in got] == list(range(1, 25))
    assert [record["loss"] for record in got] == [record["loss"] for record in expected]
    got, expected = (metrics(out_of(item), "eval") for item in (config, reference))
    assert [record["ema_top1"] for record in got] == [record["ema_top1"] for record in expected]


def test_two_kills_leave_no_trace(make_config, start, wait_for_step, assert_same_state, metrics, workers_changes):
    whole, killed = make_config(**workers_changes), make_config(**workers_changes)
    finish(whole)
    kill_and_resume(killed, start, wait_for_step, steps=(5, 18))
    assert_same_state(out_of(whole) / "last.pt", out_of(killed) / "last.pt")
    assert_each_step_once(metrics, killed, whole)


def test_a_killed_rank_ends_the_run_and_leaves_no_trace(make_config, start, wait_for_step, assert_same_state, metrics):
    torchrun = ["--standalone", "--nproc_per_node=2"]
    whole, killed = make_config(), make_config()
    process = start(whole, torchrun=torchrun)
    assert process.wait() == 0, process.text()
    assert "16 = 2 processes x 4 images x 2 forward passes" in process.text()
    kill_and_resume(killed, start, wait_for_step, steps=(12,), torchrun=torchrun)
    assert_same_state(out_of(whole) / "last.pt", out_of(killed) / "last.pt")
    assert_each_step_once(metrics, killed, whole)


KILL_AT_STEP_6 = """
import os, signal, sys
from wbmm.train import engine, fit

original = engine.forward

def forward(run, *batch):
    if run.position.step == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(run, *batch)

engine.forward = forward
from wbmm.commands.train import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_kill_in_the_first_epoch_leaves_a_checkpoint_of_some_minutes_ago(
    make_config, start_command, assert_same_state, metrics
):
    changes = {"save": {"every_steps": 0, "every_minutes": 1e-6}}
    whole, killed = make_config(**changes), make_config(**changes)
    finish(whole, ["save.every_minutes=0"])
    process = start_command([sys.executable, "-c", KILL_AT_STEP_6, str(killed)], killed.parent)
    assert process.wait() == -signal.SIGKILL
    state = torch.load(out_of(killed) / "last.pt", weights_only=True)
    assert state["position"]["step"] == 6
    assert state["position"]["steps_per_epoch"] == 8
    finish(killed, ["resume=auto"])
    assert_same_state(out_of(whole) / "last.pt", out_of(killed) / "last.pt")
    assert_each_step_once(metrics, killed, whole)


@pytest.fixture(scope="module")
def short_run(make_config):
    """A finished run of one epoch."""
    config = make_config(schedule={"epochs": 1})
    finish(config)
    return config


def test_a_damaged_last_checkpoint_costs_three_steps_not_the_run(make_config, assert_same_state, capsys):
    damaged = make_config()
    finish(damaged)
    last, whole = out_of(damaged) / "last.pt", out_of(damaged) / "whole.pt"
    data = last.read_bytes()
    last.rename(whole)
    last.write_bytes(data[: len(data) // 2])
    finish(damaged, ["resume=auto"])
    said = capsys.readouterr().err
    assert "last.pt is damaged" in said
    assert "resumed from" in said
    assert "at step 21 of 24" in said
    assert_same_state(whole, last)


def test_a_finished_run_resumed_does_nothing(make_config, short_run, capsys):
    before = torch.load(out_of(short_run) / "last.pt", weights_only=True)
    result = finish(short_run, ["resume=auto"])
    assert (result.status, result.step) == ("finished", 8)
    after = torch.load(out_of(short_run) / "last.pt", weights_only=True)
    assert all(torch.equal(value, after["model"][key]) for key, value in before["model"].items())


def test_a_run_is_not_written_over(short_run, capsys):
    assert main([str(short_run)]) == 1
    assert "already holds a run: continue it with resume=auto" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model.name=test_vit", "model.args={img_size: 32}"], "another model: test_resnet with 5 classes"),
        (["data.num_classes=7"], "data.num_classes is 7, but the training set has labels up to 4, so 5 classes"),
        (["global_batch=32"], "counts 8 steps per epoch, this run 4"),
        (["ema.decay=null"], "was saved with an EMA"),
    ],
)
def test_a_checkpoint_of_another_run_is_an_error_before_the_first_step(make_config, short_run, overrides, text, capsys):
    config = make_config()
    assert main([str(config), f"resume={out_of(short_run) / 'last.pt'}", *overrides]) == 1
    assert text in capsys.readouterr().err
    assert not (out_of(config) / "metrics.jsonl").exists()


def test_a_checkpoint_with_other_classes_is_an_error(make_config, idx_root, tmp_path, capsys):
    named = shutil.copytree(idx_root, tmp_path / "named")
    (named / "classes.txt").write_text("ant\nbee\ncat\ndog\nelk\n")
    config = make_config(schedule={"epochs": 1}, data={"root": str(named)})
    finish(config)
    assert torch.load(out_of(config) / "last.pt", weights_only=True)["class_names"][3] == "dog"
    (named / "classes.txt").write_text("ant\nbee\ndog\ncat\nelk\n")
    assert main([str(config), "resume=auto"]) == 1
    expected = "in another order: number 2 is 'dog' in the data and 'cat' in the checkpoint"
    assert expected in capsys.readouterr().err
    (named / "classes.txt").unlink()  # without names there is nothing to compare, and the run keeps its own
    finish(config, ["resume=auto", "schedule.epochs=2"])
    assert torch.load(out_of(config) / "last.pt", weights_only=True)["class_names"][3] == "dog"


def change(path, value=None):
    """A change of a checkpoint: sets the entry at a dotted path, or drops it."""

    def apply(state):
        *parents, last = (int(key) if key.isdigit() else key for key in path.split("."))
        for key in parents:
            state = state[key]
        if value is None:
            del state[last]
        else:
            state[last] = value

    return pytest.param(apply, id=f"{path}={str(value)[:20]}")


@pytest.mark.parametrize(
    "apply",
    [
        *(change(part) for part in ("ema", "scheduler", "scaler", "num_classes")),
        *(change(part, 3.5) for part in ("model", "ema", "optimizer", "scheduler", "scaler", "position", "config")),
        change("model", {1: torch.zeros(1)}),
        change("model", {"fc.weight": torch.zeros(5, 1, dtype=torch.int64)}),
        change("ema", {}),
        change("num_classes", "five"),
        change("seconds", "long"),
        change("config.modle", {}),
        change("config.schedule", 1),
        change("config.optim.lr", "fast"),
        change("position.step"),
        change("position.steps", 3),
        change("position.step", "3"),
        change("position.step", -1),
        change("position.best", "high"),
        change("position.metrics", {"top1": "high"}),
        change("optimizer.state"),
        change("optimizer.param_groups", []),
        change("optimizer.param_groups.0.params", []),
        change("optimizer.param_groups.0.momentum", 0.9),
        change("optimizer.state.0", {"momentum_buffer": torch.zeros(1)}),
        change("optimizer.state.0.exp_avg", torch.zeros(2, 3)),
        change("optimizer.state.0.exp_avg_sq", torch.zeros(7, 1, 1, 1, 1, 1)),
        change("optimizer.state.0.exp_avg", "text"),
        change("scheduler.base_values", [1.0]),
        change("scheduler.step_update", 1.0),
        change("scheduler.t_initial", "long"),
    ],
)
def test_an_odd_part_is_one_line_before_the_first_step(make_config, short_run, capsys, apply, request):
    config = make_config(schedule={"epochs": 1})
    state = torch.load(out_of(short_run) / "last.pt", weights_only=True)
    apply(state)
    odd = config.parent / "odd.pt"
    torch.save(state, odd)
    assert main([str(config), f"resume={odd}"]) == 1
    said = capsys.readouterr().err
    name = request.node.callspec.id.split("=")[0].split(".")[0]
    assert said.count("\n") == 1
    assert said.startswith(f"train: {odd}")
    assert f"part {name!r}" in said
    assert {path.name for path in out_of(config).iterdir()} == {".lock"}


def test_an_odd_scaler_is_one_line(make_config, capsys):
    config, odd = make_config(schedule={"epochs": 1}), make_config(schedule={"epochs": 1})
    finish(config, ["amp=fp16", "batch=16"])
    capsys.readouterr()
    state = torch.load(out_of(config) / "last.pt", weights_only=True)
    for scaler, text in (({}, "empty"), ({"scale": "big"}, "'scale' should be a number"), ({"scale": 2.0}, "KeyError")):
        torch.save(state | {"scaler": scaler}, odd.parent / "odd.pt")
        assert main([str(odd), "amp=fp16", "batch=16", f"resume={odd.parent / 'odd.pt'}"]) == 1
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "odd.pt: its part 'scaler' does not fit this run: " in said
        assert text in said


def test_a_checkpoint_from_before_a_setting_existed_is_of_the_same_run(make_config, capsys):
    config = make_config(schedule={"epochs": 1})
    finish(config)
    state = torch.load(out_of(config) / "last.pt", weights_only=True)
    del state["config"]["save"]["every_minutes"], state["config"]["precision"]
    torch.save(state, out_of(config) / "last.pt")
    finish(config, ["resume=auto"])
    assert "changed since" not in capsys.readouterr().err


def test_what_changed_since_the_checkpoint_is_said(make_config, short_run, capsys):
    config = make_config()
    finish(config, [f"resume={out_of(short_run) / 'last.pt'}", "schedule.epochs=2", "batch=8"])
    said = capsys.readouterr().err
    assert "changed since that checkpoint: schedule.epochs 1 -> 2\n" in said
    assert "at step 8 of 16" in said


def test_resume_auto_in_a_new_folder_starts(make_config):
    assert finish(make_config(schedule={"epochs": 1}), ["resume=auto"]).step == 8


@pytest.fixture
def nine_classes(idx_root, tmp_path):
    """The same images, with names for four more classes."""
    shutil.copytree(idx_root, tmp_path / "nine")
    (tmp_path / "nine" / "classes.txt").write_text("\n".join("abcdefghi"))
    return tmp_path / "nine"


def test_fine_tuning_starts_at_step_0_from_the_weights_with_a_new_classifier(
    make_config, short_run, nine_classes, capsys
):
    config = make_config(schedule={"epochs": 1}, optim={"lr": 1e-12}, ema={"decay": None}, model={"bn_eval": True})
    source = out_of(short_run) / "last.pt"
    changes = [f"init={source}", f"data.root={nine_classes}"]
    finish(config, [*changes, "schedule.warmup_lr=0", "schedule.min_lr=0", "data.size=48"])
    assert "the classifier is new (fc.weight, fc.bias)" in capsys.readouterr().err
    before = torch.load(source, weights_only=True)["ema"]
    after = torch.load(out_of(config) / "last.pt", weights_only=True)
    assert after["position"]["step"] == 8
    assert after["model"]["fc.weight"].shape[0] == 9
    assert after["class_names"] == list("abcdefghi")
    for key in before.keys() - {"fc.weight", "fc.bias"}:
        torch.testing.assert_close(after["model"][key], before[key], rtol=0, atol=1e-9)


def test_fine_tuning_with_the_same_classes_keeps_the_classifier(make_config, short_run, capsys):
    finish(make_config(schedule={"epochs": 1}), [f"init={out_of(short_run) / 'last.pt'}"])
    said = capsys.readouterr().err
    assert "started from the weights in" in said
    assert "the classifier is new" not in said


def test_weights_of_another_model_do_not_start_a_run(make_config, short_run, capsys):
    config = make_config(model={"name": "test_vit", "args": {"img_size": 32}})
    assert main([str(config), f"init={out_of(short_run) / 'last.pt'}"]) == 1
    assert "does not fit the model" in capsys.readouterr().err
    assert main([str(config), "init=gone.pt"]) == 1
    assert "gone.pt: there is no such file" in capsys.readouterr().err


@pytest.mark.heavy
@pytest.mark.parametrize("processes", [1, 2])
def test_ten_random_kills_leave_no_trace(
    processes, make_config, start, wait_for_step, assert_same_state, metrics, workers_changes
):
    torchrun = ["--standalone", "--nproc_per_node=2"] if processes == 2 else None
    whole, killed = make_config(**workers_changes), make_config(**workers_changes)
    process = start(whole, torchrun=torchrun)
    assert process.wait() == 0, process.text()
    steps = sorted(random.Random(processes).choices(range(1, 23), k=10))
    kill_and_resume(killed, start, wait_for_step, steps, torchrun)
    assert_same_state(out_of(whole) / "last.pt", out_of(killed) / "last.pt")
    assert_each_step_once(metrics, killed, whole)


def test_a_changed_weight_decay_is_applied(make_config, short_run):
    """Not only announced: the optimiser's state brings the old one back."""
    from wbmm.train import checkpoint

    config = make_config(schedule={"epochs": 1})
    finish(config)
    finish(config, ["resume=auto", "schedule.epochs=2", "optim.weight_decay=0.123"])
    saved = checkpoint.read(out_of(config) / "last.pt")
    assert max(group["weight_decay"] for group in saved["optimizer"]["param_groups"]) == 0.123


def test_another_run_is_not_written_over_by_a_resumed_one(make_config, short_run, capsys):
    other = make_config(schedule={"epochs": 1})
    finish(other)
    before = (out_of(other) / "last.pt").read_bytes()
    assert main([str(other), f"resume={out_of(short_run) / 'last.pt'}"]) == 1
    assert "already holds another run" in capsys.readouterr().err
    assert (out_of(other) / "last.pt").read_bytes() == before


def test_a_damaged_checkpoint_is_put_aside(make_config):
    config = make_config()
    finish(config)
    last, previous = out_of(config) / "last.pt", out_of(config) / "last-1.pt"
    last.write_bytes(last.read_bytes()[:1000])
    from wbmm.train import checkpoint

    assert checkpoint.latest(out_of(config))[0] == previous
    assert not last.exists()
    assert (out_of(config) / "last.damaged.pt").exists()


def test_a_checkpoint_is_read_once(make_config, files_read):
    config = make_config(schedule={"epochs": 1, "warmup_epochs": 0})
    fit(load_config(config))
    last = out_of(config) / "last.pt"
    assert files_read == []
    for resume in ("auto", last):
        fit(load_config(config, ["schedule.epochs=2", f"resume={resume}"]))
        assert files_read == [last]
        files_read.clear()
    fit(load_config(config, [f"init={last}", f"out={config.parent / 'second'}"]))
    assert files_read == [last]

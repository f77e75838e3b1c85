import os
import random
import signal

import pytest
import torch

from wbmm.train.config import load_config
from wbmm.train.run import fit, main


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
    assert main([str(short_run)]) == 2
    assert "already holds a run: continue it with resume=auto" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model.name=test_vit", "model.args={img_size: 32}"], "another model: test_resnet with 5 classes"),
        (
            ["data.num_classes=7"],
            "another model: test_resnet with 5 classes; this run is of test_resnet with 7 classes",
        ),
        (["global_batch=32"], "counts 8 steps an epoch, this run 4"),
        (["ema.decay=null"], "was saved with an EMA"),
    ],
)
def test_a_checkpoint_of_another_run_is_an_error_before_the_first_step(make_config, short_run, overrides, text, capsys):
    config = make_config()
    assert main([str(config), f"resume={out_of(short_run) / 'last.pt'}", *overrides]) == 2
    assert text in capsys.readouterr().err
    assert not (out_of(config) / "metrics.jsonl").exists()


def test_what_changed_since_the_checkpoint_is_said(make_config, short_run, capsys):
    config = make_config()
    finish(config, [f"resume={out_of(short_run) / 'last.pt'}", "schedule.epochs=2", "batch=8"])
    said = capsys.readouterr().err
    assert "changed since that checkpoint: schedule.epochs 1 -> 2\n" in said
    assert "at step 8 of 16" in said


def test_resume_auto_in_a_new_folder_starts(make_config):
    assert finish(make_config(schedule={"epochs": 1}), ["resume=auto"]).step == 8


def test_fine_tuning_starts_at_step_0_from_the_weights_with_a_new_classifier(make_config, short_run, capsys):
    config = make_config(schedule={"epochs": 1}, optim={"lr": 1e-12}, ema={"decay": None}, model={"bn_eval": True})
    source = out_of(short_run) / "last.pt"
    finish(
        config, [f"init={source}", "data.num_classes=9", "schedule.warmup_lr=0", "schedule.min_lr=0", "data.size=48"]
    )
    assert "the classifier is new (fc.weight, fc.bias)" in capsys.readouterr().err
    before = torch.load(source, weights_only=True)["ema"]
    after = torch.load(out_of(config) / "last.pt", weights_only=True)
    assert after["position"]["step"] == 8
    assert after["model"]["fc.weight"].shape[0] == 9
    for key in before.keys() - {"fc.weight", "fc.bias"}:
        torch.testing.assert_close(after["model"][key], before[key], rtol=0, atol=1e-9)


def test_fine_tuning_with_the_same_classes_keeps_the_classifier(make_config, short_run, capsys):
    finish(make_config(schedule={"epochs": 1}), [f"init={out_of(short_run) / 'last.pt'}"])
    said = capsys.readouterr().err
    assert "started from the weights in" in said
    assert "the classifier is new" not in said


def test_weights_of_another_model_do_not_start_a_run(make_config, short_run, capsys):
    config = make_config(model={"name": "test_vit", "args": {"img_size": 32}})
    assert main([str(config), f"init={out_of(short_run) / 'last.pt'}"]) == 2
    assert "does not fit the model" in capsys.readouterr().err
    assert main([str(config), "init=gone.pt"]) == 2
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
    assert main([str(other), f"resume={out_of(short_run) / 'last.pt'}"]) == 2
    assert "already holds another run" in capsys.readouterr().err
    assert (out_of(other) / "last.pt").read_bytes() == before


def test_a_damaged_checkpoint_is_put_aside(make_config):
    config = make_config()
    finish(config)
    last, previous = out_of(config) / "last.pt", out_of(config) / "last-1.pt"
    last.write_bytes(last.read_bytes()[:1000])
    from wbmm.train import checkpoint

    assert checkpoint.latest(out_of(config)) == previous
    assert not last.exists()
    assert (out_of(config) / "last.damaged.pt").exists()

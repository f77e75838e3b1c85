"""Steps decided on the device, as on a GPU: forced here on a CPU, whose kernels take the same arguments."""

import json
import math
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wbmm.train import engine, outcome
from wbmm.train.config import load_config
from wbmm.train.dist import World, check_complete
from wbmm.train.fit import fit
from wbmm.train.outcome import Attempt, Outcomes

SHORT = {"schedule": {"epochs": 2}, "save": {"every_steps": 3}}
RARE_LOG = ["log.every=1000"]
CHECKPOINTING = "model.grad_checkpointing=true"


@pytest.fixture
def queued(monkeypatch):
    """The CPU is treated as a device that works while the host goes on."""
    monkeypatch.setattr(outcome, "QUEUED", ("cuda", "cpu"))


def out_of(config):
    return config.parent / "out"


def poison(monkeypatch, steps):
    """NaN images at the given steps (counted from 0)."""
    original = engine.prepare

    def poisoned(run, batch, micro):
        images, targets = original(run, batch, micro)
        return (images * math.nan if run.position.step in steps else images), targets

    monkeypatch.setattr(engine, "prepare", poisoned)


OPTIMISERS = {
    "adamw": ["optim.clip_grad=1.0"],
    "sgd": ["optim.name=sgd", "ema.warmup=true"],
    "checkpointing": [
        "optim.name=adam",
        "model={name: wbmm_a, args: {dims: [8, 16, 32, 64]}, grad_checkpointing: true}",
    ],
    "fp16": ["amp=fp16", "batch=16"],
}


@pytest.mark.parametrize("overrides", OPTIMISERS.values(), ids=OPTIMISERS)
def test_the_device_decides_as_the_host_does(make_config, monkeypatch, queued, assert_same_state, overrides, capsys):
    """Bit by bit; the first step is left out too, at which an optimiser has no state yet."""
    device, host = make_config(**SHORT), make_config(**SHORT)
    poison(monkeypatch, {0, 2, 3, 9})
    fit(load_config(device, [*overrides, *RARE_LOG]))
    said = capsys.readouterr().err
    monkeypatch.setattr(engine, "decides_on_device", lambda *_: False)
    fit(load_config(host, [*overrides, *RARE_LOG]))
    assert_same_state(out_of(device) / "last.pt", out_of(host) / "last.pt")
    skipped = [line for line in said.splitlines() if "step skipped" in line]
    assert skipped == [line for line in capsys.readouterr().err.splitlines() if "step skipped" in line]
    assert len(skipped) == 4


class Reads(TorchDispatchMode):
    """Notes where a value goes from a tensor to the host, or a number from the host's memory to a tensor."""

    def __init__(self):
        super().__init__()
        self.found, self.ops = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += 1
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "lift_fresh", "equal", "nonzero", "is_nonzero"):
            self.found.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("overrides", OPTIMISERS.values(), ids=OPTIMISERS)
def test_a_step_reads_nothing_from_the_device(make_config, monkeypatch, queued, overrides):
    """The first step is logged, and the last of an epoch is followed by its evaluation: these read."""
    seen, patched = {}, set()

    def forbid(name):
        original = getattr(torch.Tensor, name)

        def read(tensor, *args, **kwargs):
            if inside:
                patched.add(name)
            return original(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, read)

    inside = False
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        forbid(name)
    step, read_outcomes = engine.train_step, engine.read_outcomes

    def watched(function, run, *args, **kwargs):
        nonlocal inside
        inside = run.position.step % 8 not in (0, 1)
        with Reads() as reads:
            result = function(run, *args, **kwargs)
        if inside:
            found = seen.setdefault(run.position.step, [])
            found += reads.found
        inside = False
        return result

    monkeypatch.setattr(engine, "train_step", lambda *args: watched(step, *args))
    monkeypatch.setattr(engine, "read_outcomes", lambda *args, **kwargs: watched(read_outcomes, *args, **kwargs))
    fit(load_config(make_config(**SHORT), [*overrides, *RARE_LOG, "save.every_steps=0"]))
    assert len(seen) == 12
    assert not any(seen.values()), seen
    assert not patched


def test_an_optimiser_that_cannot_leave_out_a_step_says_so(make_config, queued, capsys, monkeypatch, metrics):
    config = make_config(**SHORT)
    poison(monkeypatch, {2})
    assert fit(load_config(config, ["optim.name=lamb"])).status == "finished"
    said = capsys.readouterr().err
    assert "optim.name=lamb: each step waits for the device" in said
    assert "step 2, learning rate" in said
    state = torch.load(out_of(config) / "last.pt", weights_only=True)
    assert all(torch.isfinite(value).all() for value in {**state["model"], **state["ema"]}.values())


def test_too_many_bad_steps_stop_the_run_at_the_same_place(make_config, monkeypatch, queued):
    """Read a step late, named as on a CPU. The checkpoints are those from before the row."""
    config = make_config(schedule={"epochs": 2}, save={"every_steps": 1})
    poison(monkeypatch, range(5, 100))
    text = r"step 7, learning rate \S+: the loss is nan, after 2 skipped steps in a row; .*the input images.*intact"
    with pytest.raises(FloatingPointError, match=text):
        fit(load_config(config, ["max_skips=2", *RARE_LOG]))
    steps = [
        torch.load(out_of(config) / name, weights_only=True)["position"]["step"] for name in ("last.pt", "last-1.pt")
    ]
    assert steps == [5, 4]


def test_gradients_that_are_not_finite_are_named(make_config, monkeypatch, queued):
    original = engine.forward

    def steep(run, images, targets):
        zero = run.model.fc.bias.sum() * 0
        return original(run, images, targets) + zero.sqrt()  # an infinite slope at 0

    monkeypatch.setattr(engine, "forward", steep)
    with pytest.raises(FloatingPointError, match=r"the gradients are not finite.*gradients that are not: fc\.bias\."):
        fit(load_config(make_config(**SHORT), ["max_skips=1", *RARE_LOG]))


def test_a_signal_saves_and_resuming_leaves_no_trace(make_config, monkeypatch, queued, assert_same_state):
    """With a bad step right before it, whose outcome has not been read at the time of the signal."""
    whole, stopped = make_config(**SHORT), make_config(**SHORT)
    poison(monkeypatch, {2, 10})
    fit(load_config(whole, RARE_LOG))
    original = engine.forward

    def interrupted(run, *args):
        if run.position.step == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(run, *args)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "forward", interrupted)
        assert fit(load_config(stopped, RARE_LOG)).status == "stopped"
    assert json.loads((out_of(stopped) / "interrupted.json").read_text())["step"] == 11
    assert torch.load(out_of(stopped) / "last.pt", weights_only=True)["position"]["skips"] == 1
    fit(load_config(stopped, [*RARE_LOG, "resume=auto"]))
    assert_same_state(out_of(whole) / "last.pt", out_of(stopped) / "last.pt")


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_checkpoints_of_either_kind_of_optimiser_continue_with_the_other(make_config, monkeypatch, name):
    config, overrides = make_config(**SHORT), [f"optim.name={name}", "schedule.epochs=1"]
    fit(load_config(config, overrides))
    with monkeypatch.context() as patch:
        patch.setattr(outcome, "QUEUED", ("cpu",))
        more = [f"optim.name={name}", "schedule.epochs=2", "resume=auto", "model.channels_last=false"]
        assert fit(load_config(config, more)).step == 16
        state = torch.load(out_of(config) / "last.pt", weights_only=True)
        assert all(group["fused"] for group in state["optimizer"]["param_groups"])
    assert fit(load_config(config, [f"optim.name={name}", "schedule.epochs=3", "resume=auto"])).step == 24


def test_two_processes_decide_alike(make_config, start_command, assert_same_state):
    """One of them has bad images, gets the signal, and reads nothing in between: see `two_processes.py`."""
    config, script = make_config(**SHORT), Path(__file__).with_name("two_processes.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    agent = start_command([sys.executable, *launcher, str(script), str(config)], config.parent)
    assert agent.wait() == 0, agent.text()
    said = agent.text()
    assert "rank 0 is done" in said
    assert "rank 1 is done" in said
    device, host, stopped = (config.parent / name / "last.pt" for name in ("device", "host", "stopped"))
    assert_same_state(device, host)
    assert_same_state(device, stopped)
    assert "SIGTERM: saved at step 11" in said or "SIGTERM: saved at step 12" in said
    for step, runs in ((6, 4), (9, 3)):
        assert said.count(f"step {step}, learning rate") == runs, "said by the first process alone, once a run"


def test_a_sum_in_which_a_process_is_missing_is_an_error():
    world = World(0, 4, torch.device("cpu"))
    check_complete(4.0, world)
    with pytest.raises(RuntimeError, match="nccl gave up: a sum over 4 processes holds 3"):
        check_complete(3.0, world)
    outcomes = Outcomes(world, lag=1)
    outcomes.put(Attempt(0, 0.1, [], torch.zeros(1), [], torch.zeros(0)), torch.tensor([1.0, 1, 0, 3, 1]).double())
    with pytest.raises(RuntimeError, match="holds 3"):
        outcomes.skipping(0)

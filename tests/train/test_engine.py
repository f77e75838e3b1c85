import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
import torch.nn as nn
import yaml

from wbmm import WBMM2d
from wbmm.commands.train import main
from wbmm.train import engine
from wbmm.train import fit as fit_module
from wbmm.train.config import load_config
from wbmm.train.dist import World
from wbmm.train.engine import validate
from wbmm.train.fit import fit
from wbmm.train.runs import RunFacts

ONE_EPOCH = {"schedule": {"epochs": 1, "warmup_epochs": 0}, "save": {"every_steps": 0}}
NARROW = "model={name: wbmm_a, args: {dims: [8, 16, 32, 64]}}"


def out_of(config):
    return config.parent / "out"


def read(config, name: str = "last.pt") -> dict:
    return torch.load(out_of(config) / name, weights_only=True)


@pytest.mark.parametrize(
    "overrides",
    [
        ["amp=fp16", "optim.clip_grad=1.0"],
        [NARROW, "model.grad_checkpointing=true", "optim.layer_decay=0.8", "ema.warmup=true"],
    ],
    ids=["fp16", "checkpointing"],
)
def test_options_train_and_resume(make_config, overrides):
    config = make_config(**ONE_EPOCH)
    overrides = ["batch=16", *overrides]
    assert fit(load_config(config, overrides)).status == "finished"
    before = read(config)
    assert fit(load_config(config, [*overrides, "resume=auto", "schedule.epochs=2"])).step == 16
    after = read(config)
    assert any(not torch.equal(value, after["model"][key]) for key, value in before["model"].items())
    assert all(torch.isfinite(value).all() for value in after["model"].values())


@dataclass
class Observed:
    """What a run computed: its losses, the outputs of its layers with weights, its last checkpoint."""

    losses: list[float]
    outputs: dict[str, list[tuple]]  # name to (dtype, whether channels-last and nothing else) of each call
    state: dict


@pytest.fixture(scope="module")
def observe(make_config, metrics):
    """Trains one epoch of 8 steps, unless told otherwise, and reports what happened inside."""

    def train(*overrides: str) -> Observed:
        outputs, original = {}, fit_module.build_model

        def build_model(*args):
            model = original(*args)
            for name, module in model.named_modules():
                if isinstance(module, nn.Conv2d | nn.Linear | WBMM2d):
                    module.register_forward_hook(partial(note, name))
            return model

        def note(name, _module, _inputs, output):
            channels_last = output.ndim == 4 and not output.is_contiguous()
            outputs.setdefault(name, []).append((output.dtype, channels_last))

        config = make_config(**ONE_EPOCH)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fit_module, "build_model", build_model)
            fit(load_config(config, ["batch=16", "optim.lr=1e-4", *overrides]))
        return Observed([record["loss"] for record in metrics(out_of(config))], outputs, read(config))

    return train


SHORT = [NARROW, "batch=8", "schedule.epochs=2", "data.args={train_limit: 32}"]  # 4 steps of 2 forward passes


@pytest.fixture(scope="module")
def plain(observe):
    return observe(*SHORT)


@pytest.mark.parametrize(("amp", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_mixed_precision_computes_in_it_and_keeps_the_weights_in_fp32(observe, plain, amp, dtype):
    """The losses after the first step differ more with fp16, which skips steps until it has found its loss scale."""
    mixed = observe(*SHORT, f"amp={amp}")
    assert {dtype for calls in plain.outputs.values() for dtype, _ in calls} == {torch.float32}
    assert {dtype for calls in mixed.outputs.values() for dtype, _ in calls} == {dtype}
    assert {"stages.1.blocks.0.mixer", "head.fc"} <= mixed.outputs.keys() == plain.outputs.keys()
    assert mixed.losses[0] == pytest.approx(plain.losses[0], rel=1e-3)
    assert mixed.losses[0] != plain.losses[0]
    assert mixed.losses == pytest.approx(plain.losses, rel=0.05 if amp == "fp16" else 5e-3)
    assert {value.dtype for value in mixed.state["model"].values()} == {torch.float32, torch.int64}
    assert ("scale" in mixed.state["scaler"]) == (amp == "fp16")


def test_activation_checkpointing_gives_the_same_weights_and_statistics(observe, plain):
    """The blocks run twice, and their batch norms must not count a batch twice."""
    recomputed = observe(*SHORT, "model.grad_checkpointing=true")
    calls = {name: len(recomputed.outputs[name]) - len(plain.outputs[name]) for name in plain.outputs}
    assert (calls["stages.1.blocks.0.mixer"], calls["stem.conv1"]) == (8, 0)
    for part in ("model", "ema"):
        for key, value in plain.state[part].items():
            torch.testing.assert_close(recomputed.state[part][key], value, rtol=0, atol=0, msg=f"{part}.{key}")
    assert plain.state["model"]["stages.0.blocks.0.norm.num_batches_tracked"] == 8
    assert recomputed.losses == plain.losses


def test_the_memory_layout_changes_nothing_but_itself(observe):
    """On a model that does not choose its layout itself."""
    channels_last, contiguous = observe(), observe("model.channels_last=false")
    assert all(value for _, value in channels_last.outputs["layer2.0.conv1"])
    assert not any(value for calls in contiguous.outputs.values() for _, value in calls)
    assert contiguous.losses == pytest.approx(channels_last.losses, rel=1e-3)


def test_frozen_parts_stay(make_config):
    config, fresh = make_config(**ONE_EPOCH), make_config(**ONE_EPOCH)
    fit(load_config(config, ["batch=16", "model.freeze=[conv1, bn1, layer1]"]))
    fit(load_config(fresh, ["batch=16", "optim.lr=1e-30", "schedule.min_lr=0", "schedule.warmup_lr=0"]))
    after, before = read(config)["model"], read(fresh)["model"]
    names = {key for key in before if "running" not in key and "num_batches" not in key}
    parameters = {key for key in names if (after[key] - before[key]).abs().max() > 1e-9}
    assert not any(key.startswith(("conv1", "bn1", "layer1")) for key in parameters)
    assert {"layer2", "layer3", "layer4", "fc"} == {key.split(".")[0] for key in parameters}
    assert not after["bn1.running_mean"].any(), "the statistics of a frozen batch norm"


@pytest.mark.heavy
def test_a_compiled_model_trains_to_the_same_losses_and_weights(make_config, metrics):
    """3 steps of every kind of block; without drop path, whose random numbers are others in compiled code."""
    blocks = {"dims": [8, 16, 32, 64], "pattern": ["D", "W", "WD", "M"], "depths": [1, 1, 2, 1], "ls_init_value": 1.0}
    changes = {
        "model": {"name": "wbmm_a", "args": blocks, "drop_path": 0.0},
        "data": {"args": {"train_limit": 48, "val_limit": 16}},
        "optim": {"name": "sgd", "lr": 0.05, "weight_decay": 0.0},
    }
    start, plain, compiled = (make_config(**ONE_EPOCH, **changes, batch=16) for _ in range(3))
    fit(load_config(start, ["optim.lr=1e-30", "schedule.min_lr=0"]))
    fit(load_config(plain))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fit(load_config(compiled, ["model.compile=true"]))
    frames = torch._dynamo.utils.counters["frames"]
    assert frames["ok"] == frames["total"] > 0
    got, expected = ([record["loss"] for record in metrics(out_of(config))] for config in (compiled, plain))
    assert len(got) == 3
    assert got == pytest.approx(expected, rel=1e-5)
    got, expected, before = (read(config)["model"] for config in (compiled, plain, start))
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        moved = (value - before[key]).float().norm()
        assert (got[key] - value).float().norm() <= 1e-3 * moved + 1e-6, key
    for key in ("stem.conv1.weight", "stages.1.blocks.0.mixer.table", "stages.2.blocks.0.mixer.table"):
        assert (expected[key] - before[key]).norm() > 1e-3, "or the comparison shows nothing"


def test_a_step_waits_for_the_device_once(make_config, monkeypatch):
    """Counted are the places in our own code that read a tensor's values on the host."""
    waits, inside = Counter(), False

    def counting(name):
        original = getattr(torch.Tensor, name)

        def read(tensor, *args, **kwargs):
            caller = sys._getframe(1).f_code
            if inside and "wbmm/train" in caller.co_filename:
                waits[caller.co_name] += 1
            return original(tensor, *args, **kwargs)

        return read

    def step(run, batches):
        nonlocal inside
        inside = True
        try:
            return original_step(run, batches)
        finally:
            inside = False

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, counting(name))
    original_step = engine.train_step
    monkeypatch.setattr(engine, "train_step", step)
    result = fit(load_config(make_config(schedule={"epochs": 1, "warmup_epochs": 0}), ["optim.clip_grad=1.0"]))
    assert waits == {"all_sum": result.step}


def test_clipping_bounds_the_update(make_config):
    """With plain SGD and a tiny norm the weights hardly move."""
    states = {}
    for name, overrides in {
        "fresh": ["optim.lr=1e-30", "schedule.min_lr=0"],
        "free": ["optim.lr=0.1"],
        "clipped": ["optim.lr=0.1", "optim.clip_grad=1e-6"],
    }.items():
        config = make_config(**ONE_EPOCH, model={"bn_eval": True}, ema={"decay": None})
        fit(load_config(config, ["batch=16", "optim.name=sgd", "optim.weight_decay=0", *overrides]))
        states[name] = read(config)["model"]
    moved = {
        name: max((state[key] - value).abs().max() for key, value in states["fresh"].items())
        for name, state in states.items()
    }
    assert moved["clipped"] < 1e-5 < moved["free"]


@pytest.mark.parametrize(("minutes", "steps"), [(5, [3, 6, 8, 11, 14, 16]), (0, [8, 16])])
def test_checkpoints_are_written_by_time_as_well(make_config, monkeypatch, minutes, steps):
    """Steps take 100 s here. The end of an epoch, at which it is saved anyway, starts the time anew."""
    config = make_config(schedule={"epochs": 2}, save={"every_steps": 0, "every_minutes": minutes})
    now, saved, original = 0.0, [], engine.forward

    def forward(*args):
        nonlocal now
        now += 100
        return original(*args)

    monkeypatch.setattr(engine, "forward", forward)
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(engine.checkpoint, "write", lambda out, state, *_: saved.append(state["position"]["step"]))
    fit(load_config(config, ["batch=16"]))
    assert saved == steps


def test_of_equally_good_epochs_the_last_is_kept(make_config, monkeypatch):
    scores = iter([50.0, 60.0, 60.0, 40.0])
    monkeypatch.setattr(engine, "measure", lambda run: {"loss": 1.0, "top1": next(scores), "top5": 100.0})
    config = make_config(schedule={"epochs": 4}, ema={"decay": None})
    assert fit(load_config(config)).best == 60.0
    assert read(config, "best.pt")["position"]["step"] == 3 * 8  # eight steps an epoch
    assert RunFacts(out_of(config)).best["epoch"] == 3


def test_it_learns_and_leaves_its_files(make_config):
    config = make_config(
        schedule={"epochs": 6}, mix={"mixup": 0.0, "cutmix": 0.0}, save={"every_epochs": 4}, ema={"decay": None}
    )
    result = fit(load_config(config))
    assert result.best == result.metrics["top1"] or result.best > result.metrics["top1"]
    assert result.best > 50, "one class in five would be 20"
    state = read(config)
    assert state["config"] == yaml.safe_load((out_of(config) / "config.yaml").read_text())
    assert state["position"]["step"] == 48
    assert read(config, "epoch-0004.pt")["position"]["step"] == 32
    assert read(config, "best.pt")["position"]["best"] == result.best
    assert {"summary.md", "curves.png", "metrics.jsonl"} <= {path.name for path in out_of(config).iterdir()}


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["batch=6"], "not a multiple of 6"),
        (["global_batch=256"], "fewer than one global batch of 256"),
        (["model.name=wbmm_tt"], "'wbmm_tt' is not a model that timm knows; near it: wbmm_t"),
        (["data.root=/nowhere"], "/nowhere"),
        (["model.freeze=[nothing]"], "no parameter is under 'nothing'"),
        (["device=tpu"], "device is 'tpu'"),
        (["modle.name=x"], "did you mean 'model'"),
    ],
)
def test_mistakes_end_the_command_before_the_first_step(make_config, overrides, text, capsys):
    config = make_config()
    assert main([str(config), *overrides]) == 1
    assert text in capsys.readouterr().err
    assert not (out_of(config) / "metrics.jsonl").exists()


class Share:
    """Images whose only pixel is their class, `wrong` of which the model below gets wrong."""

    def __init__(self, size: int, sizes: list[int], wrong: int = 0):
        targets = torch.arange(size) % 7
        pixels = torch.where(torch.arange(size) < wrong, (targets + 1) % 7, targets)
        self.size, self.batches = size, list(zip(pixels.split(sizes), targets.split(sizes), strict=True))

    def __iter__(self):
        return ((pixels[:, None, None, None].float(), targets) for pixels, targets in self.batches)


class Reader(torch.nn.Module):
    def forward(self, images):
        return torch.nn.functional.one_hot(images.flatten().long(), 7).float() * 20


def test_evaluation_counts_images_not_batches():
    world = World(0, 1, torch.device("cpu"))
    figures = validate(Reader(), Share(11, [4, 4, 3], wrong=3), world)
    assert figures["top1"] == pytest.approx(100 * 8 / 11)
    assert figures["loss"] == pytest.approx(20 * 3 / 11, rel=1e-5)


def test_an_image_lost_in_evaluation_is_an_error():
    world = World(0, 1, torch.device("cpu"))
    share = Share(11, [4, 4, 3])
    share.batches.pop()
    with pytest.raises(RuntimeError, match="counted 8 images, but the validation set has 11"):
        validate(Reader(), share, world)
    assert validate(Reader(), share, world, exact=False)["top1"] == 100


def test_an_evaluation_can_be_abandoned():
    assert validate(Reader(), Share(4, [4]), World(0, 1, torch.device("cpu")), stop=lambda: True) is None

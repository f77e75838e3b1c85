import pytest
import torch
import yaml

from wbmm.train.config import load_config
from wbmm.train.run import fit, main

ONE_EPOCH = {"schedule": {"epochs": 1, "warmup_epochs": 0}, "save": {"every_steps": 0}}


def out_of(config):
    return config.parent / "out"


def read(config, name: str = "last.pt") -> dict:
    return torch.load(out_of(config) / name, weights_only=True)


@pytest.mark.parametrize(
    "overrides",
    [
        ["amp=bf16", "model.channels_last=false"],
        ["amp=fp16", "optim.clip_grad=1.0"],
        ["model.name=wbmm_a", "model.grad_checkpointing=true", "optim.layer_decay=0.8", "ema.warmup=true"],
    ],
    ids=" ".join,
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
def test_a_compiled_model_trains_to_the_same_losses(make_config, metrics):
    plain, compiled = make_config(**ONE_EPOCH), make_config(**ONE_EPOCH)
    common = ["batch=16", "model.drop_path=0", "optim.lr=1e-5"]
    fit(load_config(plain, common))
    fit(load_config(compiled, [*common, "model.compile=true"]))
    got, expected = ([record["loss"] for record in metrics(out_of(config))] for config in (compiled, plain))
    assert got == pytest.approx(expected, rel=1e-3)
    assert read(compiled)["model"].keys() == read(plain)["model"].keys()


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


def test_it_learns_and_the_checkpoint_describes_itself(make_config):
    config = make_config(
        schedule={"epochs": 6}, mix={"mixup": 0.0, "cutmix": 0.0}, save={"every_epochs": 4}, ema={"decay": None}
    )
    result = fit(load_config(config))
    assert result.best == result.metrics["top1"] or result.best > result.metrics["top1"]
    assert result.best > 80
    state = read(config)
    assert {
        "model",
        "ema",
        "optimizer",
        "scheduler",
        "scaler",
        "position",
        "config",
        "versions",
        "commit",
    } <= state.keys()
    assert state["config"] == yaml.safe_load((out_of(config) / "config.yaml").read_text())
    assert state["position"]["step"] == 48
    assert read(config, "epoch-0004.pt")["position"]["step"] == 32
    assert read(config, "best.pt")["position"]["best"] == result.best
    assert {"summary.md", "curves.png", "metrics.jsonl"} <= {path.name for path in out_of(config).iterdir()}


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["batch=3"], "not a multiple of 3"),
        (["global_batch=256"], "fewer than one global batch of 256"),
        (["model.name=wbmm_tt"], "'wbmm_tt' is not a model that timm knows; near it: wbmm_t"),
        (["data.root=/nowhere"], "/nowhere"),
        (["model.freeze=[nothing]"], "no parameter is under 'nothing'"),
        (["device=tpu"], "device 'tpu'"),
        (["modle.name=x"], "did you mean 'model'"),
    ],
)
def test_mistakes_end_the_command_before_the_first_step(make_config, overrides, text, capsys):
    config = make_config()
    assert main([str(config), *overrides]) == 2
    assert text in capsys.readouterr().err
    assert not (out_of(config) / "metrics.jsonl").exists()

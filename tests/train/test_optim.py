import pytest
import timm
import torch
import torch.nn as nn
from timm.optim import get_optimizer_info, list_optimizers

import wbmm  # noqa: F401  (registers the models)
from wbmm.models.layer_groups import layer_group, layer_scale, num_groups
from wbmm.train.config import config_from_dict
from wbmm.train.optim import OptimConfig, ScheduleConfig, build_optimizer, build_scheduler


@pytest.fixture(scope="module")
def wbmm_a() -> nn.Module:
    return timm.create_model("wbmm_a", num_classes=10)


def decayed(model, optimizer) -> dict[str, bool]:
    by_id = {id(p): group["weight_decay"] > 0 for group in optimizer.param_groups for p in group["params"]}
    return {name: by_id[id(parameter)] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("layer_decay", [None, 0.8])
def test_weight_decay_leaves_out_vectors_and_biases_and_keeps_grn_and_tables(wbmm_a, layer_decay):
    optimizer = build_optimizer(wbmm_a, OptimConfig(layer_decay=layer_decay), 1e-3)
    for name, decay in decayed(wbmm_a, optimizer).items():
        parameter = wbmm_a.get_parameter(name)
        if name.endswith(("grn.gamma", "grn.beta", ".table")):
            assert decay, name
        else:
            assert decay == (parameter.ndim > 1 and not name.endswith(".bias")), name
    names = [name for name, _ in wbmm_a.named_parameters()]
    assert any(name.endswith("grn.beta") for name in names)
    assert any(name.endswith(".table") for name in names)


def test_the_recipe_reaches_adamw(wbmm_a):
    optimizer = build_optimizer(wbmm_a, OptimConfig(betas=[0.8, 0.9], eps=1e-6, weight_decay=0.1), 3e-3)
    assert type(optimizer) is torch.optim.AdamW
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}
    assert {group["eps"] for group in optimizer.param_groups} == {1e-6}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}
    assert {group["lr"] for group in optimizer.param_groups} == {3e-3}


def test_an_optimiser_without_betas(wbmm_a):
    assert isinstance(build_optimizer(wbmm_a, OptimConfig(name="sgd"), 0.1), torch.optim.SGD)
    with pytest.raises(ValueError, match="'adamww' is not one of timm's optimisers; near it: adamw"):
        build_optimizer(wbmm_a, OptimConfig(name="adamww"), 0.1)


@pytest.mark.parametrize(
    "name", [name for name in list_optimizers() if not name.startswith(("fused", "bnb", "adahess"))]
)
def test_every_optimiser_of_the_configuration_can_be_built(name):
    betas = [0.9, 0.99, 0.999][: get_optimizer_info(name).num_betas]
    config = config_from_dict({"optim": {"name": name, "betas": betas}}).optim
    model = nn.Linear(4, 4)
    optimizer = build_optimizer(model, config, 1e-3)
    model(torch.ones(2, 4)).sum().backward()
    if "kron" not in name:  # which compiles
        optimizer.step()
        assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["cosine", "tanh", "step", "multistep", "poly"])
def test_every_schedule_that_the_configuration_takes_steps(name):
    config = config_from_dict({"schedule": {"name": name, "epochs": 10, "warmup_epochs": 1}}).schedule
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)
    scheduler = build_scheduler(optimizer, config, 5)
    scheduler.step_update(25)
    assert 0 < optimizer.param_groups[0]["lr"] <= 1


def learning_rates(model, layer_decay: float) -> dict[str, float]:
    """Of each parameter in the first step, with 1 for the whole model."""
    optimizer = build_optimizer(model, OptimConfig(layer_decay=layer_decay), 1.0)
    build_scheduler(optimizer, ScheduleConfig(epochs=2, warmup_epochs=0), 4).step_update(0)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    return {name: rates[id(parameter)] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("name", "groups", "last_block"), [("wbmm_t", 9, 17), ("wbmm_s", 12, 26)])
def test_layer_decay_goes_by_the_groups_of_the_family(name, groups, last_block):
    with torch.device("meta"):
        model = timm.create_model(name)
    rates = learning_rates(model, 0.5)
    expected = {
        "stem.conv1.weight": 0,
        "stages.0.blocks.2.ffn.fc1.weight": 1,
        "stages.1.downsample.conv.weight": 2,
        "stages.1.blocks.0.mixer.table": 2,
        "stages.2.downsample.norm.bias": 3,
        "stages.2.blocks.2.gamma": 3,
        "stages.2.blocks.3.norm.weight": 4,
        f"stages.2.blocks.{last_block}.ffn.fc2.weight": groups - 1,
        "stages.3.downsample.conv.weight": groups,
        "stages.3.blocks.2.mixer.table": groups,
        "head.norm.weight": groups + 1,
        "head.fc.weight": groups + 1,
    }
    for parameter, group in expected.items():
        assert rates[parameter] == pytest.approx(0.5 ** (groups + 1 - group)), parameter
    assert len(set(rates.values())) == groups + 2


def test_layer_groups_of_any_number():
    depths = (3, 3, 18, 3)
    assert [num_groups(depths), num_groups((3, 3, 27, 3)), num_groups((2, 2, 8, 2))] == [9, 12, 6]
    assert layer_group("stages.2.blocks.17.gamma", depths, groups=12) == 8
    assert layer_group("stages.3.blocks.0.gamma", depths, groups=12) == 12
    assert layer_group("decode_head.stages.0.blocks.0.gamma", depths, groups=12) == 13
    assert layer_scale("stem.conv1.weight", depths, 0.8, groups=12) == pytest.approx(0.8**13)
    with pytest.raises(ValueError, match=r"8 layer groups are too few for depths \(3, 3, 18, 3\); use 9 or more"):
        layer_group("stem.conv1.weight", depths, groups=8)
    with pytest.raises(ValueError, match="the blocks of 4 stages"):
        num_groups((3, 3, 18))


def test_layer_decay_of_other_models_is_timms():
    model = timm.create_model("test_convnext")
    rates = learning_rates(model, 0.5)
    assert rates["stem.0.weight"] < rates["stages.0.blocks.0.mlp.fc1.weight"] < rates["head.fc.weight"] == 1


def test_warm_up_is_linear_and_the_cosine_ends_at_the_minimum():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = build_scheduler(optimizer, ScheduleConfig(epochs=10, warmup_epochs=2, warmup_lr=0.0, min_lr=0.1), 5)

    def at(step: int) -> float:
        scheduler.step_update(step)
        return optimizer.param_groups[0]["lr"]

    assert [at(step) for step in (0, 1, 5, 9)] == pytest.approx([0.0, 0.1, 0.5, 0.9])
    assert at(25) == pytest.approx(0.55)
    assert at(50) == pytest.approx(0.1)
    assert at(7) == pytest.approx(0.7), "a pure function of the step"


def test_unknown_schedule():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)
    with pytest.raises(ValueError, match="'cosinus'"):
        build_scheduler(optimizer, ScheduleConfig(name="cosinus"), 5)

from pathlib import Path

import pytest
import timm
import yaml

import wbmm  # noqa: F401  (registers the models)
from wbmm.train.config import TrainConfig, config_from_dict, load_config, to_dict, to_yaml

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted([*CONFIGS.glob("*.yaml"), *(CONFIGS / "imagenet").glob("*.yaml")])


@pytest.fixture
def write(tmp_path):
    def write_yaml(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_yaml


def test_inheritance_merges_deeply_and_the_nearest_wins(write):
    write("a.yaml", "model: {name: wbmm_s, drop_path: 0.4}\nseed: 1\nmix: {mixup: 0.1}\n")
    write("sub/b.yaml", "base: ../a.yaml\nmodel: {drop_path: 0.2}\nseed: 2\n")
    config = load_config(write("sub/c.yaml", "base: b.yaml\nseed: 3\n"), ["mix.cutmix=0.7"])
    assert (config.model.name, config.model.drop_path, config.seed) == ("wbmm_s", 0.2, 3)
    assert (config.mix.mixup, config.mix.cutmix) == (0.1, 0.7)


def test_a_file_that_inherits_from_itself(write):
    write("a.yaml", "base: b.yaml\n")
    with pytest.raises(ValueError, match="inherits from itself"):
        load_config(write("b.yaml", "base: a.yaml\n"))


def test_a_missing_base_is_named(write):
    with pytest.raises(ValueError, match=r"no configuration file .*gone.yaml \(the base of .*a.yaml\)"):
        load_config(write("a.yaml", "base: gone.yaml\n"))


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("modle.name=wbmm_t", r"unknown key 'modle'.*did you mean 'model'"),
        ("optim.wieght_decay=0.1", r"unknown key 'optim.wieght_decay'.*did you mean 'optim.weight_decay'"),
        ("lr=0.1", r"unknown key 'lr'.*nearest valid key is 'optim.lr'"),
        ("zzz=1", r"unknown key 'zzz'.*nearest valid key is"),
        ("seed=one", r"seed .* must be a whole number, got 'one'"),
        ("seed=1.5", r"seed .* must be a whole number, got 1.5"),
        ("seed=true", r"seed .* must be a whole number, got True"),
        ("optim.lr=fast", r"optim.lr .* must be a number, got 'fast'"),
        ("optim.lr=.nan", r"optim.lr .* must be a number, got nan"),
        ("optim.lr=true", r"optim.lr .* must be a number, got True"),
        ("optim.lr=-1", r"optim.lr must be above 0"),
        ("model.compile=1", r"model.compile .* must be true or false, got 1"),
        ("model.freeze=stem", r"model.freeze .* must be a list, got 'stem'"),
        ("optim.betas=[0.9, x]", r"optim.betas\[1\] .* must be a number, got 'x'"),
        ("model=wbmm_t", r"model in .* must hold `key: value` pairs"),
        ("amp=fp8", r"amp .* is 'fp8'; valid: none, bf16, fp16"),
        ("data.on_bad_image=ignore", r"valid: fail, skip"),
        ("schedule.warmup_epochs=1000", r"schedule.warmup_epochs must be between 0 and"),
        ("ema.decay=1.5", r"ema.decay must be between 0 and 1"),
        ("seed", r"'seed' is not of the form key=value"),
        ("model.args={a: ", r"not valid YAML"),
    ],
)
def test_wrong_overrides_are_errors_that_name_the_key(write, override, text):
    with pytest.raises(ValueError, match=text):
        load_config(write("a.yaml", ""), [override])


def test_the_file_is_named_in_the_error(write):
    with pytest.raises(ValueError, match=r"in .*/a.yaml"):
        load_config(write("a.yaml", "sede: 1\n"))


def test_numbers_without_a_dot_and_nothing(write):
    config = load_config(write("a.yaml", "optim: {lr: 1e-3}\n"), ["optim.clip_grad=5", "data.root=null"])
    assert (config.optim.lr, config.optim.clip_grad, config.data.root) == (1e-3, 5.0, None)
    assert isinstance(config.optim.clip_grad, float)


def test_free_mappings_take_any_key(write):
    config = load_config(write("a.yaml", "model: {args: {a: 1}}\n"), ["model.args.b=[1, 2]", "model.args.c.d=x"])
    assert config.model.args == {"a": 1, "b": [1, 2], "c": {"d": "x"}}


def test_init_and_resume_are_different_things(write):
    with pytest.raises(ValueError, match="give one of them"):
        load_config(write("a.yaml", ""), ["init=a.pt", "resume=b.pt"])
    assert load_config(write("a.yaml", ""), ["init=a.pt", "resume=auto"]).resume == "auto"


def test_the_run_folder_takes_the_name(write):
    assert load_config(write("tiny.yaml", "")).out == "runs/tiny"
    assert load_config(write("tiny.yaml", ""), ["log.name=second"]).out == "runs/second"
    assert load_config(write("tiny.yaml", ""), ["out=/x"]).out == "/x"


def test_written_and_read_again_it_is_the_same(write):
    config = load_config(write("a.yaml", ""), ["optim.lr=0.1", "model.freeze=[stem]", "model.args.x=1"])
    assert config_from_dict(yaml.safe_load(to_yaml(config))) == config
    assert config_from_dict(to_dict(config)) == config
    assert config != TrainConfig()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_committed_configuration_loads_and_names_a_model(path):
    config = load_config(path)
    assert timm.is_model(config.model.name)


RECIPES = {
    "wbmm_p": (0.3, 0.3, 0.1),
    "wbmm_n": (0.5, 0.5, 0.1),
    "wbmm_t": (0.8, 1.0, 0.2),
    "wbmm_s": (0.8, 1.0, 0.4),
    "wbmm_b": (0.8, 1.0, 0.4),
    "wbmm_a": (0.3, 0.3, 0.1),
    "wbmm_f": (0.3, 0.3, 0.1),
    "wbmm_t_dense": (0.8, 1.0, 0.2),
    "wbmm_s_dense": (0.8, 1.0, 0.4),
    "wbmm_t_hier": (0.8, 1.0, 0.2),
    "wbmm_s_hier": (0.8, 1.0, 0.4),
}


@pytest.mark.parametrize("name", RECIPES)
def test_imagenet_recipes_are_the_papers(name):
    config = load_config(CONFIGS / "imagenet" / f"{name}.yaml")
    assert config.model.name == name
    assert (config.mix.mixup, config.mix.cutmix, config.model.drop_path) == RECIPES[name]
    assert (config.global_batch, config.data.size, config.schedule.epochs, config.schedule.warmup_epochs) == (
        4096,
        224,
        300,
        5,
    )
    optim = config.optim
    assert (optim.name, optim.lr, optim.lr_batch, optim.weight_decay) == ("adamw", 4e-3, 4096, 0.05)
    assert (optim.betas, optim.clip_grad, optim.layer_decay) == ([0.9, 0.999], None, None)
    assert (config.schedule.name, config.schedule.min_lr, config.amp, config.ema.decay) == (
        "cosine",
        1e-6,
        "none",
        None,
    )
    augment = config.augment
    assert (augment.auto, augment.color_jitter) == ("rand-m9-mstd0.5-inc1", 0.4)
    assert (augment.reprob, augment.remode, config.mix.label_smoothing) == (0.25, "pixel", 0.1)
    assert (config.data.interpolation, config.data.crop_pct) == ("bicubic", 0.875)


def test_a_model_file_holds_only_what_differs():
    for path in (CONFIGS / "imagenet").glob("wbmm_*.yaml"):
        assert set(yaml.safe_load(path.read_text())) <= {"base", "model", "mix"}, path

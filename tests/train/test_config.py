from pathlib import Path

import pytest
import timm
import torch
import yaml

import wbmm  # noqa: F401  (registers the models)
from wbmm.commands.train import main
from wbmm.train.config import TrainConfig, check_config, config_from_dict, load_config, to_dict, to_yaml

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
        ("amp=fp8", r"amp is 'fp8'; valid: none, bf16, fp16"),
        ("data.on_bad_image=ignore", r"valid: fail, skip"),
        ("schedule.warmup_epochs=1000", r"schedule.warmup_epochs must be from 0 to schedule.epochs \(300\)"),
        ("ema.decay=1.5", r"ema.decay must be above 0 and below 1, got 1.5 \(or null\)"),
        ("seed", r"'seed' is not of the form key=value"),
        ("model.args={a: ", r"not valid YAML"),
    ],
)
def test_wrong_overrides_are_errors_that_name_the_key(write, override, text):
    with pytest.raises(ValueError, match=text):
        load_config(write("a.yaml", ""), [override])


REFUSED = [
    ("optim.clip_grad=-1", "optim.clip_grad must be above 0 and at most 1e+06, got -1.0 (or null)"),
    ("optim.clip_grad=0", "optim.clip_grad must be above 0"),
    ("optim.weight_decay=-1", "optim.weight_decay must be from 0 to 100, got -1.0"),
    ("optim.layer_decay=-0.5", "optim.layer_decay must be above 0 and at most 1, got -0.5 (or null)"),
    ("optim.betas=[0.9]", "optim.betas must hold 2 to 3 items, got 1: [0.9]"),
    ("optim.betas=[0.9, 1.0]", "optim.betas [0.9, 1.0]: an item must be at least 0 and below 1, got 1.0"),
    ("optim.betas=[0.9, 0.99, 0.999]", "optim.betas must be 2 numbers for optim.name=adamw"),
    ("optim.name=adamww", "optim.name 'adamww' is not one of timm's optimisers; near it: adamw"),
    ("optim.name=''", "optim.name '' is not one of timm's optimisers"),
    ("optim.name=adan", "optim.betas must be 3 numbers for optim.name=adan, got [0.9, 0.999]"),
    ("optim.name=adahessian", "optim.name 'adahessian' needs second derivatives"),
    ("optim.name=fusedadam", "optim.name 'fusedadam' needs the package apex"),
    ("schedule.warmup_lr=-3", "schedule.warmup_lr must be from 0 to 1000, got -3.0"),
    ("schedule.warmup_lr=1", "schedule.warmup_lr must be at most the learning rate, which is 0.004 (optim.lr"),
    ("schedule.min_lr=5", "schedule.min_lr must be at most the learning rate, which is 0.004 (optim.lr"),
    ("schedule.name=cosinus", "schedule.name is 'cosinus'; valid: cosine, tanh, step, multistep, poly"),
    ("schedule.name=plateau", "schedule.name is 'plateau'"),
    ("schedule.epochs=1000000000000", "schedule.epochs must be from 1 to 100000, got 1000000000000"),
    ("mix.label_smoothing=2", "mix.label_smoothing must be at least 0 and below 1, got 2.0"),
    ("mix.prob=5", "mix.prob must be from 0 to 1, got 5.0"),
    ("augment.reprob=7", "augment.reprob must be from 0 to 1"),
    ("augment.hflip=9", "augment.hflip must be from 0 to 1"),
    ("augment.remode=blur", "augment.remode is 'blur'; valid: pixel, rand, const"),
    ("augment.auto=random", "augment.auto is 'random'; valid: strings such as rand-m9-mstd0.5-inc1"),
    ("augment.auto=rand-mX", "augment.auto 'rand-mX': the part 'mX' is not one of m, n, p, mstd, mmax, inc"),
    ("augment.auto=rand-n99999", "augment.auto 'rand-n99999': n must be from 1 to 20"),
    ("augment.auto=rand-m9-foo", "augment.auto 'rand-m9-foo': the part 'foo'"),
    ("augment.auto=''", "augment.auto is ''"),
    ("model.drop_path=-1", "model.drop_path must be at least 0 and below 1, got -1.0"),
    ("model.name=wbmm_tt", "model.name 'wbmm_tt' is not a model that timm knows; near it: wbmm_t"),
    ("model.name=hf-hub:x/y", "model.name 'hf-hub:x/y' is not a model that timm knows"),
    ("model.args={foo: 1}", "model.args: wbmm_t takes no 'foo'; it takes global_pool, depths, dims, pattern"),
    ("model.args={dims: abc}", "model.args {'dims': 'abc'} do not fit wbmm_t: dims"),
    ("model.args={ls_init_value: x}", "model.args {'ls_init_value': 'x'} do not fit wbmm_t: TypeError"),
    ("model.args={ls_init_value: null}", "model.args.ls_init_value is null"),
    ("model.args={dims: [8000000, 1, 1, 1]}", "model.args.dims must be from -16384 to 16384, got 8000000"),
    ("model.args={dims: [16384, 16384, 16384, 16384]}", "model.args give wbmm_t 7.01e+10 parameters"),
    ("model.args={pattern: [D, D, (WD)x999999999, W]}", "model.args.pattern asks for more than 1000 blocks"),
    ("model.args={window_size: 4096}", "model.args.window_size must be from 1 to 64, got 4096"),
    (
        "model.args={pretrained: true}",
        "model.args.pretrained is not a property of the network; weights",
    ),
    ("model.args={pretrained_cfg_overlay: {url: 'http://x'}}", "model.args.pretrained_cfg_overlay is not"),
    ("model.args={checkpoint_path: x.pth}", "model.args.checkpoint_path has a place of its own: use init="),
    ("model.args={num_classes: 5}", "model.args.num_classes has a place of its own: use data.num_classes="),
    ("model.freeze=[nothing]", "model.freeze: no parameter is under 'nothing'; the model's parts: head, stages, stem"),
    ("model.freeze=['']", "model.freeze ['']: an item must not be empty"),
    ("data.size=1000000000", "data.size must be from 1 to 8192, got 1000000000"),
    ("data.workers=1000000", "data.workers must be from 0 to 512"),
    ("data.mean=[0.5]", "data.mean has 1 values for 3 channels"),
    ("data.mean=[123.7, 116.3, 103.5]", "data.mean [123.7, 116.3, 103.5]: an item must be from 0 to 1, got 123.7"),
    ("data.interpolation=cubic", "data.interpolation is 'cubic'; valid: bicubic, bilinear"),
    ("data.args={download: true}", "data.args.download is not an option of data.source=folder; valid: class_map"),
    ("data.args={train_limit: -1}", "data.args.train_limit must be a whole number above 0"),
    ("data.root=~nosuchuser", "data.root '~nosuchuser': no home folder of that name"),
    ("data.root=''", "data.root must not be empty"),
    ("out=/dev/null/x", "out '/dev/null/x' cannot be made: /dev/null is not a folder"),
    ("log.name=a/b", "log.name is 'a/b'; valid: the name of a folder, without / or"),
    ("log.name=..", "log.name is '..'; valid: the name of a folder"),
    ("log.wandb_project=a/b", "log.wandb_project is 'a/b'; valid: a name without"),
    ("save.every_steps=-1", "save.every_steps must be from 0 to 1000000000, got -1"),
    ("global_batch=999999999999", "global_batch must be from 1 to 1048576, got 999999999999"),
    ("seed=-1", "seed must be from 0 to 9223372036854775807, got -1"),
    ("seed=9223372036854775808", "seed must be from 0 to 9223372036854775807"),
    ("device=tpu", "device is 'tpu'; valid: auto, cpu, cuda, cuda:0"),
    ("timeout=1e300", "timeout must be from 1 to 604800"),
    ("max_skips=-1", "max_skips must be from 0 to 1000000"),
    (
        "mix={prob: 1, prob: 0}",
        "'mix={prob: 1, prob: 0}' is not valid YAML: line 1: the key 'prob' stands twice",
    ),
]


@pytest.mark.parametrize(("override", "text"), REFUSED, ids=[override for override, _ in REFUSED])
def test_nonsense_is_one_line_that_says_what_is_valid(write, override, text):
    with pytest.raises(ValueError) as error:
        load_config(write("a.yaml", ""), [override])
    assert text in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_nonsense_is_found_before_anything_is_written(write, tmp_path, capsys):
    path = write("a.yaml", f"out: {tmp_path / 'out'}\n")
    for override, text in REFUSED:
        if not override.startswith("out="):
            assert main([str(path), override]) == 1
            assert text in capsys.readouterr().err
    assert [item.name for item in tmp_path.iterdir()] == ["a.yaml"]


def test_a_configuration_changed_in_python_is_checked_too():
    config = TrainConfig()
    check_config(config)
    config.optim.clip_grad = -1.0
    with pytest.raises(ValueError, match=r"optim.clip_grad must be above 0"):
        check_config(config)


def test_a_key_that_stands_twice_is_named_with_its_line(write):
    with pytest.raises(ValueError, match=r"a.yaml is not valid YAML: line 3: the key 'seed' stands twice"):
        load_config(write("a.yaml", "seed: 1\nbatch: 2\nseed: 3\n"))
    write("base.yaml", "optim:\n  lr: 1\n  lr: 2\n")
    with pytest.raises(ValueError, match=r"base.yaml is not valid YAML: line 3: the key 'lr' stands twice"):
        load_config(write("b.yaml", "base: base.yaml\n"))
    merged = "mix: &mix {prob: 0.5, mixup: 0.1}\naugment: {auto: null}\nbase: c.yaml\n"
    write("c.yaml", "seed: 1\n")
    config = load_config(write("d.yaml", merged), ["seed=2", "seed=3"])
    assert (config.seed, config.mix.prob) == (3, 0.5), "a base and later overrides may say another value"


def test_a_date_is_text(write):
    assert load_config(write("a.yaml", ""), ["log.name=2026-11-18"]).out == "runs/2026-11-18"


def test_home_folders_are_expanded(write, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(write("a.yaml", "out: ~/runs\ndata: {root: ~/data}\n"))
    assert (config.out, config.data.root) == ("/home/me/runs", "/home/me/data")


def test_a_model_of_one_size_is_checked_against_the_data(write):
    path = write("a.yaml", "model: {name: vit_tiny_patch16_224}\n")
    assert load_config(path).data.size == 224
    with pytest.raises(ValueError, match=r"takes images of 224 pixels, data.size is 64; set model.args.img_size=64"):
        load_config(path, ["data.size=64"])
    assert load_config(path, ["data.size=64", "model.args.img_size=64"]).data.size == 64


def test_checking_a_model_draws_no_random_numbers(write):
    before = torch.get_rng_state()
    load_config(write("a.yaml", "model: {name: wbmm_a, args: {ls_init_value: 0.25}}\n"))
    assert torch.equal(before, torch.get_rng_state())


def test_the_file_is_named_in_the_error(write):
    with pytest.raises(ValueError, match=r"in .*/a.yaml"):
        load_config(write("a.yaml", "sede: 1\n"))


def test_numbers_without_a_dot_and_nothing(write):
    config = load_config(write("a.yaml", "optim: {lr: 1e-3}\n"), ["optim.clip_grad=5", "data.root=null"])
    assert (config.optim.lr, config.optim.clip_grad, config.data.root) == (1e-3, 5.0, None)
    assert isinstance(config.optim.clip_grad, float)


def test_mappings_are_merged_key_by_key(write):
    path = write("a.yaml", "model: {args: {mixer: dw5}}\n")
    config = load_config(path, ["model.args.dims=[8, 16, 32, 64]", "model.args.window_size=14"])
    assert config.model.args == {"mixer": "dw5", "dims": [8, 16, 32, 64], "window_size": 14}


def test_init_and_resume_are_different_things(write):
    with pytest.raises(ValueError, match="give one of them"):
        load_config(write("a.yaml", ""), ["init=a.pt", "resume=b.pt"])
    assert load_config(write("a.yaml", ""), ["init=a.pt", "resume=auto"]).resume == "auto"


def test_the_run_folder_takes_the_name(write):
    assert load_config(write("tiny.yaml", "")).out == "runs/tiny"
    assert load_config(write("tiny.yaml", ""), ["log.name=second"]).out == "runs/second"
    assert load_config(write("tiny.yaml", ""), ["out=/x"]).out == "/x"


def test_written_and_read_again_it_is_the_same(write):
    config = load_config(write("a.yaml", ""), ["optim.lr=0.1", "model.freeze=[stem]", "model.args.mixer=dw5"])
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

"""What `wbmm train --data DIR` chooses."""

from pathlib import Path

import pytest
import timm
import torch

from tests.data.helpers import picture, png_bytes
from tests.data.test_discover import draw, write_tar
from wbmm.data.folders import read_list
from wbmm.io.card import ModelCard
from wbmm.io.files import save_model
from wbmm.models.state import CheckpointError
from wbmm.train import recipe
from wbmm.train.build import build_data
from wbmm.train.recipe import choose_recipe

TINY = "model.args.dims=[8,8,16,16]"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipe, "published_weights", lambda name: None)


@pytest.fixture
def photos(tmp_path):
    """Class folders alone: 20 pictures of two classes each."""
    for label, name in enumerate(("ant", "bee")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(20):
            picture(100 * label + i, 16).save(tmp_path / "photos" / name / f"{i}.png")
    return tmp_path / "photos"


def choose(photos, *overrides, **options):
    return choose_recipe(photos, **{"model": "wbmm_a", "size": 32, **options}, overrides=(TINY, *overrides))


def row(choices, what) -> tuple[str, str]:
    return next(found[1:] for found in choices.rows if found[0] == what)


def test_a_split_is_made_once_and_kept_beside_the_run(photos):
    choices = choose(photos)
    file = Path(choices.config.data.args["file"])
    assert file == Path("runs/photos-wbmm_a/split.csv").absolute()
    split = read_list(file)
    assert [split.of_split("val").labels.count(name) for name in ("ant", "bee")] == [4, 4]
    assert row(choices, "validation") == ("8 pictures", "20 % of each class: split.csv in the run's folder")
    assert row(choices, "training") == ("32 pictures", "2 classes")
    before = file.read_text()
    again = choose(photos, "seed=1")
    assert file.read_text() == before
    assert row(again, "validation")[1].startswith("split by an earlier run")


def test_an_earlier_split_of_other_pictures_is_not_used(photos):
    choose(photos)
    picture(7, 16).save(photos / "ant" / "new.png")
    with pytest.raises(ValueError, match=r"1 are new, 0 are gone: ant/new\.png\): give another out=FOLDER"):
        choose(photos)
    assert row(choose(photos, "out=other"), "training")[0] == "33 pictures"


def test_nothing_is_written_for_a_wrong_key(photos, tmp_path):
    with pytest.raises(ValueError, match="unknown key 'batchsize'"):
        choose(photos, "batchsize=3", "out=new")
    assert not (tmp_path / "new").exists()


def split_folders(root):
    for split in ("train", "val"):
        draw(root / split, count=3)
    return root, ("folder", 6)


def listed(root):
    draw(root, count=3)
    lines = [
        f"{name}/{i}.png,{name},{split}" for name in ("ant", "bee") for i, split in enumerate(("train", "train", "val"))
    ]
    (root / "list.csv").write_text("\n".join(["path,label,split", *lines]))
    return root / "list.csv", ("csv", 4)


def shards(root):
    samples = {
        f"{n}.{kind}": text for n in range(4) for kind, text in (("png", png_bytes(n)), ("cls", b"%d" % (n % 2)))
    }
    for split in ("train", "val"):
        write_tar(root / f"{split}-0000.tar", samples)
    return root, ("wds", 4)


@pytest.mark.parametrize("make", [split_folders, listed, shards])
def test_data_with_a_split_keeps_it(tmp_path, make):
    (tmp_path / "data").mkdir()
    data, (source, pictures) = make(tmp_path / "data")
    choices = choose(data, "out=run")
    assert (choices.config.data.source, choices.config.global_batch) == (source, 4)
    assert row(choices, "training") == (f"{pictures} pictures", "2 classes")
    assert not (tmp_path / "run").exists()
    built = build_data(choices.config)
    assert (built.num_classes, built.train.steps_per_epoch) == (2, pictures // 4)


def test_without_weights_it_starts_from_scratch_and_says_so(photos):
    choices = choose(photos)
    config = choices.config
    assert config.init is None
    assert "No weights are published for wbmm_a, so it starts from scratch" in choices.notes[0]
    assert config.model.args["ls_init_value"] == 0.1
    assert (config.global_batch, config.batch, config.amp) == (16, 16, "none")
    assert (config.mix.mixup, config.augment.auto) == (0.0, None)
    assert choose(photos, init="scratch", epochs=250).notes == []


def test_too_few_steps_are_told_of(photos, tmp_path):
    few = "Only {} of training; a model learns little in fewer than {}: add pictures, or use --epochs {} or more."
    assert choose(photos, init="scratch", epochs=249).notes == [few.format("498 steps", 500, 250)]
    assert choose(photos, "global_batch=32", init="scratch", epochs=1).notes == [few.format("1 step", 500, 500)]
    write_weights(tmp_path / "a.safetensors")
    assert choose(photos, init="a.safetensors", epochs=15).notes == []
    assert choose(photos, init="a.safetensors", epochs=14).notes == [few.format("28 steps", 30, 15)]


def test_weights_that_cannot_be_reached_are_told_of(photos, monkeypatch):
    def refuse(name):
        raise CheckpointError(f"{name}: its weights could not be downloaded (no route). Fetch https://x")

    monkeypatch.setattr(recipe, "published_weights", refuse)
    assert choose(photos, epochs=250).notes == [
        "wbmm_a: its weights could not be downloaded (no route). Fetch https://x. Until then it starts from scratch."
    ]


def write_weights(path, **card):
    model = timm.create_model("wbmm_a", num_classes=5, dims=(8, 8, 16, 16))
    values = {"num_classes": 5, "args": {"dims": [8, 8, 16, 16]}, "input_size": (3, 48, 48), "mean": (0.4, 0.4, 0.4)}
    save_model(model, path, ModelCard("wbmm_a", **{**values, **card}))


def test_weights_bring_their_model_size_and_colours(photos, tmp_path):
    write_weights(tmp_path / "a.safetensors")
    choices = choose_recipe(photos, init="a.safetensors")
    config = choices.config
    assert (config.model.name, config.model.args, config.data.size) == ("wbmm_a", {"dims": [8, 8, 16, 16]}, 48)
    assert (config.data.mean, config.init) == ([0.4, 0.4, 0.4], "a.safetensors")
    assert (config.optim.layer_decay, config.optim.lr) == (0.8, pytest.approx(1.3e-4))
    assert row(choices, "image size") == ("48 px", "what the weights were trained at")
    assert choose(photos, init="a.safetensors").config.data.size == 32
    with pytest.raises(ValueError, match=r"a\.safetensors has the weights of wbmm_a, not of wbmm_t: leave --model out"):
        choose_recipe(photos, model="wbmm_t", init="a.safetensors")
    with pytest.raises(ValueError, match=r"--init b\.pt: there is no such file"):
        choose_recipe(photos, init="b.pt")


def test_published_weights_are_taken_where_they_can_be_reached(photos, tmp_path, monkeypatch):
    write_weights(tmp_path / "a.safetensors")
    monkeypatch.setattr(recipe, "published_weights", {"wbmm_a": tmp_path / "a.safetensors"}.get)
    choices = choose_recipe(photos, model="wbmm_a")
    assert row(choices, "starts from") == (str(tmp_path / "a.safetensors"), "published for this model")
    assert choices.config.init == str(tmp_path / "a.safetensors")


def test_without_a_gpu_the_small_model_is_pointed_at(photos):
    told = "the default; without a GPU take --model wbmm_a"
    assert row(choose(photos, "device=cpu", model=None), "model") == ("wbmm_t", told)
    assert row(choose(photos, "device=cpu"), "model") == ("wbmm_a", "")


def test_what_is_given_wins_and_is_shown(photos):
    choices = choose(photos, "global_batch=8", "optim.lr=0.01", "augment.hflip=0", "schedule.epochs=3")
    config = choices.config
    assert (config.global_batch, config.batch, config.schedule.epochs) == (8, 8, 3)
    assert row(choices, "learning rate") == ("0.01", "as given")
    assert row(choices, "epochs") == ("3", "as given")
    assert "augment.hflip=0" in row(choices, "also given")[0]
    with pytest.raises(ValueError, match=r"--epochs 2 and schedule\.epochs=3: give one of them"):
        choose(photos, "schedule.epochs=3", epochs=2)


@pytest.mark.parametrize(
    ("pictures", "world", "batch"),
    [(7, 1, 4), (40, 1, 16), (1_000, 1, 32), (9_000, 1, 128), (9_000, 3, 126), (10**6, 8, 1024)],
)
def test_the_global_batch_fits_the_set_and_the_processes(pictures, world, batch):
    assert recipe._global_batch(pictures, world) == batch


def test_the_batch_fits_the_memory(photos, monkeypatch):
    monkeypatch.setattr(recipe, "available_memory", lambda device: 9 * recipe._bytes_an_image(net, 2, 3, 32))
    net = {"name": "wbmm_a", "args": {"dims": [8, 8, 16, 16]}}
    assert choose(photos).config.batch == 4


@pytest.mark.parametrize(("given", "total", "batch"), [("batch=32", 32, 32), ("batch=8", 16, 8), ("batch=12", 24, 12)])
def test_a_given_batch_makes_the_global_one_a_multiple_of_it(photos, given, total, batch):
    config = choose(photos, given).config
    assert (config.global_batch, config.batch) == (total, batch)


def test_a_run_goes_on_from_a_named_checkpoint_in_its_own_folder(photos, tmp_path):
    write_weights(tmp_path / "a.safetensors")
    config = choose(photos, f"resume={tmp_path}/run/last.pt", init="a.safetensors").config
    assert (config.init, config.out) == (None, str(tmp_path / "run"))


def test_pictures_of_a_list_that_are_missing_are_found_before_a_folder_is_made(tmp_path):
    (tmp_path / "list.csv").write_text("path,label\n" + "".join(f"{i}.png,{'ab'[i % 2]}\n" for i in range(8)))
    with pytest.raises(ValueError, match=f"8 of the 8 pictures of the list do not exist.*relative to {tmp_path}$"):
        choose(tmp_path / "list.csv", "out=new")
    assert not Path("new").exists()


def test_every_run_gets_a_folder_of_its_own_and_a_resumed_one_keeps_it(photos):
    assert choose(photos).config.out == "runs/photos-wbmm_a"
    for name in ("photos-wbmm_a", "photos-wbmm_a-2"):
        Path("runs", name).mkdir(parents=True, exist_ok=True)
        Path("runs", name, "metrics.jsonl").touch()
    assert choose(photos).config.out == "runs/photos-wbmm_a-3"
    assert choose(photos, "resume=auto").config.out == "runs/photos-wbmm_a-2"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"model": "wbmm_z"}, "--model wbmm_z: neither ours nor timm's"),
        ({"model": "wbmm_t.other"}, r"--model wbmm_t\.other: timm knows no weights of that name"),
        ({"model": "vit_tiny_patch16_224", "overrides": ()}, "takes no images of 32 px"),
    ],
)
def test_wrong_models(photos, options, told):
    with pytest.raises(ValueError, match=told):
        choose_recipe(photos, **{"size": 32, **options})


def test_timms_models_take_part(photos):
    config = choose_recipe(photos, model="test_convnext", size=32).config
    assert "ls_init_value" not in config.model.args
    with torch.device("meta"):
        timm.create_model(config.model.name, **config.model.args)

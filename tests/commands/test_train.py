"""`wbmm train` on one's own pictures, from a folder to a model in use."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

import wbmm
from tests.fixtures.one_thread import one_thread
from wbmm import cli
from wbmm.io.reader import safe_load
from wbmm.train import recipe

__all__ = ["one_thread"]

COLOURS = {"blue": (30, 30, 220), "green": (30, 200, 30), "red": (220, 30, 30)}
TINY = ["model.args.dims=[8,8,16,16]", "data.workers=0", "log.tensorboard=false"]
FILES = {
    *("config.yaml", "split.csv", "metrics.jsonl", "best.pt", "last.pt", "summary.md", "curves.png", "train_batch.png"),
    *(
        "confusion.png",
        "classes.png",
        "classes.csv",
        "mistakes.png",
        "fused.safetensors",
        "model.onnx",
        "model_card.md",
    ),
}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    monkeypatch.setattr(recipe, "published_weights", lambda name: None)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Class folders of coloured noise, which a net can tell apart; one red picture lies among the blue ones."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (folder / name).mkdir()
        for i in range(12):
            colour = COLOURS["red"] if (name, i) == ("blue", 0) else COLOURS[name]
            pixels = (np.array(colour) + rng.normal(0, 30, (32, 32, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def train(photos, out, *more):
    options = ["--model", "wbmm_a", "--size", "32", "--epochs", "2", f"out={out}"]
    return cli.main(["train", "--data", str(photos), *options, *TINY, *more])


@pytest.fixture(scope="module")
def finished(photos, tmp_path_factory, one_thread):
    out = tmp_path_factory.mktemp("runs") / "first"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "published_weights", lambda name: None)
        assert train(photos, out, "--export", "onnx", "optim.lr=0.003", "mix.cutmix=1.0", "mix.prob=1.0") == 0
    return out


def losses(out) -> list[float]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records]


def test_a_run_leaves_everything_behind(finished):
    assert FILES - {path.name for path in finished.iterdir()} == set()
    with open(finished / "classes.csv", newline="") as file:
        assert [(row["class"], row["images"]) for row in csv.DictReader(file)] == [(name, "2") for name in COLOURS]
    card = (finished / "model_card.md").read_text()
    assert "| model | wbmm_a, " in card
    assert "of 6 validation images" in card
    assert "![what is taken for what](confusion.png)" in card
    model = wbmm.load_model(finished / "fused.safetensors")
    assert (model.card.form, model.card.class_names) == ("compact", list(COLOURS))


def test_the_saved_configuration_trains_the_same_again(finished, tmp_path):
    again = tmp_path / "again"
    assert cli.main(["train", str(finished / "config.yaml"), f"out={again}", "log.report=false"]) == 0
    assert losses(again) == losses(finished)
    first, second = (safe_load(folder / "last.pt")["model"] for folder in (finished, again))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not (again / "confusion.png").exists()


def test_the_folder_of_a_run_is_used_by_the_other_commands(finished, photos, tmp_path, capsys):
    assert cli.main(["predict", str(finished), str(photos / "red"), "--workers", "0"]) == 0
    assert cli.main(["eval", str(finished), str(finished / "model.onnx"), "--workers", "0"]) == 0
    printed = capsys.readouterr().out
    assert f"data: val of {photos}, as in {finished}/config.yaml" in printed
    assert cli.main(["reparam", str(finished), str(tmp_path / "fused.safetensors")]) == 0
    assert wbmm.load_model(finished).card.form == "training"
    assert cli.main(["predict", str(photos), str(photos / "red")]) == 1
    assert "is a folder without best.pt or last.pt" in capsys.readouterr().err


def test_a_run_starts_from_another_runs_folder(finished, photos, tmp_path, capsys):
    options = ["--init", str(finished), "--epochs", "1", f"out={tmp_path / 'second'}", "data.workers=0"]
    assert cli.main(["train", "--data", str(photos), *options, "log.report=false"]) == 0
    printed = capsys.readouterr()
    assert f"started from the weights in {finished}/best.pt" in printed.err
    assert "what the weights were trained at" in printed.out


def test_the_choices_are_one_table_and_the_end_says_how_to_go_on(photos, tmp_path, capsys):
    """Without matplotlib the pictures are left out, with a line each, and all else is there."""
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "matplotlib", None)
        assert train(photos, out) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].split() == ["what", "chosen", "why"]
    assert next(line for line in lines if line.startswith("global batch")).split()[2] == "16"
    assert "No weights are published for wbmm_a, so it starts from scratch" in printed.out
    assert f"  wbmm predict {out} PICTURES" in lines
    assert "color_jitter" not in printed.err  # the table stands for the configuration
    assert "confusion.png: the picture of a confusion matrix needs the package matplotlib" in printed.out
    assert (out / "summary.md").is_file()
    assert not list(out.glob("*.png"))
    assert (out / "model_card.md").is_file()


def test_without_arguments_both_ways_are_shown(capsys):
    assert cli.main(["train"]) == 2
    printed = capsys.readouterr().err
    assert "wbmm train --data DIR" in printed
    assert "wbmm train CONFIG" in printed


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["digits", "--epochs", "3"], "--epochs is for --data DIR; a configuration takes key=value"),
        (["--data", "DIR", "digits"], "digits: give either a configuration or --data DIR"),
        (["--data", "nowhere"], "nowhere: there is no such folder or file"),
        (["--data", "DIR", "--model", "wbmm_a", "--epochs", "0"], "schedule.epochs must be from 1 to 100000, got 0"),
        (["--data", "DIR", "--model", "wbmm_a", "--size", "0"], "data.size must be from 1 to 8192, got 0"),
        (["--data", "DIR", "--model", "wbmm_a", "device=tpu"], "device is 'tpu'; valid: auto, cpu, cuda"),
        (["--data", "DIR", "--model", "wbmm_a", "device=cuda:99"], "CUDA device"),
        (["--data", "DIR", "--model", "wbmm_a", "batch=x"], "batch in the command must be a whole number, got 'x'"),
        (["DIR"], "to train on pictures: wbmm train --data "),
        (["digits", "--export", "onnx", "log.report=false"], "--export is part of what log.report=false leaves out"),
    ],
)
def test_wrong_calls_are_one_line(argv, told, photos, capsys):
    assert cli.main(["train", *(str(photos) if word == "DIR" else word for word in argv)]) == 1
    printed = capsys.readouterr().err
    assert told in printed
    assert printed.count("\n") == 1


def test_a_folder_that_holds_a_run_is_refused_before_anything_is_printed(photos, tmp_path, capsys):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "last.pt").touch()
    assert cli.main(["train", "--data", str(photos), "--model", "wbmm_a", f"out={tmp_path / 'taken'}"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "taken already holds a run: continue it with resume=auto, or choose another out=" in printed.err


def test_a_misspelt_option_gets_the_nearest_one(photos, capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--data", str(photos), "--modle", "wbmm_a"])
    assert "unrecognized arguments: --modle" in (said := capsys.readouterr().err)
    assert said.rstrip().endswith("did you mean --model?")

"""`wbmm analyze mistakes` counts what `wbmm eval` counts, from any form of a file."""

import argparse
import json

import numpy as np
from PIL import Image

from wbmm.analysis.output import Output
from wbmm.data.images import match_classes, open_labelled
from wbmm.deploy.evaluate import collect, top
from wbmm.deploy.runtime import open_runner


def test_small_pictures(tmp_path):
    """A large one loses colours, not its size in pixels; a plot keeps its colours."""
    pixels = np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8)
    args = argparse.Namespace(out=tmp_path, small=True, force=False)
    output = Output(args, "cam")
    for name, array in (("photo", pixels), ("plot", np.zeros_like(pixels))):
        Image.fromarray(array).save(tmp_path / f"{name}.png")
        output.written.append(tmp_path / f"{name}.png")
    before = output.written[0].stat().st_size
    output.finish({"value": float("nan"), "share": 1 / 3}, "# A page", "cpu")
    assert output.written[0].stat().st_size < before / 2
    with Image.open(output.written[0]) as photo, Image.open(output.written[1]) as plot:
        assert (photo.mode, photo.size) == ("P", (400, 400))
        assert plot.mode == "RGB"
    facts = json.loads((tmp_path / "cam.json").read_text())
    assert facts["value"] is None
    assert facts["share"] == 0.33333


def test_the_command(forms, images, command, tmp_path, capsys):
    broken = tmp_path / "data" / "val"
    broken.parent.mkdir()
    for folder in (images / "val").iterdir():  # two classes with each other's pictures
        name = {"red": "blue", "blue": "red"}.get(folder.name, folder.name)
        (broken / name).mkdir(parents=True)
        for picture in folder.iterdir():
            Image.open(picture).save(broken / name / picture.name)
    options = ("--data", broken.parent, "--workers", "0", "--most", "5", "--small", "--out", tmp_path / "out")
    assert command("analyze", "mistakes", forms["compact"], *options) == 0
    facts = json.loads((tmp_path / "out" / "mistakes.json").read_text())
    runner = open_runner(forms["training"])
    expected = collect(runner, match_classes(runner.card, open_labelled(runner.card, broken.parent)))
    assert facts["top1"] == round(top(expected, 1), 3)
    matrix = np.array(facts["confusion"])
    red, blue = facts["classes"].index("red"), facts["classes"].index("blue")
    assert matrix.sum() == 32
    assert matrix[red, blue] >= 6  # the row is the true class
    assert matrix[red, red] <= 1
    sure = [mistake["sure"] for mistake in facts["surest"]]
    assert len(sure) == 5
    assert sure == sorted(sure, reverse=True)
    for mistake in facts["surest"]:
        assert {mistake["is"], mistake["taken_for"]} <= {"red", "blue", "black", "green"}
        assert mistake["is"] in mistake["image"]  # its folder
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        *("README.md", "mistakes.json", "mistakes.md", "mistakes-classes.csv"),
        *("mistakes-confusion.png", "mistakes-classes.png", "mistakes-surest.png"),
    }
    assert "- [What compact.safetensors gets wrong](mistakes.md)" in (tmp_path / "out" / "README.md").read_text()
    capsys.readouterr()
    assert command("analyze", "mistakes", forms["compact"], "--out", tmp_path / "x") == 1
    assert "labelled pictures from a folder: --data DIR" in capsys.readouterr().err

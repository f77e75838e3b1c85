"""Classes of image files: text, pictures, the CSV file, and what cannot be read."""

import csv
import os
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.fixtures.colours import COLOURS, make_image
from wbmm.deploy.predict import annotate, class_names, predict
from wbmm.deploy.runtime import open_runner
from wbmm.io.card import ModelCard
from wbmm.io.files import save_model


def read_csv(path: Path) -> list[dict]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("form", ["training", "compact", "onnx", "openvino"])
def test_predictions_are_the_model_s(trained, files, images, form):
    paths = sorted((images / "val").glob("*/*.png"))[::5]
    inputs = torch.stack([trained.card.transform()(Image.open(path)) for path in paths])
    with torch.no_grad():
        best = trained(inputs).softmax(1).topk(3, dim=1)
    found = list(predict(open_runner(files[form]), paths, topk=3, batch=2))
    assert [item.path for item in found] == paths
    names = list(COLOURS)
    for item, numbers, chances in zip(found, best.indices.tolist(), best.values.tolist(), strict=True):
        assert [(number, name) for number, name, _ in item.classes] == [(n, names[n]) for n in numbers]
        assert [chance for *_, chance in item.classes] == pytest.approx(chances, abs=1e-4)


def test_a_folder_gives_pictures_and_a_table(files, images, tmp_path, command, capsys):
    out = tmp_path / "out"
    folder = images / "val"
    assert command("predict", files["compact"], folder, "--out", out, "--topk", 2, "--workers", 0) == 0
    text = capsys.readouterr().out
    assert "32 of 32 images" in text
    assert "... and 12 more" in text
    rows = read_csv(out / "predictions.csv")
    assert [row["file"] for row in rows] == [str(path) for path in sorted(folder.glob("*/*.png"))]
    assert all(float(row["probability_1"]) >= float(row["probability_2"]) for row in rows)
    assert all(row["name_1"] == list(COLOURS)[int(row["class_1"])] for row in rows)
    pictures = {path.relative_to(out) for path in out.rglob("*.png")}
    assert pictures == {path.relative_to(folder) for path in folder.rglob("*.png")}
    with Image.open(out / "red" / "0.png") as picture:
        assert picture.width >= 320


def test_one_image_is_printed(files, tmp_path, command, capsys):
    path = tmp_path / "some.jpg"
    make_image("red", 5).save(path)
    assert command("predict", files["onnx"], path, "--topk", 9) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " %  " in line]
    assert {line.split()[-1] for line in lines} == set(COLOURS)  # there are four classes, not nine
    assert sorted(path.parent.iterdir()) == [path]  # nothing is written unless asked


def test_nothing_is_overwritten(files, images, tmp_path, command, capsys):
    arguments = ("predict", files["compact"], images / "val" / "red", "--out", tmp_path, "--workers", 0)
    assert command(*arguments) == 0
    (tmp_path / "predictions.csv").write_text("mine")
    assert command(*arguments) == 1
    assert "predictions.csv exists already" in capsys.readouterr().err
    (tmp_path / "predictions.csv").unlink()
    assert command(*arguments) == 1
    assert "0.png exists already; say --force" in capsys.readouterr().err
    assert not (tmp_path / "predictions.csv").exists()
    assert command(*arguments, "--force") == 0
    assert len(read_csv(tmp_path / "predictions.csv")) == 8


def test_the_table_alone(files, images, tmp_path, command):
    table = tmp_path / "table.csv"
    out = tmp_path / "out"
    arguments = ("predict", files["compact"], images / "val" / "red", "--workers", 0)
    assert command(*arguments, "--csv", table) == 0
    assert command(*arguments, "--out", out, "--no-pictures") == 0
    assert table.read_text() == (out / "predictions.csv").read_text()
    assert [path.name for path in out.iterdir()] == ["predictions.csv"]


def test_images_of_the_same_name_keep_their_pictures_apart(files, images, tmp_path, command):
    given = [images / "val" / colour / "0.png" for colour in ("red", "blue")]
    assert command("predict", files["compact"], *given, "--out", tmp_path / "out") == 0
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"0.png", "0-2.png"}


def test_bad_images_are_named_and_skipped(files, images, tmp_path, command, capsys):
    folder = tmp_path / "in"
    shutil.copytree(images / "val" / "red", folder)
    (folder / "3.png").write_bytes((folder / "3.png").read_bytes()[:100])
    (folder / "4.png").write_bytes(b"")
    (folder / "notes.txt").write_text("not an image")
    out = tmp_path / "out"
    assert command("predict", files["compact"], folder, "--out", out, "--workers", 0, "--batch", 3) == 1
    shown = capsys.readouterr()
    assert shown.err.count("cannot read image") == 2
    assert str(folder / "3.png") in shown.err
    assert str(folder / "4.png") in shown.err
    assert "6 of 8 images; 2 could not be read" in shown.out
    rows = read_csv(out / "predictions.csv")
    assert [bool(row["error"]) for row in rows] == [i in (3, 4) for i in range(8)]
    assert len(list(out.glob("*.png"))) == 6


@pytest.mark.timeout(60, func_only=True)  # what makes the model files takes longer
def test_what_is_no_regular_file_does_not_hang(files, images, tmp_path, command, capsys, caplog):
    folder = tmp_path / "in"
    shutil.copytree(images / "val" / "red", folder)
    os.mkfifo(folder / "pipe.png")
    (folder / "again").symlink_to(folder)
    (folder / "null.jpg").symlink_to("/dev/null")
    assert command("predict", files["compact"], folder, "--workers", 0) == 0
    assert "8 of 8 images" in capsys.readouterr().out
    assert caplog.text.count("skipped, as they are not regular files") == 1
    for name, kind in (("pipe.png", "a FIFO"), ("null.jpg", "a device")):
        assert command("predict", files["compact"], folder / "0.png", folder / name) == 1
        expected = f"{folder / name} is {kind}: give regular files, or folders of them"
        assert capsys.readouterr().err == f"wbmm predict: {expected}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no such file or folder"),
        (["EMPTY"], "no image in the folder"),
        (["IMAGES", "--topk", "0"], "--topk 0: give 1 or more"),
        (["IMAGES", "--batch", "0"], "--batch 0: give 1 or more"),
        (["IMAGES", "--out", "FILE"], "cannot make the folder"),
        (["IMAGES", "--csv", "FILE/table.csv"], "there is no folder"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(files, images, tmp_path, command, capsys, arguments, message):
    (tmp_path / "empty").mkdir()
    places = {"IMAGES": str(images / "val"), "EMPTY": str(tmp_path / "empty"), "FILE": str(tmp_path / "file")}
    (tmp_path / "file").write_text("a file, not a folder")
    for key, place in places.items():
        arguments = [argument.replace(key, place) for argument in arguments]
    assert command("predict", files["compact"], *arguments) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_names_from_a_file_are_shown_and_not_obeyed(trained, card, images, tmp_path, command, capsys):
    names = ["\x1b]0;pwned\x07", "a\nb", "\u202egnp.exe", "x" * 5000]
    save_model(trained, tmp_path / "evil.pth", card.replace(class_names=names))
    picture = next((images / "val").glob("*/*.png"))
    assert command("predict", tmp_path / "evil.pth", picture, "--topk", "4", "--out", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert r"\x1b]0;pwned\x07" in printed
    assert all(line.isprintable() and len(line) < 400 for line in printed.splitlines())
    assert "\x1b" not in (tmp_path / "out" / "predictions.csv").read_text()
    assert command("eval", tmp_path / "evil.pth", "--data", images, "--workers", "0") == 1
    error = capsys.readouterr().err
    assert "the classes differ" in error
    assert error.strip().isprintable()


def test_names_of_classes():
    card = ModelCard("wbmm_t")
    words = class_names(card)
    assert (words[0], words[281]) == ("tench", "tabby")
    from timm.data import ImageNetInfo

    assert class_names(card.replace(class_names=ImageNetInfo().label_names())) == words
    assert class_names(card.replace(num_classes=3)) == ["class 0", "class 1", "class 2"]
    assert class_names(card.replace(num_classes=2, class_names=["cat", "dog"])) == ["cat", "dog"]


@pytest.mark.parametrize("size", [(8, 8), (500, 300), (3000, 40), (1, 900)])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P"])
def test_the_text_does_not_cover_the_image(size, mode):
    image = Image.new(mode, size, 0 if mode in "LP" else (9, 9, 9, 9)[: len(mode)])
    sheet = annotate(image, [("a name of more letters than the width has room for " * 9, 0.75), ("b", 0.25)])
    assert sheet.mode == "RGB"
    assert 320 <= sheet.width <= 1280
    plain = annotate(image, [])
    box = (0, 0, plain.width, plain.height - max(14, plain.width // 32) // 2)
    assert sheet.crop(box).tobytes() == plain.crop(box).tobytes()
    assert sheet.getextrema()[0][1] > 200  # there are letters


def test_tiny_images_are_enlarged_by_whole_pixels():
    image = Image.new("L", (8, 8))
    image.putpixel((3, 3), 255)
    sheet = annotate(image, [])
    assert sheet.width == 320
    white = [x for x in range(320) if sheet.getpixel((x, 3 * 40 + 20)) == (255, 255, 255)]
    assert white == list(range(120, 160))

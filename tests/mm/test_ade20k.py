"""`tools/prepare_ade20k.py`: what is complete passes, what is missing is named."""

import zipfile

import numpy as np
import pytest
from PIL import Image

from tests.mm.shapes import write_shapes
from wbmm.mm.prepare import ADE20K_FOLDER, prepare_ade20k


@pytest.fixture
def root(tmp_path):
    write_shapes(tmp_path / ADE20K_FOLDER, train=3, val=2)
    return tmp_path


def check(root, capsys, *argv):
    code = prepare_ade20k(["--root", str(root), *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_complete(root, capsys):
    code, text = check(root, capsys, "--any-count", "--all")
    assert code == 0
    assert "3 training and 2 validation images" in text
    assert check(root / ADE20K_FOLDER, capsys, "--any-count")[0] == 0


def test_counts_of_the_real_one(root, capsys):
    code, text = check(root, capsys)
    assert code == 1
    assert "has 3 images, the data set 20210" in text


def remove_folder(root):
    (root / ADE20K_FOLDER / "annotations" / "validation").rename(root / "elsewhere")


def remove_annotation(root):
    (root / ADE20K_FOLDER / "annotations" / "training" / "ADE_0001.png").unlink()


def remove_image(root):
    (root / ADE20K_FOLDER / "images" / "training" / "ADE_0001.jpg").unlink()


def wrong_label(root):
    path = root / ADE20K_FOLDER / "annotations" / "validation" / "ADE_0000.png"
    labels = np.asarray(Image.open(path)).copy()
    labels[0, 0] = 151
    Image.fromarray(labels).save(path)


def wrong_size(root):
    Image.new("L", (5, 5)).save(root / ADE20K_FOLDER / "annotations" / "validation" / "ADE_0000.png")


def damaged(root):
    (root / ADE20K_FOLDER / "images" / "training" / "ADE_0000.jpg").write_bytes(b"x")


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (remove_folder, "no folder annotations/validation"),
        (remove_annotation, "1 of 3 files in training have no annotation"),
        (remove_image, "have no image; the first is"),
        (wrong_label, "label 151; labels go from 1 to 150"),
        (wrong_size, "shape (5, 5), but ADE_0000.jpg is 128x128"),
        (damaged, "cannot read"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_wrong_is_named(root, capsys, harm, reason):
    harm(root)
    code, text = check(root, capsys, "--any-count", "--all")
    assert code == 1
    assert reason in text


def test_the_archive(root, tmp_path, capsys):
    archive = tmp_path / "ade.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in (root / ADE20K_FOLDER).rglob("*.*"):
            file.write(path, path.relative_to(root))
    target = tmp_path / "new"
    assert check(target, capsys, "--archive", archive, "--any-count")[0] == 0
    assert [path.name for path in target.iterdir()] == [ADE20K_FOLDER]
    code, text = check(target, capsys, "--archive", archive)
    assert code == 1
    assert "is there already" in text


def test_bad_archives(tmp_path, capsys):
    (tmp_path / "a.zip").write_bytes(b"PK nothing")
    assert "not a readable zip file" in check(tmp_path, capsys, "--archive", tmp_path / "a.zip")[1]
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as file:
        file.writestr("other/readme.txt", "hello")
    assert f"holds no folder {ADE20K_FOLDER}" in check(tmp_path, capsys, "--archive", tmp_path / "b.zip")[1]
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as file:
        file.writestr(f"{ADE20K_FOLDER}/../../escaped.txt", "hello")
    assert "outside the folder; refused" in check(tmp_path / "deep", capsys, "--archive", tmp_path / "c.zip")[1]
    assert "no such file" in check(tmp_path, capsys, "--archive", tmp_path / "d.zip")[1]
    assert not (tmp_path / "escaped.txt").exists()

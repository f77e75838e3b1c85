"""Folders and lists of pictures: which files count, which class each has, the order of the classes, and kept splits."""

import os
import socket

import numpy as np
import pytest
from PIL import Image

from tests.data.helpers import collect, config, picture
from wbmm.data.classes import in_order_of
from wbmm.data.folders import PictureList, list_images, read_list, split_by_class, write_list
from wbmm.data.sources import (
    BadImage,
    open_source,
)
from wbmm.train.build import build_data


def nested(root, classes=("n02", "n01")):
    """Tiny ImageNet as it is distributed: split/class/images, but for validation one folder and a list."""
    for name in classes:
        (root / "train" / name / "images").mkdir(parents=True)
        (root / "train" / name / f"{name}_boxes.txt").write_text(f"{name}_0.png\t0\t0\t7\t7\n")
        for i in range(2):
            Image.new("RGB", (8, 8), (i, 0, 0)).save(root / "train" / name / "images" / f"{name}_{i}.png")
    (root / "val" / "images").mkdir(parents=True)
    lines = [f"val_{i}.png\t{classes[i % len(classes)]}\t0\t0\t7\t7\n" for i in range(4)]
    for i in range(4):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(root / "val" / "images" / f"val_{i}.png")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    return root


def test_the_class_is_the_first_folder_below_the_split(tmp_path):
    nested(tmp_path)
    deep = tmp_path / "train" / "n01" / "more" / "of" / "them"
    deep.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(deep / "x.jpeg")
    data = build_data(config(tmp_path))
    assert data.class_names == ["n01", "n02"]
    source = open_source(config(tmp_path).data, train=True)
    assert source.labels.tolist() == [0, 0, 0, 1, 1]
    assert all(f"/train/{('n01', 'n02')[label]}/" in source.name(i) for i, label in enumerate(source.labels))


def test_tiny_imagenet_s_validation_set(tmp_path):
    nested(tmp_path)
    source = open_source(config(tmp_path).data, train=False)
    assert [os.path.basename(source.name(i)) for i in range(4)] == [f"val_{i}.png" for i in range(4)]
    assert source.labels.tolist() == [1, 0, 1, 0]
    annotations = tmp_path / "val" / "val_annotations.txt"
    text = annotations.read_text()
    annotations.write_text(text.replace("val_2.png\t", "val_9.png\t"))
    with pytest.raises(ValueError, match=r"val_annotations\.txt .* without a line: val_2\.png"):
        open_source(config(tmp_path).data, train=False)
    annotations.write_text("val_0.png n01\n")
    with pytest.raises(ValueError, match=r"line 1: expected a picture, a tab and its class, got 'val_0\.png n01'"):
        open_source(config(tmp_path).data, train=False)
    annotations.unlink()
    with pytest.raises(ValueError, match=r"differ \(in train alone: n01, n02; in val alone: images\)"):
        build_data(config(tmp_path))


def class_folder(root, names, split="train"):
    for name in names:
        (root / split / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(root / split / name / "0.png")
    return root


MIXED = ["Zebra", "ant", "class10", "class2", "Bee"]


def test_classes_are_in_torchvision_s_order(tmp_path):
    from torchvision.datasets import ImageFolder

    source = open_source(config(class_folder(tmp_path, MIXED)).data, train=True)
    theirs = ImageFolder(tmp_path / "train")
    assert source.class_names == theirs.classes == ["Bee", "Zebra", "ant", "class10", "class2"]
    mine = {source.name(i): int(source.labels[i]) for i in range(len(source))}
    assert mine == dict(theirs.samples)


def test_a_model_in_timm_s_order_numbers_the_data_so(tmp_path, caplog):
    from timm.data import create_dataset

    reader = create_dataset("", root=str(class_folder(tmp_path, MIXED) / "train"), search_split=False).reader
    timm_names = sorted(reader.class_to_idx, key=reader.class_to_idx.get)
    assert timm_names == ["ant", "Bee", "class2", "class10", "Zebra"]
    source = in_order_of(open_source(config(tmp_path).data, train=True), timm_names, "the model")
    assert source.class_names == timm_names
    assert {source.name(i): int(source.labels[i]) for i in range(5)} == dict(reader.samples)
    assert "the model has its classes in timm's order" in caplog.text
    with pytest.raises(ValueError, match="in another order: number 0 is 'Bee' in the data and 'Zebra' in the model"):
        in_order_of(open_source(config(tmp_path).data, train=True), timm_names[::-1], "the model")


def test_a_class_map_sets_the_order(tmp_path, caplog):
    class_folder(tmp_path, ["ant", "bee", "cat"])
    (tmp_path / "map.txt").write_text("cat\nant\ndog\n")
    for class_map in ("map.txt", str(tmp_path / "map.txt"), ["cat", "ant", "dog"]):
        source = open_source(config(tmp_path, data={"args": {"class_map": class_map}}).data, train=True)
        assert source.class_names == ["cat", "ant", "dog"]
        assert [os.path.basename(os.path.dirname(source.name(i))) for i in range(2)] == ["ant", "cat"]
        assert source.labels.tolist() == [1, 0]
    assert "left out of" in caplog.text
    assert "does not name them: bee" in caplog.text
    with pytest.raises(ValueError, match=r"nowhere\.txt is not a file"):
        open_source(config(tmp_path, data={"args": {"class_map": "nowhere.txt"}}).data, train=True)
    with pytest.raises(ValueError, match=r"data\.args\.map is not an option .*; valid: class_map"):
        open_source(config(tmp_path, data={"args": {"map": "map.txt"}}).data, train=True)


def test_images_outside_the_class_folders_are_told(folder, caplog):
    picture(0).save(folder / "train" / "loose.png")
    assert len(open_source(config(folder).data, train=True)) == 24
    assert f"1 images in {folder / 'train'} itself" in caplog.text


@pytest.mark.timeout(30)
def test_what_is_no_regular_file_is_left_out(folder, caplog):
    os.mkfifo(folder / "train" / "ant" / "pipe.png")
    (folder / "train" / "bee" / "zero.jpg").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "train" / "cat" / "s.png"))
        data = build_data(config(folder))
    assert len(collect(data.train)) == 6
    assert caplog.text.count("not regular files") == 1
    assert "pipe.png" in caplog.text
    (folder / "only.tar").mkdir()
    os.mkfifo(folder / "train.tar")
    os.mkfifo(folder / "train" / "x.tar")
    with pytest.raises(ValueError, match="no tar file in"):
        build_data(config(folder, data={"source": "tar"}))


@pytest.mark.timeout(30)
def test_loops_of_links_end(folder, monkeypatch):
    ant = folder / "train" / "ant"
    (ant / "self").symlink_to(ant)
    (ant / "up").symlink_to(folder)
    (ant / "around").mkdir()
    (ant / "around" / "back").symlink_to("..")
    for i in range(20):  # 2 ** 20 paths to the last one
        (ant / f"d{i}").mkdir()
        for side in "ab":
            (ant / f"d{i}" / side).symlink_to(ant / f"d{i + 1}")
    source = open_source(config(folder).data, train=True)
    assert np.bincount(source.labels).tolist() == [8, 8, 8]
    (folder / "train" / "whole").symlink_to(folder)
    with pytest.raises(ValueError, match=r"1 class folder in .* without an image: whole"):
        open_source(config(folder).data, train=True)
    monkeypatch.chdir(ant)
    assert len(list_images("..")) == 24


def test_a_link_that_leads_nowhere_is_named_when_it_is_read(folder):
    ant = folder / "train" / "ant"
    (ant / "gone.png").symlink_to(ant / "nowhere.png")
    (ant / "loop.png").symlink_to("loop.png")
    source = open_source(config(folder).data, train=True)
    assert len(source) == 26
    for name in ("gone", "loop"):
        index = next(i for i in range(26) if source.name(i).endswith(f"{name}.png"))
        with pytest.raises(BadImage, match=rf"ant/{name}\.png"):
            source.image(index)


def test_a_folder_that_may_not_be_read_is_named(folder, monkeypatch):
    scandir = os.scandir

    def refuse(place):
        if str(place).endswith("bee"):
            raise PermissionError(13, "Permission denied", place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match=r"cannot read the folder .*bee: Permission denied"):
        open_source(config(folder).data, train=True)


def test_numbers_in_names_may_be_of_any_script(tmp_path):
    class_folder(tmp_path, ["a", "b"])
    for name in ("5\u00b25.png", "\u0664.png", "10.png", "9.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / "train" / "a" / name)
    names = [os.path.basename(open_source(config(tmp_path).data, train=True).name(i)) for i in range(5)]
    assert names == ["0.png", "\u0664.png", "5\u00b25.png", "9.png", "10.png"]


CLASSES = {"ant": 10, "bee": 5, "cat": 2}


@pytest.fixture
def pictures(tmp_path):
    paths, labels = [], []
    for label, count in CLASSES.items():
        (tmp_path / label).mkdir()
        for number in range(count):
            picture(number).save(tmp_path / label / f"{number}.png")
            paths.append(f"{label}/{number}.png")
            labels.append(label)
    return PictureList(paths, labels)


def test_a_split_is_stratified_and_a_matter_of_seed_and_path(pictures):
    split = split_by_class(pictures, 0.2, seed=0)
    counts = {name: split.of_split("val").labels.count(name) for name in CLASSES}
    assert counts == {"ant": 2, "bee": 1, "cat": 1}
    other = split_by_class(PictureList(pictures.paths[::-1], pictures.labels[::-1]), 0.2, seed=0)
    assert set(other.of_split("val").paths) == set(split.of_split("val").paths)
    assert split_by_class(pictures, 0.2, seed=1).splits != split.splits


def test_a_class_of_one_picture_is_an_error():
    with pytest.raises(ValueError, match="dog has one alone; a class needs 2"):
        split_by_class(PictureList(["a.png", "b.png", "c.png"], ["cat", "cat", "dog"]), 0.2, seed=0)


def test_a_written_split_is_a_source(pictures, tmp_path):
    split = split_by_class(pictures, 0.2, seed=0)
    write_list(split, tmp_path / "run" / "split.csv")
    assert read_list(tmp_path / "run" / "split.csv") == split
    data = config(tmp_path, data={"source": "csv", "args": {"file": str(tmp_path / "run" / "split.csv")}}).data
    train, val = open_source(data, train=True), open_source(data, train=False)
    assert (len(train), len(val)) == (13, 4)
    assert train.class_names == val.class_names == ["ant", "bee", "cat"]
    assert val.name(0).endswith(split.of_split("val").paths[0])
    assert val.image(0).size == (48, 40)


@pytest.mark.parametrize("first", ["path,label\n", "Image,extra,Class\n", ""])
def test_columns_by_name_or_by_place(tmp_path, first):
    line = "a.png,x,ant\n" if "extra" in first else "a.png,ant\n"
    (tmp_path / "list.csv").write_text(first + line)
    found = read_list(tmp_path / "list.csv")
    assert (found.paths, found.labels, found.splits) == (["a.png"], ["ant"], None)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "is empty"),
        ("one,two\n", "expected the names of its columns"),
        ("path,label\n", "no picture"),
        ("path,label\na.png,\n", "line 2: expected a path and a label"),
    ],
)
def test_what_is_no_list_is_said(tmp_path, text, wrong):
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(ValueError, match=wrong):
        read_list(tmp_path / "list.csv")


def test_pictures_that_are_not_there_are_named(tmp_path):
    (tmp_path / "list.csv").write_text("path,label,split\nno.png,ant,train\n")
    data = config(tmp_path, data={"source": "csv", "args": {"file": "list.csv"}}).data
    with pytest.raises(ValueError, match=r"1 of the 1 pictures of the list do not exist, e\.g\. .*no\.png"):
        open_source(data, train=True)
    with pytest.raises(ValueError, match="no split 'val'"):
        open_source(data, train=False)


def test_numbers_are_in_order_of_their_value():
    assert PictureList(["a", "b", "c"], ["10", "2", "1"]).class_names == ["1", "2", "10"]

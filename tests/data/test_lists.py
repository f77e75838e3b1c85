"""Lists of pictures, and the split that is kept as one."""

import pytest

from tests.data.helpers import config, picture
from wbmm.data.lists import PictureList, read_list, split_by_class, write_list
from wbmm.data.sources import open_source

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

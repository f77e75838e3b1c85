"""Errors about the data come before the first step and are one clear sentence."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from wbmm.data.classes import check_sets, is_right
from wbmm.data.sources import ArraySource
from wbmm.train.build import build_data
from wbmm.train.config import config_from_dict


@pytest.fixture
def folder(tmp_path):
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(2):
                Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / split / name / f"{i}.png")
    return tmp_path


def build(root=None, **changes):
    data = {"root": str(root) if root else None, "size": 32, "workers": 0, **changes.pop("data", {})}
    return build_data(config_from_dict({"data": data, "batch": 2, "global_batch": 2, **changes}))


def test_a_good_folder_passes(folder):
    assert build(folder).num_classes == 2


def test_missing_root(tmp_path):
    with pytest.raises(ValueError, match=r"data\.root=/path/to/data"):
        build(None)
    with pytest.raises(ValueError, match=r"nowhere' is not a folder"):
        build(tmp_path / "nowhere")


def test_missing_split_names_what_is_there(folder):
    with pytest.raises(ValueError, match=r"no folder 'test' in .*; it has: train, val"):
        build(folder, data={"val_split": "test"})


def test_usual_other_name_of_a_split(folder):
    (folder / "val").rename(folder / "validation")
    assert build(folder).val.size == 4


def test_class_folder_without_an_image(folder):
    (folder / "train" / "cat").mkdir()
    (folder / "train" / "cat" / "notes.txt").write_text("no image")
    with pytest.raises(ValueError, match=r"1 class folder in .*train without an image: cat"):
        build(folder)


def test_split_without_class_folders(folder):
    (folder / "flat").mkdir()
    with pytest.raises(ValueError, match="has no class folders"):
        build(folder, data={"train_split": "flat"})


def test_classes_that_differ(folder):
    (folder / "val" / "bee").rename(folder / "val" / "wasp")
    with pytest.raises(ValueError, match=r"differ \(in train alone: bee; in val alone: wasp\)"):
        build(folder)


def source(labels, names=None):
    return ArraySource(np.zeros((len(labels), 4, 4), np.uint8), labels, "array", names)


@pytest.mark.parametrize(
    ("train", "val", "classes", "message"),
    [
        ([0, 1], [0, 2], None, r"validation set has label 2 \(array\[1\]\).* end at 1"),
        ([0, -1], [0, 1], None, r"label below 0: -1 for array\[1\]"),
        ([0, 5], [0, 1], 3, "num_classes is 3, but the training set has labels up to 5, so 6 classes: set data.num_cl"),
        ([0, 5], [0, 1], 9, "num_classes=6, or null to count them; if there are more, name them all in classes.txt"),
        ([3, 3], [3], None, r"only one class, label 3, for all of its 2 images \(the first is array\[0\]\)"),
        ([], [0], None, "training set has no images"),
    ],
)
def test_label_range(train, val, classes, message):
    cfg = config_from_dict({"data": {"num_classes": classes}}).data
    with pytest.raises(ValueError, match=message):
        check_sets(cfg, source(train), source(val))


def test_number_of_classes_is_counted_or_given():
    cfg = config_from_dict({}).data
    assert check_sets(cfg, source([0, 4]), source([1])) == 5
    cfg.num_classes = 5
    assert check_sets(cfg, source([0, 4]), source([1])) == 5
    cfg.num_classes = 10
    ten = list("abcdefghij")
    assert check_sets(cfg, source([0, 4], ten), source([9], ten)) == 10  # the names say that there are more


def test_classes_without_an_image_are_told(caplog):
    assert check_sets(config_from_dict({}).data, source([0, 2, 3]), source([1])) == 4
    assert "no image of 1 of its 4 classes: 1" in caplog.text
    caplog.clear()
    check_sets(config_from_dict({}).data, source([0, 2], list("abc")), source([1], list("abc")))
    assert "no image of 1 of its 3 classes: b" in caplog.text


def test_labels_beyond_the_names(folder):
    with pytest.raises(ValueError, match=r"names 2 classes, but array\[1\] has the label 2"):
        check_sets(config_from_dict({}).data, source([0, 2], ["a", "b"]), source([0], ["a", "b"]))


@pytest.mark.parametrize("count", [3, 1000])
def test_a_number_of_classes_that_is_not_the_data_s(folder, count):
    with pytest.raises(
        ValueError, match=rf"is {count}, but .* 2 classes \(ant, bee\): set data.num_classes=2, or null"
    ):
        build(folder, data={"num_classes": count})


def test_one_class_is_nothing_to_train_on(folder):
    for split in ("train", "val"):
        shutil.rmtree(folder / split / "bee")
    with pytest.raises(ValueError, match=r"only one class, 'ant', for all of its 2 images \(the first is .*ant/0\.png"):
        build(folder)


def test_the_same_names_in_another_order_are_named_by_number():
    names = ["ant", "bee", "cat"]
    with pytest.raises(ValueError, match="in another order: number 1 is 'bee' in train and 'cat' in val"):
        check_sets(config_from_dict({}).data, source([0, 1, 2], names), source([0], ["ant", "cat", "bee"]))
    with pytest.raises(ValueError, match=r"number 2 is 'cat' in train and missing in val: .* \(in train alone: cat\)"):
        check_sets(config_from_dict({}).data, source([0, 1, 2], names), source([0], names[:2]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"in_chans": 1}}, "data.mean has 3 values for 1 channels"),
        ({"data": {"in_chans": 4}}, "in_chans is 4"),
        ({"data": {"std": [1.0, 0.0, 1.0]}}, r"data.std .* must be from 0.001 to 1, got 0.0"),
        ({"data": {"crop_pct": 1.5}}, "crop_pct must be"),
        ({"data": {"in_memory": True}}, "set augment.auto=null"),
        ({"augment": {"shift": 2}}, "shift 2 is for data.in_memory=true"),
        ({"augment": {"scale": [1.0, 0.5]}}, "augment.scale must be"),
        ({"batch": 3, "global_batch": 3}, "batch must be even, got 3"),
        ({"data": {"source": "zip"}}, "data.source is 'zip'; valid: folder"),
        ({"data": {"source": "digits", "args": {"fold": 1}}}, "args.fold is not an option of data.source=digits"),
    ],
)
def test_settings_that_contradict_each_other(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        build(folder, **changes)


def test_a_prediction_is_right_if_the_label_is_among_the_highest():
    logits = torch.tensor([[0.1, 0.9, 0.5], [0.2, 0.1, 0.0], [0.0, 1.0, 2.0]])
    labels = torch.tensor([2, 0, 0])
    assert is_right(logits, labels).tolist() == [False, True, False]
    assert is_right(logits, labels, k=2).tolist() == [True, True, False]
    assert is_right(logits, labels, k=5).tolist() == [True, True, True], "more than there are classes"

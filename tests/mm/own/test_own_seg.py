"""A folder of images and masks: what is found, what is written for it, and that it trains."""

import argparse
import json

import numpy as np
import pytest
from PIL import Image

from tests.mm.shapes import write_shapes
from wbmm import cli
from wbmm.mm.own.masks import ClassList, find_masks, read_classes, survey_masks
from wbmm.mm.own.seg import add_arguments, choose_segmentor, number_mask_labels, prepare_seg

SIZE = (40, 24)


def write(folder, names, mask_folder, mask_ending="", values=(0, 1, 2), mode="L", image_ending=".jpg"):
    """Images, and masks that hold all the values."""
    folder.mkdir(parents=True, exist_ok=True), mask_folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for name in names:
        Image.fromarray(rng.integers(0, 256, (SIZE[1], SIZE[0], 3), dtype=np.uint8)).save(
            folder / f"{name}{image_ending}"
        )
        flat = np.resize(np.array(values, dtype=np.uint8), (SIZE[0] * SIZE[1], *np.shape(values)[1:]))
        mask = Image.fromarray(flat.reshape(SIZE[1], SIZE[0], *flat.shape[1:]))
        if mode == "P":
            mask.putpalette(bytes(range(256)) * 3)
        mask.save(mask_folder / f"{name}{mask_ending}.png")


def choose(tmp_path, *argv):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return choose_segmentor(parser.parse_args(["--model", "wbmm_a", *map(str, argv)]), tmp_path / "work")


@pytest.mark.parametrize(
    ("layout", "ending"),
    [
        (("images/{}", "annotations/{}"), ""),
        (("img_dir/{}", "ann_dir/{}"), "_mask"),
        (("{}/images", "{}/masks"), "_L"),
        (("{}", "{}annot"), ""),
        (("{}", "{}_labels"), "_L"),
    ],
)
def test_layouts_with_parts(tmp_path, layout, ending):
    for part in ("train", "val"):
        write(tmp_path / layout[0].format(part), ["a", "ab", part], tmp_path / layout[1].format(part), ending)
    found = find_masks(tmp_path)
    assert found.lists is None
    for part in ("train", "val"):
        pair = getattr(found, part)
        assert pair.images == tmp_path / layout[0].format(part)
        assert pair.masks == tmp_path / layout[1].format(part)
        assert (pair.img_suffix, pair.mask_suffix) == (".jpg", f"{ending}.png")
        assert pair.names == sorted(["a", "ab", part])


def test_no_parts_are_split_once_and_the_same_way(tmp_path):
    write(tmp_path / "images", [f"p{i}" for i in range(20)], tmp_path / "masks")
    first, second = find_masks(tmp_path), find_masks(tmp_path)
    assert first.lists == second.lists
    assert (len(first.lists["train"]), len(first.lists["val"])) == (16, 4)
    assert "4 of 20 are held back" in first.how


def test_lists_of_voc_and_masks_beside_photographs(tmp_path):
    voc = tmp_path / "voc"
    write(voc / "JPEGImages", ["a", "b", "c"], voc / "SegmentationClass", mode="P")
    write(voc / "JPEGImages", ["a"], voc / "SegmentationObject")
    (voc / "ImageSets" / "Segmentation").mkdir(parents=True)
    for part, names in (("train", "a\nc\n"), ("val", "b\n")):
        (voc / "ImageSets" / "Segmentation" / f"{part}.txt").write_text(names)
    found = find_masks(voc)
    assert found.train.masks.name == "SegmentationClass"
    assert found.lists == {"train": ["a", "c"], "val": ["b"]}
    together = tmp_path / "together"
    write(together, ["a", "b", "c"], together)
    pair = find_masks(together).train
    assert (pair.img_suffix, pair.mask_suffix, pair.names) == (".jpg", ".png", ["a", "b", "c"])


def test_what_is_wrong_with_a_folder_is_said(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        find_masks(tmp_path / "none")
    with pytest.raises(ValueError, match="no folder of images with a folder of masks"):
        find_masks(tmp_path)
    for part in ("train", "val"):
        write(tmp_path / "images" / part, ["a", "b"], tmp_path / "masks" / part)
    (tmp_path / "masks" / "train" / "b.png").unlink()
    with pytest.raises(ValueError, match=r"1 images in .* have no mask .* the first is b.jpg"):
        choose(tmp_path, "--data", tmp_path)


@pytest.mark.parametrize(
    ("text", "name", "names", "labels", "ignore"),
    [
        ("sky\nroad\n", "c.txt", ["sky", "road"], None, None),
        ("128 0 0\tsky\n0 128 0 \t road way\n", "c.txt", ["sky", "road way"], [(128, 0, 0), (0, 128, 0)], None),
        ("name,r,g,b\nsky,1,2,3\n", "c.csv", ["sky"], [(1, 2, 3)], None),
        ('["sky", "road"]', "c.json", ["sky", "road"], None, None),
        ('{"classes": ["sky"], "ignore": 11}', "c.json", ["sky"], None, 11),
        ('{"road": 1, "sky": 0}', "c.json", ["sky", "road"], [0, 1], None),
        ('{"1": "road", "0": "sky"}', "c.json", ["sky", "road"], [0, 1], None),
        ('{"sky": [1, 2, 3]}', "c.json", ["sky"], [(1, 2, 3)], None),
    ],
)
def test_lists_of_classes(tmp_path, text, name, names, labels, ignore):
    (tmp_path / name).write_text(text)
    assert read_classes(tmp_path / name) == ClassList(names, labels, ignore)


def test_bad_lists_of_classes(tmp_path):
    for text, reason in (("a\na\n", "'a' is there twice"), ("\n", "no list of classes")):
        (tmp_path / "c.txt").write_text(text)
        with pytest.raises(ValueError, match=reason):
            read_classes(tmp_path / "c.txt")
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read as a list of classes"):
        read_classes(tmp_path / "c.json")


def test_which_label_is_ignored(tmp_path):
    names = ClassList(["a", "b", "c"])

    def number(values, classes=names, ignore=None, from_1=False):
        folder = tmp_path / "-".join(map(str, values))
        write(folder / "images", ["x"], folder / "masks", values=values)
        return number_mask_labels(survey_masks([folder / "masks" / "x.png"]), classes, ignore, from_1, tmp_path)[:2]

    assert number((0, 1, 2, 255)) == (["a", "b", "c"], 255)
    assert number((0, 1, 2, 3)) == (["a", "b", "c"], 3)
    assert number((0, 1, 2, 3), from_1=True) == (["a", "b", "c"], 255)
    assert number((0, 1, 2, 77), ClassList(["a", "b", "c"], None, 77)) == (["a", "b", "c"], 77)
    assert number((0, 1, 2), None) == (["class 0", "class 1", "class 2"], 255)
    with pytest.raises(ValueError, match="--labels-from-1 ignores the label 0; 77 cannot be ignored too"):
        number((0, 1, 2, 3, 77), ClassList(["a", "b", "c"], None, 77), from_1=True)
    for values, classes, reason in (
        ((0, 255), names, "0 and 255 alone"),
        ((0, 1, 7, 9), names, "label 9, but there are 3 names"),
        ((0, 100, 200), None, "do not count from 0 on"),
        ((0, 1), ClassList(["a", "b"], [10, 20]), "other labels than 0, 1, 2"),
    ):
        with pytest.raises(ValueError, match=f"(?s){reason}.*prepare_seg"):
            number(values, classes)


def test_masks_of_colours_become_labels(tmp_path, capsys):
    colours = ((128, 0, 0), (0, 128, 0), (7, 7, 7))
    for part in ("train", "val"):
        write(tmp_path / "d" / part, ["a", "b"], tmp_path / "d" / f"{part}_labels", "_L", colours)
    with pytest.raises(ValueError, match="the masks hold colours: python tools/prepare_seg"):
        choose(tmp_path, "--data", tmp_path / "d")
    (tmp_path / "c.txt").write_text("0 128 0 tree\n128 0 0 house\n7 7 7 Void\n")
    argv = ["--data", str(tmp_path / "d"), "--classes", str(tmp_path / "c.txt")]
    assert prepare_seg(argv) == 0
    assert "Nothing was written" in capsys.readouterr().out
    assert prepare_seg([*argv, "--out", str(tmp_path / "out")]) == 0
    mask = np.asarray(Image.open(tmp_path / "out" / "masks" / "train" / "a.png"))
    np.testing.assert_array_equal(mask.ravel()[:3], [1, 0, 255])
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == {"classes": ["tree", "house"], "ignore": 255}
    chosen = choose(tmp_path, "--data", tmp_path / "out").variables
    assert (chosen["classes"], chosen["ignore_index"], chosen["mask_suffix"]) == (("tree", "house"), 255, ".png")

    (tmp_path / "c.txt").write_text("0 128 0 tree\n128 0 0 house\n")
    assert prepare_seg([*argv, "--out", str(tmp_path / "out2")]) == 1
    assert "holds (7, 7, 7), which is no class" in capsys.readouterr().err
    assert prepare_seg([*argv, "--out", str(tmp_path / "out2"), "--rest", "nearest"]) == 0
    mask = np.asarray(Image.open(tmp_path / "out2" / "masks" / "val" / "b.png"))
    assert mask.ravel()[2] == 0, "black is nearer to dark green than to dark red, by its first place"
    assert prepare_seg([*argv, "--out", str(tmp_path / "out2")]) == 1
    assert "is not empty" in capsys.readouterr().err


def test_masks_that_were_blurred(tmp_path, capsys):
    """JPEG: other labels near edges. Training refuses them, and the tool takes the nearest label of a list."""
    write(tmp_path / "d" / "images", ["a", "b"], tmp_path / "d" / "masks", values=(0, 3, 252, 255))
    for file in (tmp_path / "d" / "masks").iterdir():
        Image.open(file).save(file.with_suffix(".jpg"), quality=100, subsampling=0), file.unlink()
        pixels = np.asarray(Image.open(file.with_suffix(".jpg")))
    assert len(np.unique(pixels)) > 2
    with pytest.raises(ValueError, match="masks holds masks as JPEG, which changes labels near edges"):
        choose(tmp_path, "--data", tmp_path / "d")
    (tmp_path / "c.json").write_text('{"nothing": 0, "thing": 255}')
    argv = ["--data", str(tmp_path / "d"), "--classes", str(tmp_path / "c.json"), "--rest", "nearest"]
    assert prepare_seg([*argv, "--out", str(tmp_path / "out")]) == 0
    mask = next((tmp_path / "out" / "masks").rglob("*.png"))
    np.testing.assert_array_equal(np.unique(np.asarray(Image.open(mask))), [0, 1])


def test_what_is_nearest_to_ignored_is_ignored(tmp_path):
    """Otherwise blurred black edges would become the darkest class."""
    write(tmp_path / "d" / "images", ["a", "b"], tmp_path / "d" / "masks", values=(0, 3, 120, 252, 255))
    (tmp_path / "c.json").write_text('{"void": 0, "thing": 120, "other": 255}')
    argv = ["--data", str(tmp_path / "d"), "--classes", str(tmp_path / "c.json"), "--rest", "nearest"]
    assert prepare_seg([*argv, "--out", str(tmp_path / "out")]) == 0
    mask = np.asarray(Image.open(next((tmp_path / "out" / "masks").rglob("*.png"))))
    assert mask.ravel()[:5].tolist() == [255, 255, 0, 1, 1]


def test_a_dry_run_looks_at_the_pictures(tmp_path):
    write(tmp_path / "d" / "images", ["a", "b"], tmp_path / "d" / "masks")
    choose(tmp_path, "--data", tmp_path / "d", "--dry-run")
    Image.new("L", (8, 8)).save(tmp_path / "d" / "masks" / "a.png")
    with pytest.raises(ValueError, match=r"images.a\.jpg is 40x24, its mask .*a\.png 8x8"):
        choose(tmp_path, "--data", tmp_path / "d", "--dry-run")
    (tmp_path / "d" / "images" / "b.jpg").write_bytes((tmp_path / "d" / "images" / "b.jpg").read_bytes()[:-300])
    (tmp_path / "d" / "masks" / "a.png").write_bytes((tmp_path / "d" / "masks" / "b.png").read_bytes())
    with pytest.raises(ValueError, match=r"b\.jpg is no readable image"):
        choose(tmp_path, "--data", tmp_path / "d", "--dry-run")


def test_what_is_nothing_and_the_test_part(tmp_path, capsys):
    """Without a list, 255 beside several labels does not count. A third part is converted too."""
    for part in ("train", "val", "test"):
        write(tmp_path / "d" / "images" / part, ["a"], tmp_path / "d" / "masks" / part, values=(4, 7, 255))
    assert prepare_seg(["--data", str(tmp_path / "d"), "--out", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "classes.json").read_text())["classes"] == ["class 0", "class 1"]
    for part in ("train", "val", "test"):
        mask = Image.open(tmp_path / "out" / "masks" / part / "a.png")
        assert np.unique(np.asarray(mask)).tolist() == [0, 1, 255]
        assert (tmp_path / "out" / "images" / part / "a.jpg").is_file()


def test_images_or_masks_alone(tmp_path):
    """In folders by part they are errors; where a part is held back, what is left out is shown."""
    for part in ("train", "val"):
        write(tmp_path / "d" / "images" / part, ["a", "b"], tmp_path / "d" / "masks" / part)
    (tmp_path / "d" / "images" / "val" / "b.jpg").unlink()
    with pytest.raises(ValueError, match=r"1 masks in .*val have no image ending with '.jpg' .*the first is b.png"):
        choose(tmp_path, "--data", tmp_path / "d")
    write(tmp_path / "one" / "images", ["a", "b", "c"], tmp_path / "one" / "masks")
    (tmp_path / "one" / "masks" / "c.png").unlink()
    rows = choose(tmp_path, "--data", tmp_path / "one").rows
    assert ("left out", "1 images without a mask, 0 masks without an image", "the first is c.jpg") in rows


def test_a_configuration_changed_by_hand_is_kept(tmp_path, capsys):
    write(tmp_path / "d" / "images", ["a", "b"], tmp_path / "d" / "masks")
    argv = [
        "train-seg",
        "--data",
        str(tmp_path / "d"),
        "--model",
        "wbmm_a",
        "--work-dir",
        str(tmp_path / "w"),
        "--dry-run",
    ]
    assert cli.main(argv) == 0
    assert cli.main([*argv, "--size", "64"]) == 0, "not touched since it was written"
    file = tmp_path / "w" / "config.py"
    changed = file.read_text().replace("(64, 64)", "(32, 32)")
    file.write_text(changed)
    assert cli.main(argv) == 1
    assert "was changed by hand: --resume trains with it" in capsys.readouterr().err
    assert cli.main([*argv, "--resume"]) == 0
    assert file.read_text() == changed
    assert cli.main([*argv, "--size", "8"]) == 1
    assert "--size 8: give a number from 32" in capsys.readouterr().err


def test_binary_masks_by_number(tmp_path):
    write(tmp_path / "d" / "images", ["a", "b"], tmp_path / "d" / "masks", values=(0, 255))
    assert prepare_seg(["--data", str(tmp_path / "d"), "--out", str(tmp_path / "out")]) == 0
    found = sorted((tmp_path / "out" / "masks").rglob("*.png"))
    assert np.unique(np.asarray(Image.open(found[0]))).tolist() == [0, 1]


def test_one_line_trains_tests_and_resumes(tmp_path, capsys):
    pytest.importorskip("mmseg")
    data = write_shapes(tmp_path / "data", train=3, val=2)
    for name in ("images", "annotations"):  # ADE20K's folders are `training` and `validation`
        assert (data / name / "training").is_dir()
    (tmp_path / "classes.txt").write_text("".join(f"class {i}\n" for i in range(150)))
    argv = ["train-seg", "--data", data, "--classes", tmp_path / "classes.txt", "--labels-from-1", "--model", "wbmm_f"]
    argv += ["--size", "48", "--small-heads", "--batch", "2", "--work-dir", tmp_path / "run"]
    narrow = ["--cfg-options", "model.backbone.dims=[8,16,32,64]", "workers=0", "head_channels=16"]
    assert cli.main([*map(str, argv), "--iters", "2", *narrow]) == 0
    out = capsys.readouterr().out
    assert "3 to train, 2 to validate" in out
    assert "150: class 0" in out
    assert f"wbmm segment {tmp_path}/run/best_mIoU_iter_2.pth PICTURES --config {tmp_path}/run/config.py" in out
    text = (tmp_path / "run" / "config.py").read_text()
    assert text.startswith("# Written by `wbmm train-seg")
    assert "$crop" not in (tmp_path / "run" / "config_whole.py").read_text()
    assert "crop = (32, 32)" in text
    assert cli.main([*map(str, argv), "--iters", "2", *narrow]) == 1
    assert "already holds" in capsys.readouterr().err
    assert cli.main([*map(str, argv), "--resume", *narrow, "max_iters=3"]) == 0
    assert (tmp_path / "run" / "iter_3.pth").is_file()

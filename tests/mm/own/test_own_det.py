"""A folder with annotations in COCO's format: what is found, what is written for it, and that it trains."""

import argparse
import json
import shutil

import pytest
from PIL import Image

from wbmm import cli
from wbmm.mm.own.det import add_arguments, choose_detector, find_objects


def write(path, folder, names, categories=("cat", "dog"), mask=True):
    """Images of 64x48 with one object each, and their annotation file."""
    folder.mkdir(parents=True, exist_ok=True), path.parent.mkdir(parents=True, exist_ok=True)
    images, objects = [], []
    for i, name in enumerate(names, 1):
        Image.new("RGB", (64, 48), (9 * i, 90, 200)).save(folder / name)
        images.append({"id": i, "file_name": name, "width": 64, "height": 48})
        entry = {"id": i, "image_id": i, "category_id": i % len(categories) + 1, "bbox": [8, 8, 24, 24], "iscrowd": 0}
        polygon = {"segmentation": [[8, 8, 32, 8, 32, 32, 8, 32]], "area": 576} if mask else {"area": 576}
        objects.append(entry | polygon)
    kinds = [{"id": i, "name": name} for i, name in enumerate(categories, 1)]
    path.write_text(json.dumps({"images": images, "annotations": objects, "categories": kinds}))


def choose(tmp_path, *argv):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return choose_detector(parser.parse_args(["--model", "wbmm_a", *map(str, argv)]), tmp_path / "work")


@pytest.mark.parametrize(
    ("files", "folder"),
    [
        ("annotations/{}.json", "{}"),
        ("annotations/instances_{}2017.json", "{}2017"),
        ("{}/_annotations.coco.json", "{}"),
        ("{}.json", "images/{}"),
        ("{}.json", "images"),
    ],
)
def test_layouts(tmp_path, files, folder):
    for part in ("train", "val"):
        write(tmp_path / files.format(part), tmp_path / folder.format(part), [f"{part}-{i}.jpg" for i in (1, 2)])
    (tmp_path / "other.json").write_text("{}")
    found = find_objects(tmp_path)
    assert found.split is None
    assert found.json == {part: tmp_path / files.format(part) for part in ("train", "val")}
    assert found.images == {part: tmp_path / folder.format(part) for part in ("train", "val")}
    assert found.classes == ["cat", "dog"]


def test_one_file_is_split(tmp_path):
    write(tmp_path / "data" / "labels.json", tmp_path / "data" / "images", [f"{i}.jpg" for i in range(10)])
    choices = choose(tmp_path, "--data", tmp_path / "data")
    parts = {part: json.loads((tmp_path / "work" / f"{part}.json").read_text()) for part in ("train", "val")}
    names = {part: {image["file_name"] for image in contents["images"]} for part, contents in parts.items()}
    assert (len(names["train"]), len(names["val"])) == (8, 2)
    assert not names["train"] & names["val"]
    assert all(len(contents["annotations"]) == len(contents["images"]) for contents in parts.values())
    assert choices.variables["train_json"] == str(tmp_path / "work" / "train.json")
    assert choices.variables["anchor_scale"] == 4, "objects of 24 px"


def test_what_is_wrong_with_a_folder_is_said(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        find_objects(tmp_path / "none")
    with pytest.raises(ValueError, match="no JSON file in COCO's format"):
        find_objects(tmp_path)
    write(tmp_path / "train.json", tmp_path / "images", ["a.jpg", "b.jpg"])
    write(tmp_path / "val.json", tmp_path / "images", ["a.jpg"], categories=("cat",))
    with pytest.raises(ValueError, match=r"has the categories cat, dog, .* has cat"):
        choose(tmp_path, "--data", tmp_path)
    shutil.rmtree(tmp_path / "images")
    with pytest.raises(ValueError, match=r"names the image a.jpg, which is neither in"):
        find_objects(tmp_path)


def test_boxes_alone_get_a_detector_without_masks(tmp_path):
    for part in ("train", "val"):
        write(tmp_path / f"{part}.json", tmp_path / part, ["a.jpg", "b.jpg"], mask=False)
    choices = choose(tmp_path, "--data", tmp_path)
    assert choices.base == "wbmm::own/faster_rcnn.py"
    assert any("boxes alone" in why for _, _, why in choices.rows)
    assert choose(tmp_path, "--data", tmp_path, "--head", "cascade").base == "wbmm::own/cascade_rcnn.py"


def test_masks_can_be_left_out(tmp_path):
    for part in ("train", "val"):
        write(tmp_path / f"{part}.json", tmp_path / part, ["a.jpg", "b.jpg"])
    assert choose(tmp_path, "--data", tmp_path).base == "wbmm::own/mask_rcnn.py"
    assert choose(tmp_path, "--data", tmp_path, "--boxes").base == "wbmm::own/faster_rcnn.py"


def test_what_other_programs_leave_out_is_filled_in(tmp_path):
    """Ids from 0, no iscrowd, no area, and a category that is only a heading."""
    for part in ("train", "val"):
        write(tmp_path / f"{part}.json", tmp_path / part, ["a.jpg", "b.jpg"], categories=("animals", "cat"))
        contents = json.loads((tmp_path / f"{part}.json").read_text())
        for number, entry in enumerate(contents["annotations"]):
            entry |= {"id": number, "category_id": 2}
            del entry["iscrowd"], entry["area"]
        contents["annotations"][1]["segmentation"] = []
        (tmp_path / f"{part}.json").write_text(json.dumps(contents))
    before = (tmp_path / "train.json").read_text()
    choices = choose(tmp_path, "--data", tmp_path, "--boxes", "--dry-run")
    what, why = next(row[1:] for row in choices.rows if row[0] == "mended")
    filled = "area of polygons and boxes where it was missing; iscrowd 0 where it was missing"
    assert what == f"annotations numbered from 1; {filled}"
    assert str(tmp_path / "work") in why
    assert any(row[2].endswith("no object to train on: animals") for row in choices.rows)
    assert (choices.variables["train_json"], choices.variables["val_json"]) == ("work/train.json", "work/val.json")
    objects = json.loads((tmp_path / "work" / "train.json").read_text())["annotations"]
    assert [(entry["id"], entry["iscrowd"], entry["area"]) for entry in objects] == [(1, 0, 576), (2, 0, 576)]
    assert (tmp_path / "train.json").read_text() == before
    with pytest.raises(ValueError, match="annotation 2 has no segmentation, which masks are learned from; --boxes"):
        choose(tmp_path, "--data", tmp_path, "--dry-run")


def test_a_dry_run_checks_the_data(tmp_path):
    for part in ("train", "val"):
        write(tmp_path / f"{part}.json", tmp_path / part, ["a.jpg", "b.jpg"])
    assert not [row for row in choose(tmp_path, "--data", tmp_path, "--dry-run").rows if "remark" in row[0]]
    (tmp_path / "train" / "a.jpg").unlink()
    with pytest.raises(ValueError, match=r"1 of 2 images of train.json are missing in .*train; the first is a.jpg"):
        choose(tmp_path, "--data", tmp_path, "--dry-run")
    contents = json.loads((tmp_path / "val.json").read_text())
    contents["annotations"][0]["segmentation"] = [[1, 1, 2, 2]]
    (tmp_path / "val.json").write_text(json.dumps(contents))
    shutil.copy(tmp_path / "train" / "b.jpg", tmp_path / "train" / "a.jpg")
    with pytest.raises(ValueError, match="polygon of two points, which COCO's metrics cannot read"):
        choose(tmp_path, "--data", tmp_path, "--dry-run")


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("head", ["mask-rcnn", "cascade"])
def test_one_line_trains(tmp_path, capsys, head, masks):
    pytest.importorskip("mmdet")
    for part in ("train", "val"):
        write(tmp_path / "data" / f"{part}.json", tmp_path / "data" / part, [f"{i}.jpg" for i in (1, 2)], mask=masks)
    narrow = ["model.backbone.dims=[8,16,32,64]", "workers=0", "width=8", "box_features=8", "rois=8", "proposals=8"]
    argv = ["train-det", "--data", tmp_path / "data", "--model", "wbmm_f", "--small-heads", "--epochs", "1"]
    argv += ["--batch", "2", "--head", head, "--work-dir", tmp_path / "run", "--cfg-options", *narrow]
    assert cli.main(list(map(str, argv))) == 0
    out = capsys.readouterr().out
    assert "2: cat, dog" in out
    assert "wbmm detect" in out
    assert (tmp_path / "run" / "epoch_1.pth").is_file()
    assert ("segm_mAP" in next((tmp_path / "run").glob("*/vis_data/scalars.json")).read_text()) is masks

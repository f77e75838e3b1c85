"""`tools/prepare_coco.py`: what is wrong with data in COCO's format is found before training."""

import json
import zipfile

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("pycocotools")

from pycocotools import mask as rle

from tests.mm.objects import CATEGORIES, write_objects
from wbmm.mm.coco import _uncompressed, check_annotations
from wbmm.mm.prepare import prepare_coco

CLASSES = tuple(CATEGORIES)


@pytest.fixture
def root(tmp_path):
    return write_objects(tmp_path / "coco", train=8, val=3)


def check(root, capsys, *options):
    code = prepare_coco(["--root", str(root), *map(str, options)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def edit(root, change, part="train2017"):
    """Applies a function to the contents of an annotation file."""
    file = root / "annotations" / f"instances_{part}.json"
    contents = json.loads(file.read_text())
    change(contents)
    file.write_text(json.dumps(contents))
    return file


def test_sound_data(root, capsys):
    code, text = check(root, capsys, "--any-count", "--classes", *CLASSES, "--strict", "--all")
    assert code == 0, text
    contents = json.loads((root / "annotations" / "instances_train2017.json").read_text())
    crowds = sum(annotation["iscrowd"] for annotation in contents["annotations"])
    assert crowds == 2
    count = len(contents["annotations"])
    assert f"train: 8 images (1 without objects), {count} objects ({crowds} crowds) of 3 categories" in text
    assert "val: 3 images" in text
    own = ["--train", "annotations/instances_train2017.json", "train2017"]
    assert check(root, capsys, *own) == (0, text.split("val:")[0])


def test_the_whole_of_coco_is_expected_otherwise(root, capsys):
    assert check(root, capsys, "--classes", *CLASSES)[1].count("has 8 images, COCO 118287") == 1
    assert "no category is called 'person'" in check(root, capsys)[1]
    (root / "val2017").rename(root / "other")
    code, text = check(root, capsys)
    assert code == 1
    assert "has no val2017: expected annotations/instances_train2017.json, train2017" in text
    assert "there is no folder" in check(root / "none", capsys)[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("categories"), "no list 'categories'"),
        (lambda c: c["categories"].clear(), "no categories in it"),
        (lambda c: c["categories"][1].update(name="disc"), "the category name 'disc' is there twice"),
        (lambda c: c["categories"][1].update(id=3), "category id 3 is there twice"),
        (lambda c: c["categories"][1].update(name="cube"), "no category is called 'square'"),
        (lambda c: c["images"].clear(), "no images in it"),
        (lambda c: c["annotations"].clear(), "there are no objects in it"),
        (lambda c: c["images"][1].pop("file_name"), "image 2 has no file_name"),
        (lambda c: c["images"][1].update(id=1), "image id 1 is there twice"),
        (lambda c: c["images"][0].update(width=64), "is 128x128, but its annotations are for 64x128"),
        (lambda c: c["annotations"][0].update(image_id=99), "annotation 1 is of image 99"),
        (lambda c: c["annotations"][0].update(category_id=1), "annotation 1 is of category 1"),
        (lambda c: c["annotations"][0].update(bbox=[1, 2, 3]), "annotation 1 has the box [1, 2, 3]"),
        (lambda c: c["annotations"][0].update(bbox=[1, 2, 3, None]), "annotation 1 has the box [1, 2, 3, None]"),
        (lambda c: c["annotations"][0].update(bbox=[1, 2, 3, float("nan")]), "annotation 1 has the box"),
        (lambda c: c["annotations"][0].update(segmentation={"a": 1}), "a run-length code needs counts and size"),
        (lambda c: c["annotations"][0].update(segmentation=[1, 2, 3]), "neither a list of polygons nor"),
        (lambda c: c["annotations"][0].update(segmentation=[]), "annotation 1 has no segmentation"),
        (lambda c: c["annotations"][0].update(segmentation=[[1, 2, 3]]), "annotation 1 has a polygon of 3 numbers"),
        (
            lambda c: c["annotations"][0].update(segmentation={"counts": [9], "size": [3, 3]}),
            "a run-length code of [3, 3] for an image of [128, 128]",
        ),
        (
            lambda c: c["annotations"][0].update(segmentation={"counts": [9], "size": [128, 128]}),
            "the counts of its run-length code do not add up to 128x128 pixels",
        ),
        (
            lambda c: c["annotations"][0].update(segmentation={"counts": "zzz9~~}}", "size": [128, 128]}),
            "the counts of its run-length code do not add up to 128x128 pixels",
        ),
        (
            lambda c: c["annotations"][0].update(segmentation={"counts": 7, "size": [128, 128]}),
            "the counts of its run-length code do not add up to 128x128 pixels",
        ),
        (
            lambda c: c["annotations"][0].update(segmentation=[[1, 2, 3, "4", 5, 6]]),
            "annotation 1 has a polygon with '4'; expected numbers",
        ),
        (
            lambda c: c["annotations"][0].update(segmentation=[[1, 2, 3, float("nan"), 5, 6]]),
            "annotation 1 has a polygon with nan; expected numbers",
        ),
        (lambda c: c["annotations"][0].pop("area"), "annotation 1 has the area None"),
        (lambda c: c["annotations"][0].pop("iscrowd"), "annotation 1 has iscrowd None"),
        (lambda c: c["annotations"][0].update(id=0), "take the id 0 for no match"),
        (lambda c: c["annotations"].append({}), "an entry of the annotation list has no id"),
        (lambda c: c["categories"].reverse(), "come in the order 'triangle', 'square', 'disc', the configuration's"),
    ],
)
def test_errors(root, change, message):
    file = edit(root, change)
    with pytest.raises(ValueError) as error:
        check_annotations(file, root / "train2017", CLASSES)
    assert message in str(error.value)
    assert str(file) in str(error.value) or "000000000001.jpg" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bbox": [5, 5, 0.5, 20]}, "1 objects have a degenerate box (narrower or lower than a pixel)"),
        ({"bbox": [5, 5, -3, 20]}, "1 objects have a degenerate box"),
        ({"bbox": [500, 5, 10, 20]}, "1 objects have a box outside of their image"),
        ({"bbox": [100, 5, 80, 20]}, "1 objects have a box that reaches over the edge"),
        ({"area": 0}, "1 objects have no area"),
        ({"segmentation": [[1, 2, 3, 4]]}, "1 objects have a polygon of two points"),
    ],
)
def test_remarks_on_what_training_leaves_out(root, capsys, change, message):
    edit(root, lambda contents: contents["annotations"][0].update(change))
    options = ["--any-count", "--classes", *CLASSES]
    code, text = check(root, capsys, *options)
    assert code == 0
    assert message in text
    assert "the first is annotation 1" in text
    code, text = check(root, capsys, *options, "--strict")
    assert code == 1
    assert "prepare_coco: 1 remark" in text


def test_what_the_metrics_cannot_read_is_an_error_of_the_validation_set(root, capsys):
    edit(root, lambda contents: contents["annotations"][0].update(segmentation=[[1, 2, 3, 4]]), "val2017")
    code, text = check(root, capsys, "--any-count", "--classes", *CLASSES)
    assert code == 1
    assert "annotation 1 has a polygon of two points, which COCO's metrics cannot read" in text


def test_boxes_by_two_corners(root):
    def to_corners(contents):
        for annotation in contents["annotations"]:
            left, top, width, height = annotation["bbox"]
            annotation["bbox"] = [left, top, left + width, top + height]

    file = edit(root, to_corners)
    with pytest.raises(ValueError, match=r"would fit as \[left, top, right, bottom\]"):
        check_annotations(file, root / "train2017", CLASSES)


def test_objects_of_no_class_are_counted(root, capsys):
    code, text = check(root, capsys, "--any-count", "--classes", "disc", "triangle")
    assert code == 0
    assert "objects are of categories that are no classes of the configuration: left out" in text


def test_images(root, capsys):
    options = ["--any-count", "--classes", *CLASSES]
    first = root / "train2017" / "000000000002.jpg"  # not square
    whole, image = first.read_bytes(), Image.open(first)
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(first, exif=exif)
    assert (
        "is 97x131, once turned as its EXIF data say, but its annotations are for 131x97"
        in check(root, capsys, *options)[1]
    )
    first.write_bytes(whole[: len(whole) // 2])
    assert "000000000002.jpg is no readable image" in check(root, capsys, *options)[1]
    first.write_bytes(whole)
    (root / "train2017" / "000000000002.jpg").write_bytes(b"no image")
    code, text = check(root, capsys, *options)
    assert code == 1
    assert "000000000002.jpg is no readable image" in text
    (root / "train2017" / "000000000002.jpg").unlink()
    assert "1 of 8 images of instances_train2017.json are missing" in check(root, capsys, *options)[1]
    (root / "annotations" / "instances_train2017.json").write_text('{"images": [')
    assert "is not readable JSON, perhaps cut off" in check(root, capsys, *options)[1]


def test_archives(root, tmp_path, capsys):
    archives = []
    for name in ("annotations", "train2017", "val2017"):
        archives.append(tmp_path / f"{name}.zip")
        with zipfile.ZipFile(archives[-1], "w") as file:
            for path in sorted((root / name).iterdir()):
                file.write(path, f"{name}/{path.name}")
    target = tmp_path / "unpacked"
    options = ["--any-count", "--classes", *CLASSES]
    code, text = check(target, capsys, "--archives", *archives, *options)
    assert code == 0, text
    assert sorted(path.name for path in target.iterdir()) == ["annotations", "train2017", "val2017"]
    assert Image.open(target / "val2017" / "000000000001.jpg").size == (128, 128)
    assert "is there already" in check(target, capsys, "--archives", archives[0], *options)[1]
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as file:
        file.writestr("val2017/../../evil", "x")
    assert "refused" in check(tmp_path / "deep", capsys, "--archives", tmp_path / "bad.zip")[1]
    assert not (tmp_path / "evil").exists()
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as file:
        file.writestr("./", "")
        file.writestr("readme.txt", "x")
    assert "it is another archive" in check(tmp_path / "deep", capsys, "--archives", tmp_path / "other.zip")[1]


def test_compressed_run_lengths_are_read_as_pycocotools_does():
    generator = np.random.default_rng(0)
    for height, width, share in ((1, 1, 1.0), (40, 30, 0.5), (40, 30, 0.0), (300, 400, 0.001), (700, 900, 0.999)):
        mask = generator.random((height, width)) < share
        code = rle.encode(np.asfortranarray(mask.astype(np.uint8)))
        counts = _uncompressed(code["counts"].decode())
        assert sum(counts) == height * width
        assert sum(counts[1::2]) == mask.sum()
        assert rle.frPyObjects({"size": [height, width], "counts": counts}, height, width) == code
    assert _uncompressed("P") is None  # a group says that another follows

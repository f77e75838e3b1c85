"""`wbmm detect`: pictures, and results that COCO's own tools read."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("mmdet")

from tests.helpers import randomize
from tests.mm.objects import CATEGORIES, write_config, write_objects
from wbmm import cli
from wbmm.mm.detect import Numbering
from wbmm.mm.networks import build_detector
from wbmm.mm.pictures import draw_objects


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny detector of random weights, its configuration and images in three shapes."""
    folder = tmp_path_factory.mktemp("detect")
    config = write_config(folder / "tiny.py", write_objects(folder / "data", train=1, val=3))
    model = build_detector(config)
    randomize(model.backbone)
    for head in model.roi_head.bbox_head:  # far from equal scores, or nothing would be above a threshold
        torch.nn.init.normal_(head.fc_cls.weight, std=0.5)
    torch.save({"meta": {}, "state_dict": model.state_dict()}, folder / "net.pth")
    return folder


def run(capsys, *argv):
    code = cli.main(["detect", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_pictures_and_results(place, tmp_path, capsys):
    from pycocotools.coco import COCO

    photos, annotations = place / "data" / "val2017", place / "data" / "annotations" / "instances_val2017.json"
    results = tmp_path / "results.json"
    flags = ["--config", place / "tiny.py", "--out", tmp_path / "out", "--score", "0.2"]
    code, out, error = run(capsys, place / "net.pth", photos, *flags, "--json", results, "--annotations", annotations)
    assert code == 0, error
    assert "3 pictures" in out
    for photo in photos.glob("*.jpg"):
        before, after = (np.asarray(Image.open(path)) for path in (photo, tmp_path / "out" / f"{photo.stem}.png"))
        assert before.shape == after.shape
        assert (before != after).any(-1).mean() > 0.01
    entries = json.loads(results.read_text())
    assert f"{len(entries)} objects in {results}" in out
    truth = COCO(str(annotations))
    found = truth.loadRes(str(results))  # COCO's own reading
    assert {entry["category_id"] for entry in entries} <= set(CATEGORIES.values())
    for entry in found.loadAnns(found.getAnnIds())[:20]:
        info = truth.imgs[entry["image_id"]]
        assert found.annToMask(entry).shape == (info["height"], info["width"])
        left, top, width, height = entry["bbox"]
        assert min(left, top, width, height) >= 0
        assert left + width <= info["width"] + 1e-2
        assert top + height <= info["height"] + 1e-2
    assert run(capsys, place / "net.pth", photos, *flags)[0] == 1, "pictures of the last time are not replaced"


def test_results_alone_fused_and_not(place, tmp_path, capsys):
    photos = place / "data" / "val2017"
    flags = [place / "net.pth", photos, "--config", place / "tiny.py", "--no-pictures"]
    entries = []
    for name, options in {"a": [], "b": ["--no-fuse"]}.items():
        code, _, error = run(capsys, *flags, "--json", tmp_path / name, *options)
        assert code == 0, error
        entries.append(json.loads((tmp_path / name).read_text()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert len(entries[0]) == len(entries[1]) > 3
    for a, b in zip(*entries, strict=True):
        assert (a["image_id"], a["category_id"]) == (b["image_id"], b["category_id"])
        np.testing.assert_allclose(a["bbox"], b["bbox"], atol=0.05)
        assert a["score"] == pytest.approx(b["score"], abs=1e-3)


def test_a_bad_picture_is_named_and_the_rest_done(place, tmp_path, capsys):
    (tmp_path / "bad.jpg").write_bytes(b"no picture")
    Image.new("RGB", (60, 140), (90, 90, 90)).save(tmp_path / "good.png")
    code, out, _ = run(capsys, place / "net.pth", tmp_path, "--config", place / "tiny.py", "--out", tmp_path / "out")
    assert code == 1
    assert "bad.jpg" in out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["good.png"]


def test_what_is_wrong_is_said(place, tmp_path, capsys):
    photo, config = place / "data" / "val2017" / "000000000001.jpg", ["--config", place / "tiny.py"]
    (tmp_path / "empty.json").write_text('{"images": [], "annotations": [], "categories": []}')
    for argv, reason in (
        ([place / "net.pth", photo, "--config", tmp_path / "none.py"], "no such configuration file"),
        ([place / "net.pth", tmp_path / "none.jpg", *config], "no such file or folder"),
        ([place / "net.pth", photo, *config, "--score", "2"], "--score 2.0"),
        ([place / "net.pth", photo, *config, "--no-pictures"], "give --json FILE"),
        ([place / "net.pth", photo, *config, "--annotations", tmp_path / "empty.json"], "--json FILE"),
        ([tmp_path / "none.pth", photo, *config], "none.pth"),
        (
            [
                place / "net.pth",
                photo,
                *config,
                "--json",
                tmp_path / "r.json",
                "--annotations",
                tmp_path / "empty.json",
            ],
            "lists no image 000000000001.jpg",
        ),
        ([place / "net.pth", photo, *config, "--device", "cuda:99"], "--device cuda:99 cannot be used here"),
    ):
        code, _, error = run(capsys, *argv, "--out", tmp_path / "out")
        assert code == 1
        assert reason in error


def test_equal_names_and_the_folder_of_the_images(place, tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (40, 30)).save(tmp_path / name / "000000000001.png")
    annotations = tmp_path / "ann.json"
    listed = [{"id": 1, "file_name": "000000000001.png"}]
    categories = [{"id": number, "name": name} for name, number in CATEGORIES.items()]
    annotations.write_text(json.dumps({"images": listed, "annotations": [], "categories": categories}))
    flags = [place / "net.pth", tmp_path / "a", tmp_path / "b", "--config", place / "tiny.py"]
    options = ["--no-pictures", "--json", tmp_path / "r.json", "--annotations", annotations]
    code, _, error = run(capsys, *flags, *options)
    assert code == 1
    assert "two images are called 000000000001.png among those to detect in" in error
    code, _, error = run(capsys, *flags[:2], *flags[3:], "--out", tmp_path / "a", "--force")
    assert code == 1
    assert "is one of the images to read" in error


def test_a_photograph_that_is_to_be_turned(place, tmp_path, capsys):
    image = Image.open(place / "data" / "val2017" / "000000000002.jpg")
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.jpg", exif=exif)
    assert run(capsys, place / "net.pth", tmp_path, "--config", place / "tiny.py", "--out", tmp_path / "out")[0] == 0
    assert Image.open(tmp_path / "out" / "turned.png").size == image.size[::-1]


def test_numbers_without_an_annotation_file(tmp_path):
    from mmdet.datasets import CocoDataset

    names = CocoDataset.METAINFO["classes"]
    paths = [tmp_path / "000000000139.jpg", tmp_path / "000000000285.jpg"]
    numbering = Numbering(paths, names)
    assert list(numbering.images.values()) == [139, 285]
    assert (numbering.categories[0], numbering.categories[11], numbering.categories[79]) == (1, 13, 90)
    numbering = Numbering([tmp_path / "a.jpg", tmp_path / "7.jpg"], ["x", "y"])
    assert list(numbering.images.values()) == [1, 2]
    assert numbering.categories == [1, 2]


def test_drawing():
    image = Image.new("RGB", (200, 100), (100, 100, 100))
    masks = np.zeros((1, 100, 200), dtype=bool)
    masks[0, 40:60, 40:60] = True
    boxes, colours = np.array([[30, 30, 80, 80]]), np.array([[255, 0, 0]])
    picture = np.asarray(draw_objects(image, boxes, ["disc 0.90"], colours, masks))
    np.testing.assert_array_equal(picture[30, 70], (255, 0, 0))  # the box
    np.testing.assert_allclose(picture[50, 50], (170, 55, 55), atol=1)  # the mask
    np.testing.assert_array_equal(picture[70, 70], (100, 100, 100))
    assert (picture[15:30, 30:90] != 100).any()  # the label
    plain = np.asarray(draw_objects(image, boxes, ["disc 0.90"], colours))
    np.testing.assert_array_equal(plain[50, 50], (100, 100, 100))
    with pytest.raises(ValueError, match=r"a mask of \(10, 10\)"):
        draw_objects(image, boxes, ["x"], colours, masks[:, :10, :10])

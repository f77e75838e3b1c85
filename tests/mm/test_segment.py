"""`wbmm segment` and the pictures that it draws."""

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("mmseg")

from tests.helpers import randomize
from tests.mm.shapes import write_config, write_shapes
from wbmm import cli
from wbmm.mm.networks import build_segmentor
from wbmm.mm.pictures import class_colours, draw_classes


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny segmentor of random weights and some pictures."""
    folder = tmp_path_factory.mktemp("segment")
    config = write_config(folder / "tiny.py", write_shapes(folder / "data", train=1, val=3))
    model = randomize(build_segmentor(config)).eval()
    for module in model.modules():  # with norms around 0 and a large bias, every pixel would have the same class
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.ones_(module.weight)
    torch.nn.init.zeros_(model.decode_head.conv_seg.bias)
    torch.save({"meta": {}, "state_dict": model.state_dict()}, folder / "net.pth")
    return folder


def run(capsys, *argv):
    code = cli.main(["segment", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_folder_of_pictures(place, tmp_path, capsys):
    photos = place / "data" / "images" / "validation"
    flags = ["--config", place / "tiny.py", "--out", tmp_path / "out"]
    code, out, error = run(capsys, place / "net.pth", photos, *flags, "--labels")
    assert code == 0, error
    assert "3 pictures" in out
    for photo in photos.glob("*.jpg"):
        picture = Image.open(tmp_path / "out" / f"{photo.stem}.png")
        labels = np.asarray(Image.open(tmp_path / "out" / f"{photo.stem}.labels.png"))
        width, height = Image.open(photo).size
        assert labels.shape == (height, width)
        assert labels.max() < 150
        assert picture.width >= width
        assert picture.height > height  # the legend
    assert run(capsys, place / "net.pth", photos, *flags)[0] == 1, "pictures of the last time are not replaced"
    assert run(capsys, place / "net.pth", photos, *flags, "--force", "--no-fuse", "--labels")[0] == 0
    again = np.asarray(Image.open(tmp_path / "out" / f"{photo.stem}.labels.png"))
    assert (again == labels).mean() > 0.999, "fused and not: the same classes"


def test_the_labels_are_those_of_mmseg(place, tmp_path, capsys):
    from mmengine.registry import DefaultScope
    from mmseg.apis import inference_model

    photo = place / "data" / "images" / "validation" / "ADE_0001.jpg"
    run(capsys, place / "net.pth", photo, "--config", place / "tiny.py", "--out", tmp_path, "--labels")
    model = build_segmentor(place / "tiny.py", place / "net.pth")
    with DefaultScope.overwrite_default_scope("mmseg"):
        expected = inference_model(model, str(photo)).pred_sem_seg.data[0].numpy()
    labels = np.asarray(Image.open(tmp_path / "ADE_0001.labels.png"))
    assert len(np.unique(expected)) > 1
    # the decoders of PIL and of OpenCV differ in single grey values
    assert (labels == expected).mean() > 0.98


def test_a_bad_picture_is_named_and_the_rest_done(place, tmp_path, capsys):
    (tmp_path / "bad.jpg").write_bytes(b"no picture")
    Image.new("RGB", (60, 40), (90, 90, 90)).save(tmp_path / "good.png")
    code, out, _ = run(capsys, place / "net.pth", tmp_path, "--config", place / "tiny.py", "--out", tmp_path / "out")
    assert code == 1
    assert "bad.jpg" in out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["good.png"]


def test_what_is_wrong_is_said(place, tmp_path, capsys):
    photo = place / "data" / "images" / "validation" / "ADE_0000.jpg"
    for argv, reason in (
        ([place / "net.pth", photo], "needs its configuration"),
        ([place / "net.pth", photo, "--config", tmp_path / "none.py"], "no such configuration file"),
        ([place / "net.pth", tmp_path / "none.jpg", "--config", place / "tiny.py"], "no such file or folder"),
        ([place / "net.pth", photo, "--config", place / "tiny.py", "--opacity", "2"], "--opacity 2.0"),
        ([tmp_path / "none.pth", photo, "--config", place / "tiny.py"], "none.pth"),
    ):
        code, _, error = run(capsys, *argv, "--out", tmp_path / "out")
        assert code == 1
        assert reason in error


def test_overlay_paints_and_names():
    image = Image.new("RGB", (400, 100), (100, 100, 100))
    labels = np.zeros((100, 400), dtype=np.int64)
    labels[:, 200:] = 2
    colours = class_colours(3, [(255, 0, 0), (0, 255, 0), (0, 0, 255)])
    picture = np.asarray(draw_classes(image, labels, ["wall", "floor", "sky"], colours, opacity=0.5))
    np.testing.assert_allclose(picture[50, 50], (177, 50, 50), atol=1)
    np.testing.assert_allclose(picture[50, 350], (50, 50, 177), atol=1)
    legend = picture[100:].reshape(-1, 3).tolist()
    assert [255, 0, 0] in legend
    assert [0, 0, 255] in legend
    assert [0, 255, 0] not in legend, "a class that is not there is not named"
    with pytest.raises(ValueError, match="labels of 10x10 for an image of 100x400"):
        draw_classes(image, labels[:10, :10], ["wall"] * 3, colours)


def test_colours_differ():
    colours = class_colours(150)
    assert len({tuple(colour) for colour in colours.tolist()}) == 150

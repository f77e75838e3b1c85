"""Sources of images: decoding, idx files, digits, Hugging Face datasets."""

import gzip
import struct
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.data.helpers import assert_same, collect, config, png_bytes
from wbmm.data.sources import (
    EIGHT_BIT_MODES,
    BadImage,
    FileSource,
    first_of_each_class,
    open_source,
    read_idx,
)
from wbmm.train.build import build_data


def test_hugging_face_dataset_from_a_folder(folder, monkeypatch, tmp_path_factory):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cache = tmp_path_factory.mktemp("cache")
    changes = {"source": f"hfds/{folder}", "val_split": "validation"}
    data = build_data(config(cache, data=changes))
    assert data.class_names == ["ant", "bee", "cat"]
    assert data.train.steps_per_epoch == 6
    assert_same(collect(data.train), collect(build_data(config(folder)).train))


def test_streams_are_refused():
    with pytest.raises(ValueError, match="cannot be read by index"):
        build_data(config(data={"source": "hfids/imagenet-1k"}))


def png_header(width: int, height: int) -> bytes:
    """A sound PNG file but for its pixels, of which there are none."""
    chunks = b""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    for kind, data in ((b"IHDR", header), (b"IDAT", b""), (b"IEND", b"")):
        chunks += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (png_header(50000, 50000), "exceeds limit"),
        (png_header(8, 8), ""),
        (png_bytes(0)[:300], "truncated|Truncated|broken"),
        (b"", "the file is empty"),
        (b"hello, I am a text", "its contents are not a supported image format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n", "not a supported image format"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), ""),
        (b"\xff\xd8\xff\xe0" + bytes(64), ""),
        (b"BM" + b"\xff" * 60, ""),
        (b"RIFF\x10\x00\x00\x00WEBPVP8 " + bytes(20), ""),
    ],
)
def test_files_that_are_no_good_picture_are_named(tmp_path, content, reason):
    path = tmp_path / "some.png"
    path.write_bytes(content)
    with pytest.raises(BadImage, match=rf"^cannot read image {path}: .*({reason})") as caught:
        FileSource([path]).image(0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_pictures_of_any_mode_keep_their_brightness(tmp_path, mode):
    if mode == "I;16":
        image, ending = Image.fromarray(np.full((8, 8), 200 * 257, np.uint16)), "png"
    else:
        image, ending = Image.new("RGB", (8, 8), (200, 200, 200)), "tiff" if mode == "CMYK" else "png"
        image = image.convert(mode, palette=Image.Palette.ADAPTIVE, dither=Image.Dither.NONE)
    image.save(tmp_path / f"some.{ending}")
    loaded = FileSource([tmp_path / f"some.{ending}"]).image(0)
    expected = 255 if mode == "1" else 200
    for channels in ("L", "RGB"):
        assert np.abs(np.asarray(loaded.convert(channels)).astype(int) - expected).max() <= 1


def test_every_mode_that_is_let_through_can_be_converted():
    for mode in EIGHT_BIT_MODES:
        for channels in ("L", "RGB"):
            assert Image.new(mode, (4, 4)).convert(channels).mode == channels


@pytest.mark.parametrize(("dtype", "mode"), [(np.float32, "F"), (np.int32, "I")])
def test_pixels_without_a_range_are_named(tmp_path, dtype, mode):
    Image.fromarray(np.zeros((8, 8), dtype)).save(tmp_path / "some.tiff")
    with pytest.raises(BadImage, match=rf"some\.tiff: pixels of PIL's mode {mode} have no fixed range"):
        FileSource([tmp_path / "some.tiff"]).image(0)


def test_digits_split_is_stratified_and_complete():
    cfg = config(data={"source": "digits"}).data
    train, val = open_source(cfg, train=True), open_source(cfg, train=False)
    assert (len(train), len(val)) == (1437, 360)
    assert set(np.bincount(val.labels)) <= {35, 36, 37}
    assert train.images.max() == val.images.max() == 255
    together = {image.tobytes() for source in (train, val) for image in source.images}
    from sklearn.datasets import load_digits

    assert together == {np.round(image * 255 / 16).astype(np.uint8).tobytes() for image in load_digits().images}


def write_idx(path, array: np.ndarray):
    raw = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files(tmp_path, ending):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (30, 28, 28), dtype=np.uint8)
    labels = np.arange(30, dtype=np.uint8) % 10
    for prefix in ("train", "t10k"):
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte{ending}", images)
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte{ending}", labels)
    source = open_source(config(tmp_path, data={"source": "idx"}).data, train=True)
    np.testing.assert_array_equal(np.asarray(source.image(7)), images[7])
    assert source.labels.tolist() == labels.tolist()
    limited = open_source(config(tmp_path, data={"source": "idx", "args": {"val_limit": 20}}).data, train=False)
    assert np.bincount(limited.labels).tolist() == [2] * 10


def test_idx_files_that_are_damaged_are_named(tmp_path):
    path = tmp_path / "labels"
    write_idx(path, np.arange(5, dtype=np.uint8))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"labels should hold \(5,\) = 5 bytes of data, it has 4"):
        read_idx(path)
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="not an idx file"):
        read_idx(path)
    with pytest.raises(ValueError, match="dataset-fashion-mnist"):
        open_source(config(tmp_path, data={"source": "idx"}).data, train=True)


def test_first_of_each_class_is_balanced():
    labels = np.array([0, 0, 0, 1, 0, 1, 2, 0])
    assert first_of_each_class(labels, 5).tolist() == [0, 1, 3, 5, 6]
    with pytest.raises(ValueError, match="limit of 9"):
        first_of_each_class(labels, 9)


@pytest.mark.parametrize(("source", "package"), [("digits", "sklearn.datasets"), ("hfds/some", "datasets")])
def test_a_source_whose_package_is_missing_says_how_to_get_it(monkeypatch, source, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"^data\.source=\w+ needs .*: pip install 'wbmm\[train\]'$"):
        open_source(config(data={"source": source}).data, train=True)

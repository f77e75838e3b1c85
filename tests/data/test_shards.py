"""Tar files of classes, and WebDataset shards, read by index."""

import io
import json
import os
import resource
import tarfile

import numpy as np
import pytest

from tests.data.helpers import assert_same, collect, config, picture, png_bytes
from wbmm.data.shards import shard_files
from wbmm.data.sources import (
    open_source,
)
from wbmm.train.build import build_data


def test_tar_of_classes_reads_like_the_folder(folder):
    for split in ("train", "val"):
        with tarfile.open(folder / f"{split}.tar", "w") as tar:
            tar.add(folder / split, arcname=split)
    packed = build_data(config(folder, data={"source": "tar"}))
    plain = build_data(config(folder))
    assert packed.class_names == plain.class_names == ["ant", "bee", "cat"]
    assert_same(collect(packed.train), collect(plain.train))


def write_tar(path, members: dict[str, bytes]):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def tar_bytes(tmp_path, members: dict[str, bytes]) -> bytes:
    write_tar(tmp_path / "inner.tar", members)
    return (tmp_path / "inner.tar").read_bytes()


@pytest.mark.parametrize("layout", ["nested", "a tar a class", "tars in a tar", "parts", "parts of one prefix"])
def test_layouts_of_tar_files(tmp_path, layout):
    """Two images of each class, in the usual arrangements; the classes are Ant and bee."""
    root, image = tmp_path / "data", png_bytes(1)
    root.mkdir()
    if layout == "nested":
        write_tar(root / "train.tar", {f"./train/{c}/images/{i}.png": image for c in ("bee", "Ant") for i in "01"})
    elif layout == "a tar a class":
        for name in ("bee", "Ant"):
            write_tar(root / "train" / f"{name}.tar", {f"images/{i}.png": image for i in "01"})
    elif layout == "tars in a tar":
        inner = {f"{c}.tar": tar_bytes(tmp_path, {f"{c}_{i}.png": image for i in "01"}) for c in ("bee", "Ant")}
        write_tar(root / "train.tar", inner)
    else:
        prefix = "train/" if layout == "parts of one prefix" else ""
        for i in "01":
            write_tar(root / "train" / f"part{i}.tar", {f"{prefix}{c}/{i}.png": image for c in ("bee", "Ant")})
    source = open_source(config(root, data={"source": "tar"}).data, train=True)
    assert source.class_names == ["Ant", "bee"]
    assert sorted(source.labels.tolist()) == [0, 0, 1, 1]
    for index in range(4):
        np.testing.assert_array_equal(np.asarray(source.image(index)), np.asarray(picture(1)))


def write_shards(root, split: str, count: int, shards: int = 2):
    for shard in range(shards):
        with tarfile.open(root / f"{split}-{shard:04d}.tar", "w") as tar:
            for i in range(shard, count, shards):
                for extension, content in (("png", png_bytes(i)), ("cls", str(i % 3).encode())):
                    member = tarfile.TarInfo(f"sample{i:05d}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def test_webdataset_shards_are_read_by_index(tmp_path):
    write_shards(tmp_path, "train", 12)
    write_shards(tmp_path, "val", 6)
    cfg = config(tmp_path, data={"source": "wds"})
    source = open_source(cfg.data, train=True)
    # shard 0 holds samples 0, 2, 4, ...; shard 1 the odd ones
    order = [*range(0, 12, 2), *range(1, 12, 2)]
    assert source.labels.tolist() == [i % 3 for i in order]
    for index, sample in enumerate(order):
        np.testing.assert_array_equal(np.asarray(source.image(index)), np.asarray(picture(sample)))
    data = build_data(config(tmp_path, data={"source": "wds", "workers": 2}))
    assert_same(collect(data.train), collect(build_data(cfg).train))
    assert len(list((tmp_path / ".wbmm-index").glob("*.npy"))) == 2


def test_a_damaged_index_of_shards_is_made_again(tmp_path):
    write_shards(tmp_path, "train", 6)
    cfg = config(tmp_path, data={"source": "wds"}).data
    labels = open_source(cfg, train=True).labels
    (index,) = (tmp_path / ".wbmm-index").iterdir()
    index.write_bytes(b"\x93NUMPY broken")
    np.testing.assert_array_equal(open_source(cfg, train=True).labels, labels)


def test_more_shards_than_files_may_be_open(tmp_path):
    write_shards(tmp_path, "train", 60, shards=60)
    source = open_source(config(tmp_path, data={"source": "wds"}).data, train=True)
    source.image(0)  # what else is opened once, such as modules of PIL
    before = set(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [number for number in range(1000) if str(number) not in before]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[5], hard))  # five more may be opened
    try:
        images = [np.asarray(source.image(index)) for index in range(60)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for sample, image in enumerate(images):
        np.testing.assert_array_equal(image, np.asarray(picture(sample)))
    assert set(os.listdir("/proc/self/fd")) == before


def test_shard_patterns(tmp_path):
    write_shards(tmp_path, "train", 6, shards=3)
    for split in ("train", "train-*.tar", "train-{0000..0002}.tar"):
        assert [file.name for file in shard_files(tmp_path, split)] == [f"train-000{i}.tar" for i in range(3)]
    with pytest.raises(ValueError, match=r"1 of 4 shards .* missing"):
        shard_files(tmp_path, "train-{0000..0003}.tar")
    with pytest.raises(ValueError, match="no shards for split 'test'"):
        shard_files(tmp_path, "test")
    with pytest.raises(ValueError, match="must be files in a folder"):
        shard_files(tmp_path, "pipe:cat x.tar")


def test_shards_may_name_their_classes(tmp_path):
    write_shards(tmp_path, "train", 6)
    write_shards(tmp_path, "val", 6)
    cfg = config(tmp_path, data={"source": "wds"})
    assert build_data(cfg).class_names is None
    (tmp_path / "classes.txt").write_text("zebra\nant \r\nBee\n\n")
    assert build_data(cfg).class_names == ["zebra", "ant", "Bee"]
    info = {
        "splits": {"train": {"filenames": ["train-0000.tar", "train-0001.tar"]}},
        "class_names": ["ant", "bee", "cat"],
    }
    (tmp_path / "_info.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match=r"classes\.txt and .*_info\.json name the classes differently"):
        build_data(cfg)
    (tmp_path / "classes.txt").unlink()
    assert build_data(cfg).class_names == ["ant", "bee", "cat"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"ant\nbee\n", "the training set names 2 classes, but .* has the label 2"),
        (b"ant\nbee\nant\n", "classes 0 and 2 have the same name, 'ant'"),
        (b"ant\n\nbee\n", "class 1 has no name"),
        (b"\n", "is empty"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
    ],
)
def test_names_that_cannot_be_meant(tmp_path, content, message):
    for split in ("train", "val"):
        write_shards(tmp_path, split, 6)
    (tmp_path / "classes.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        build_data(config(tmp_path, data={"source": "wds"}))


@pytest.mark.parametrize("label", ["", "cat", "1.5", "9" * 40])
def test_shards_with_a_label_that_is_no_number(tmp_path, label):
    write_tar(tmp_path / "train-0000.tar", {"a.png": png_bytes(0), "a.cls": label.encode()})
    with pytest.raises(ValueError, match=r"cannot index shard .*: a\.cls should hold a class number"):
        open_source(config(tmp_path, data={"source": "wds"}).data, train=True)


def test_an_index_that_points_outside_its_shards_is_made_again(tmp_path):
    write_shards(tmp_path, "train", 6)
    cfg = config(tmp_path, data={"source": "wds"}).data
    expected = open_source(cfg, train=True).places.table.copy()
    (index,) = (tmp_path / ".wbmm-index").iterdir()
    for field, value in ((0, 2), (1, -1), (1, 2**62), (2, 2**40)):
        table = expected.copy()
        table[field, 0] = value
        np.save(index, table)
        np.testing.assert_array_equal(open_source(cfg, train=True).places.table, expected)

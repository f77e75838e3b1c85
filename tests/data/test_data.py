"""Order, sources, workers: the same samples in the same order, whoever reads them."""

import gzip
import io
import json
import os
import resource
import signal
import socket
import struct
import tarfile
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from wbmm.data.augment import SampleDataset, seeded
from wbmm.data.folders import list_images
from wbmm.data.loader import WorkerFetch
from wbmm.data.order import Plan, hash64, permutation, uniform
from wbmm.data.shards import shard_files
from wbmm.data.sources import (
    EIGHT_BIT_MODES,
    BadImage,
    FileSource,
    first_of_each_class,
    in_order_of,
    open_source,
    read_idx,
)
from wbmm.train.config import TrainConfig, config_from_dict
from wbmm.train.loaders import build_data


def picture(seed: int, size: int = 40) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size + 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png_bytes(seed: int) -> bytes:
    buffer = io.BytesIO()
    picture(seed).save(buffer, "png")
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path):
    """Three classes, 8 training and 3 validation images each."""
    for split, count in (("train", 8), ("val", 3)):
        for label, name in enumerate(("ant", "bee", "cat")):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                picture(1000 * label + i).save(tmp_path / split / name / f"{i}.png")
    return tmp_path


def config(root=None, **changes) -> TrainConfig:
    data = {"root": str(root) if root else None, "size": 32, "workers": 0, **changes.pop("data", {})}
    return config_from_dict({"data": data, "batch": 4, "global_batch": 4, **changes})


def collect(loader, epoch=0, start=0):
    return [batch for step in loader.epoch(epoch, start) for batch in step]


def assert_same(left, right):
    assert len(left) == len(right) > 0
    for (images, labels), (others, other_labels) in zip(left, right, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)


def test_hash_is_fixed_and_uniform():
    # Written down: a change would silently break resuming runs of an older version.
    assert hash64(0, 1, 2).tolist() == [hash64(0, 1, np.array([2]))[0]]
    assert hash64(1, 2, 3)[0] == 16914669369030367833
    values = uniform(7, np.arange(20000))
    assert 0 <= values.min() < values.max() < 1
    np.testing.assert_allclose(np.histogram(values, 10)[0], 2000, atol=200)
    assert hash64(1, 2)[0] != hash64(2, 1)[0]


def test_permutation_holds_everything_and_changes_with_seed_and_epoch():
    orders = [permutation(101, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert sorted(order) == list(range(101))
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize(("world", "accumulation"), [(1, 4), (2, 2), (4, 1)])
def test_processes_and_accumulation_share_the_global_batches(world, accumulation):
    reference = list(Plan(70, 3, batch=4, accumulation=4).batches(epoch=2))
    ranks = [list(Plan(70, 3, 4, world, rank, accumulation).batches(2)) for rank in range(world)]
    merged = [batch for group in zip(*ranks, strict=True) for batch in group]
    np.testing.assert_array_equal(np.stack(merged), np.stack(reference))


def test_start_in_the_middle_is_the_rest_of_the_epoch(folder):
    loader = build_data(config(folder, global_batch=8), accumulation=2).train
    assert loader.steps_per_epoch == 3
    assert_same(collect(loader, 1, 1), collect(loader, 1)[2:])
    assert collect(loader, 1, 3) == []


def test_samples_do_not_depend_on_workers_or_on_what_was_drawn_before(folder):
    alone = build_data(config(folder)).train
    shared = build_data(config(folder, data={"workers": 2})).train
    torch.rand(5), np.random.rand(3)
    for epoch in (0, 1):
        assert_same(collect(alone, epoch), collect(shared, epoch))
    first, second = collect(alone, 0), collect(alone, 1)
    assert not torch.equal(first[0][0], second[0][0])


def test_reading_leaves_the_global_generators_alone(folder):
    loader = build_data(config(folder)).train
    torch.manual_seed(1)
    np.random.seed(1)
    wanted = torch.rand(3), np.random.rand(3)
    torch.manual_seed(1)
    np.random.seed(1)
    collect(loader)
    torch.testing.assert_close(torch.rand(3), wanted[0], rtol=0, atol=0)
    np.testing.assert_array_equal(np.random.rand(3), wanted[1])
    with seeded(5):
        inside = torch.rand(2)
    with seeded(5):
        torch.testing.assert_close(torch.rand(2), inside, rtol=0, atol=0)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_evaluation_reads_each_image_once(folder, world):
    seen = []
    for rank in range(world):
        loader = build_data(config(folder), rank=rank, world=world, accumulation=1).val
        assert loader.size == 9
        seen += [label for _, labels in loader for label in labels.tolist()]
    assert sorted(seen) == [0] * 3 + [1] * 3 + [2] * 3


def test_a_set_smaller_than_a_global_batch_is_refused(folder):
    with pytest.raises(ValueError, match="24 images, fewer than one global batch of 32"):
        build_data(config(folder, batch=32, global_batch=32))


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
    with pytest.raises(ValueError, match=r"data\.args\.map is no option .*; valid: class_map"):
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
    assert caplog.text.count("no regular files") == 1
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
        (b"hello, I am a text", "its contents are no picture that is read here"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n", "no picture"),
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


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_image_ends_the_run_with_its_name(folder, workers):
    bad = folder / "train" / "bee" / "3.png"
    bad.write_bytes(bad.read_bytes()[:200])
    loader = build_data(config(folder, data={"workers": workers})).train
    with pytest.raises(BadImage, match=r"bee/3\.png"):
        collect(loader)


def test_a_bad_image_can_be_skipped(folder, caplog):
    data = build_data(config(folder, data={"on_bad_image": "skip"}))
    (folder / "train" / "bee" / "3.png").unlink()
    (folder / "val" / "ant" / "0.png").write_bytes(b"not an image")
    assert sum(len(labels) for _, labels in collect(data.train)) == 24
    assert sum(len(labels) for _, labels in data.val) == 8
    assert "bee/3.png" in caplog.text
    assert "ant/0.png" in caplog.text


class _Killer:
    """A source whose images kill the process that reads them."""

    labels = np.zeros(8, dtype=np.int64)

    def __len__(self):
        return 8

    def image(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(60)
def test_a_dead_worker_is_an_error_and_not_a_hang():
    fetch = WorkerFetch(SampleDataset(_Killer(), None, 3, 0, skip_bad=False), workers=1)
    with pytest.raises(RuntimeError, match="worker"):
        list(fetch(0, [np.arange(4)]))

"""Order, sources, workers: the same samples in the same order, whoever reads them."""

import gzip
import io
import os
import resource
import signal
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from wbmm.train.config import TrainConfig, config_from_dict
from wbmm.train.data import build_data
from wbmm.train.data.augment import SampleDataset, seeded
from wbmm.train.data.idx import read_idx
from wbmm.train.data.loader import WorkerFetch
from wbmm.train.data.order import Plan, hash64, permutation, uniform
from wbmm.train.data.shards import shard_files
from wbmm.train.data.sources import BadImage, first_of_each_class, open_source


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

"""What a folder of data is recognised as."""

import io
import tarfile

import pytest

from tests.data.helpers import picture, png_bytes
from wbmm.data.discover import find_data
from wbmm.data.sources import open_source
from wbmm.train.config import config_from_dict


def draw(folder, classes=("ant", "bee"), count=2):
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            picture(10 * number + i, 8).save(folder / name / f"{i}.png")
    return folder


def sizes(found) -> tuple[int, int]:
    data = config_from_dict({"data": found.settings}).data
    return tuple(len(open_source(data, train=train)) for train in (True, False))


@pytest.mark.parametrize("names", [("train", "val"), ("Train", "Valid"), ("training", "test")])
def test_class_folders_of_both_sets(tmp_path, names):
    draw(tmp_path / names[0], count=3)
    draw(tmp_path / names[1])
    found = find_data(tmp_path)
    assert found.what == f"class folders in {names[0]}/ and {names[1]}/"
    assert found.unsplit is None
    assert sizes(found) == (6, 4)


def test_validation_is_preferred_to_test(tmp_path):
    for name in ("train", "val", "test"):
        draw(tmp_path / name)
    assert find_data(tmp_path).settings["val_split"] == "val"


@pytest.mark.parametrize("inside", ["", "archive", "train", "data/train"])
def test_class_folders_alone_wherever_they_are(tmp_path, inside):
    draw(tmp_path / inside)
    (tmp_path / "__MACOSX" / "ant").mkdir(parents=True)
    (tmp_path / inside / ".cache").mkdir()
    (tmp_path / inside / "ant" / "._0.png").write_bytes(b"left by a Mac")
    found = find_data(tmp_path)
    assert found.what == "2 class folders"
    assert found.settings == {"source": "csv", "root": str(tmp_path / inside)}
    assert found.unsplit.paths == ["ant/0.png", "ant/1.png", "bee/0.png", "bee/1.png"]
    assert found.unsplit.labels == ["ant", "ant", "bee", "bee"]


def test_a_list_with_and_without_splits(tmp_path):
    draw(tmp_path)
    file = tmp_path / "pictures.csv"
    file.write_text("path,label\nant/0.png,ant\nbee/0.png,bee\n")
    assert find_data(file).unsplit.labels == ["ant", "bee"]
    file.write_text("path,label,split\nant/0.png,ant,train\nbee/0.png,bee,train\nant/1.png,ant,valid\n")
    assert sizes(find_data(file)) == (2, 1)
    file.write_text("path,label,split\nant/0.png,ant,one\n")
    with pytest.raises(ValueError, match="its column split has one; expected train and val"):
        find_data(file)


@pytest.mark.parametrize("folder", ["images", "train"])
def test_one_folder_of_pictures_and_a_list_beside_it(tmp_path, folder):
    draw(tmp_path, classes=[folder])
    (tmp_path / "labels.csv").write_text(f"image,label\n{folder}/0.png,ant\n{folder}/1.png,bee\n")
    assert find_data(tmp_path).what == "2 pictures listed in labels.csv"
    (tmp_path / "other.csv").write_text("")
    with pytest.raises(ValueError, match=r"several CSV files \(labels\.csv, other\.csv\)"):
        find_data(tmp_path)


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def test_shards_and_tar_files(tmp_path):
    samples = {
        f"{n}.{kind}": content for n in range(3) for kind, content in (("png", png_bytes(n)), ("cls", b"%d" % n))
    }
    for name in ("train-0000.tar", "val-0000.tar"):
        write_tar(tmp_path / name, samples)
    found = find_data(tmp_path)
    assert (found.what, sizes(found)) == ("shards, train and val", (3, 3))
    other = tmp_path / "other"
    other.mkdir()
    for name in ("train.tar", "val.tar"):
        write_tar(other / name, {"ant/0.png": png_bytes(0), "bee/0.png": png_bytes(1)})
    found = find_data(other)
    assert (found.what, sizes(found)) == ("tar files, train and val", (2, 2))
    (other / "val.tar").unlink()
    with pytest.raises(ValueError, match=r"tar files for training \(train\.tar, \.\.\.\) and none for validation"):
        find_data(other)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda root: None, r"no data is recognised in it \(it is empty\)"),
        (lambda root: (root / "notes.txt").write_text(""), r"it has notes\.txt"),
        (lambda root: picture(0).save(root / "0.png"), "pictures without class folders, and no CSV"),
        (lambda root: draw(root, classes=["ant"]), "one class, 'ant': there is nothing to tell apart"),
        (lambda root: (draw(root), (root / "cat").mkdir()), "1 class folder .* without an image: cat"),
        (lambda root: (root / "train.tar").write_bytes(b"x" * 2000), "none for validation"),
    ],
)
def test_what_is_no_data_is_said(tmp_path, make, told):
    make(tmp_path)
    with pytest.raises(ValueError, match=told):
        find_data(tmp_path)


def test_a_path_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="there is no such folder"):
        find_data(tmp_path / "nowhere")
    (tmp_path / "cat.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"cat\.png is a file; data is train/ and val/"):
        find_data(tmp_path / "cat.png")

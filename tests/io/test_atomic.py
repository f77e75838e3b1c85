"""Files that are there whole or not at all."""

import os

import pytest

from wbmm.io.atomic import atomic_path, link, remove_stale, replacing, write_text


def test_a_file_takes_its_name_when_it_is_whole_and_on_the_disk(tmp_path, monkeypatch):
    path, happened = tmp_path / "report.md", []
    write_text(path, "old")
    for name in ("fsync", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, n=name, f=original: happened.append(n) or f(*args))
    with replacing(path) as temporary:
        assert temporary.suffix == ".md"
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert happened == ["fsync", "replace"]
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_while_writing_leaves_the_old_file_and_comes_as_it_is(tmp_path):
    path = tmp_path / "report.md"
    write_text(path, "old")

    def fail():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_existing_file_stays_unless_told(tmp_path):
    path = tmp_path / "model.pth"
    path.write_text("old")
    with pytest.raises(FileExistsError, match="say --force"), atomic_path(path):
        pass

    def race():
        with atomic_path(tmp_path / "other.pth") as temporary:
            temporary.write_text("new")
            (tmp_path / "other.pth").write_text("by another process")

    with pytest.raises(FileExistsError, match="say --force"):
        race()
    assert (tmp_path / "other.pth").read_text() == "by another process"
    with atomic_path(path, force=True) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"


def test_a_second_name_replaces_the_file_that_had_it(tmp_path):
    source, target = tmp_path / "last.pt", tmp_path / "best.pt"
    source.write_text("new")
    target.write_text("old")
    for _ in range(2):  # the second time both are one file already, which the system does not rename
        link(source, target)
        assert target.read_text() == "new"
        assert sorted(tmp_path.iterdir()) == [target, source]


def test_what_a_killed_writer_left_is_removed(tmp_path):
    left = []
    for name in ("a.pt", "b.pt"):
        left.append(tmp_path / name)
        with replacing(left[-1]) as temporary:
            temporary.write_text("")
            left[-1] = left[-1].with_name(temporary.name)
        left[-1].write_text("half")
    remove_stale(tmp_path, tmp_path / "a.pt")
    assert [path.exists() for path in left] == [False, True]
    remove_stale(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.pt"]

import errno
import io
import os
import platform
import subprocess
from pathlib import Path

import pytest
import timm
import torch

import wbmm
from wbmm.train import checkpoint
from wbmm.train.checkpoint import CorruptCheckpoint, latest, read, write
from wbmm.train.config import config_from_dict, load_config
from wbmm.train.fit import fit


def payload(number: int) -> dict:
    return {"model": {"weight": torch.full((100,), float(number))}, "optimizer": {}, "position": {}, "config": {}}


def number_in(path) -> int:
    return int(read(path)["model"]["weight"][0])


def damage(path):
    """Flips a byte in the middle of the weight; in a new file, since `last` and `best` may be one."""
    weight = torch.load(path, weights_only=True)["model"]["weight"]
    data = bytearray(path.read_bytes())
    data[data.index(weight.numpy().tobytes()) + 200] ^= 0xFF
    path.unlink()
    path.write_bytes(data)


def test_the_last_two_stay_and_the_names_are_whole_files(tmp_path):
    for number in range(1, 5):
        write(tmp_path, payload(number), best=number == 2, keep_epoch=number if number == 3 else None)
    names = {path.name: number_in(path) for path in tmp_path.iterdir()}
    assert names == {"last.pt": 4, "last-1.pt": 3, "best.pt": 2, "epoch-0003.pt": 3}


def test_a_plain_safe_load_reads_it(tmp_path):
    path = write(tmp_path, payload(1) | checkpoint.environment())
    state = torch.load(path, weights_only=True)
    assert state["versions"]["torch"] == torch.__version__
    assert set(state["versions"]) == {"wbmm", "torch", "timm", "python"}


def test_a_run_saves_all_that_continuing_and_understanding_it_needs(make_config):
    config = load_config(make_config(schedule={"epochs": 1}), ["amp=fp16", "batch=16"])
    fit(config)
    state = torch.load(Path(config.out) / "last.pt", weights_only=True)
    model = timm.create_model("test_resnet", num_classes=5, in_chans=1)
    for part in ("model", "ema"):
        model.load_state_dict(state[part], strict=True)
    assert any(not torch.equal(value, state["ema"][key]) for key, value in state["model"].items())
    moments = state["optimizer"]["state"].values()
    assert len(moments) == len(list(model.parameters()))
    assert all(moment["exp_avg_sq"].any() for moment in moments)
    assert state["scheduler"]["base_values"]
    assert state["scaler"]["scale"] > 1
    position = state["position"]
    assert (position["step"], position["steps_per_epoch"], position["evaluated"]) == (8, 8, True)
    assert position["best"] == position["metrics"]["ema_top1"]
    assert state["seconds"] > 0
    assert config_from_dict(state["config"]) == config
    assert (state["num_classes"], state["class_names"]) == (5, None)
    assert state["versions"] == {
        "wbmm": wbmm.__version__,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "python": platform.python_version(),
    }
    git = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert state["commit"] == (git.stdout.strip() or None)


def test_one_flipped_byte_in_a_weight_is_found(tmp_path):
    path = write(tmp_path, payload(7))
    damage(path)
    assert torch.load(path, weights_only=True), "torch itself does not notice, or this test shows nothing"
    with pytest.raises(CorruptCheckpoint, match=r"last.pt is damaged: .*checksum|Bad CRC"):
        read(path)


@pytest.mark.parametrize("length", [0, 10, 0.5, 0.99])
def test_a_truncated_file_is_found(tmp_path, length):
    path = write(tmp_path, payload(7))
    data = path.read_bytes()
    path.write_bytes(data[: length if isinstance(length, int) else int(len(data) * length)])
    with pytest.raises(CorruptCheckpoint, match=r"last.pt is damaged"):
        read(path)


def test_a_damaged_last_falls_back_and_says_so(tmp_path):
    for number in (1, 2):
        write(tmp_path, payload(number))
    damage(tmp_path / "last.pt")
    said = []
    assert latest(tmp_path, said.append)[0] == tmp_path / "last-1.pt"
    assert len(said) == 1
    assert "last.pt is damaged" in said[0]
    assert "falling back to" in said[0]


def test_a_sound_last_says_nothing(tmp_path):
    write(tmp_path, payload(1))
    said = []
    assert latest(tmp_path, said.append)[0] == tmp_path / "last.pt"
    assert said == []


def test_all_damaged_is_an_error_and_none_is_none(tmp_path):
    assert latest(tmp_path) is None
    for number in (1, 2):
        write(tmp_path, payload(number))
    for name in ("last.pt", "last-1.pt"):
        damage(tmp_path / name)
    with pytest.raises(
        ValueError, match=r"no checkpoint in .* can be read: .*last.pt is damaged.*last-1.pt is damaged"
    ):
        latest(tmp_path)


def test_weights_alone_are_not_a_run(tmp_path):
    torch.save({"weight": torch.zeros(1)}, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"init=.*weights.pt"):
        read(tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="no checkpoint file"):
        read(tmp_path / "gone.pt")


@pytest.mark.parametrize("call", range(7))
def test_a_death_at_any_moment_of_writing_leaves_a_whole_checkpoint(tmp_path, monkeypatch, call):
    """Stops at the n-th operation on the file system, as a kill would."""
    for number in (1, 2):
        write(tmp_path, payload(number))
    calls = 0

    def dying(function):
        def wrapper(*args):
            nonlocal calls
            calls += 1
            if calls > call:
                raise KeyboardInterrupt
            return function(*args)

        return wrapper

    for name in ("fsync", "link", "replace"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, payload(3))
    monkeypatch.undo()
    assert not list(tmp_path.glob("*.tmp*"))
    assert number_in(latest(tmp_path)[0]) in (2, 3)
    write(tmp_path, payload(4))
    assert number_in(latest(tmp_path)[0]) == 4


@pytest.fixture
def two(tmp_path):
    """A folder with the checkpoints 1 and 2, which must stay as they are."""
    for number in (1, 2):
        write(tmp_path, payload(number))
    yield tmp_path
    assert {path.name: number_in(path) for path in tmp_path.iterdir()} == {"last.pt": 2, "last-1.pt": 1}


def test_a_full_disk_is_one_line_and_leaves_the_last_ones(two, small_disk):
    big = payload(3) | {"more": [torch.zeros(100_000) for _ in range(5)]}
    text = r"^cannot write .*last\.pt: File too large \([\d,]+ MB free on that disk\)\. .* intact: .* resume=auto$"
    with small_disk(1_000_000), pytest.raises(ValueError, match=text) as caught:
        write(two, big)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("nth", [1, 3, 20])
def test_an_error_inside_torch_save_is_not_hidden_by_it(two, monkeypatch, error, nth):
    class Full(io.FileIO):
        writes = 0

        def write(self, data):
            self.writes += 1
            if self.writes >= nth:
                raise error
            return super().write(data)

    monkeypatch.setattr(checkpoint, "open", Full, raising=False)
    expected = pytest.raises(KeyboardInterrupt)
    if isinstance(error, OSError):
        expected = pytest.raises(ValueError, match="No space left on device")
    with expected:
        write(two, payload(3) | {"more": [torch.zeros(100) for _ in range(20)]})


def test_what_a_killed_run_left_half_written_goes_at_the_next_start(make_config):
    config = make_config(schedule={"epochs": 1})
    out = config.parent / "out"
    out.mkdir()
    stale = [out / name for name in (".last.0123abcd.tmp.pt", ".best.4567cdef.tmp.pt", ".summary.89ab0123.tmp.md")]
    other = out / "notes.tmp"
    for path in [*stale, other]:
        path.write_text("half")
    with pytest.raises(ValueError, match=r"gone\.pt"):
        fit(load_config(config, ["init=gone.pt"]))
    assert not any(path.exists() for path in stale)
    assert other.exists(), "not ours"


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    for number in (1, 2):
        write(tmp_path, payload(number), best=True)
    assert [number_in(tmp_path / name) for name in ("last.pt", "last-1.pt", "best.pt")] == [2, 1, 2]

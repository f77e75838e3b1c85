"""Every door of mmengine's through which a checkpoint comes in: a hostile file is refused and never run."""

import pytest
import torch

pytest.importorskip("mmengine")

from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader, load_checkpoint

from tests.mm.helpers import Bomb
from wbmm.mm.loading import use_safe_reader
from wbmm.mm.mm_checkpoint import read_mm_checkpoint
from wbmm.models.state import CheckpointError


@pytest.fixture(autouse=True)
def _doors():
    before = dict(CheckpointLoader._schemes)
    use_safe_reader()
    yield
    CheckpointLoader._schemes = before


@pytest.fixture
def evil(tmp_path):
    torch.save({"state_dict": {"weight": torch.zeros(1)}, "x": Bomb(tmp_path / "pwned")}, tmp_path / "evil.pth")
    yield tmp_path / "evil.pth"
    assert not (tmp_path / "pwned").exists()


def test_files(evil):
    for door in (
        lambda: read_mm_checkpoint(evil),
        lambda: load_checkpoint(torch.nn.Linear(1, 1), str(evil)),
        lambda: CheckpointLoader.load_checkpoint(str(evil)),
    ):
        with pytest.raises(CheckpointError, match=r"refused.*could run code"):
            door()


def test_downloads(evil, monkeypatch):
    asked = []
    monkeypatch.setattr("wbmm.mm.pretrained._download", lambda url: asked.append(url) or evil)
    for url in ("http://example.org/a.pth", "https://example.org/a.pth"):
        with pytest.raises(CheckpointError, match="refused"):
            CheckpointLoader.load_checkpoint(url)
        assert asked[-1] == url


@pytest.mark.parametrize(
    "scheme", ["torchvision", "modelzoo", "open-mmlab", "openmmlab", "mmcls", "s3", "petrel", "pavi"]
)
def test_other_places_are_not_read(scheme):
    with pytest.raises(CheckpointError, match=r"files and http\(s\) only"):
        CheckpointLoader.load_checkpoint(f"{scheme}://resnet50")


def test_a_configuration_that_resuming_would_run_is_left_out(tmp_path):
    torch.save({"meta": {"config": "import os; os.mkdir('x')", "iter": 3}, "state_dict": {}}, tmp_path / "a.pth")
    assert read_mm_checkpoint(tmp_path / "a.pth")["meta"] == {"iter": 3}


def test_a_runners_own_objects_are_read(tmp_path):
    contents = {
        "meta": {"iter": 3},
        "state_dict": {"weight": torch.zeros(1)},
        "message_hub": {"log_scalars": {"train/loss": HistoryBuffer([1.0, 2.0], [1, 1])}},
    }
    torch.save(contents, tmp_path / "a.pth")
    assert read_mm_checkpoint(tmp_path / "a.pth")["message_hub"]["log_scalars"]["train/loss"].mean() == 1.5
    assert CheckpointLoader.load_checkpoint(str(tmp_path / "a.pth"))["meta"] == {"iter": 3}


def test_not_a_checkpoint(tmp_path):
    torch.save([1, 2], tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match="holds a list, not a checkpoint"):
        read_mm_checkpoint(tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match="there is no such file"):
        CheckpointLoader.load_checkpoint(str(tmp_path / "b.pth"))


class Reach:
    """Asks for an attribute of a class that is allowed, as a way to everything else."""

    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        return getattr, (HistoryBuffer, self.name)


@pytest.mark.parametrize("name", ["__init__", "__globals__", "register_statistics", "__subclasses__"])
def test_the_stand_in_for_getattr_gives_statistics_only(tmp_path, name):
    torch.save({"state_dict": {}, "x": Reach(name)}, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match="refused"):
        read_mm_checkpoint(tmp_path / "a.pth")

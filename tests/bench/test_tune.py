"""`wbmm bench paths --tune`: the rules that choose, and the file that dispatch reads."""

import pytest
import torch

from wbmm import cli
from wbmm.bench import paths
from wbmm.machine import processor
from wbmm.ops import profile
from wbmm.ops.profile import NEVER, Thresholds


def test_the_fastest_over_all_shapes_is_chosen():
    taken = [{10: 4.0, 20: 1.0, 30: 2.0}, {10: 1.0, 20: 2.0, 30: 1.5}]
    assert paths.choose(taken, held=10) == 20


def test_a_gain_within_the_noise_changes_nothing():
    assert paths.choose([{10: 1.0, 20: 0.99}], held=10) == 10
    assert paths.choose([{10: 1.0, 20: 0.9}], held=10) == 20


@pytest.mark.parametrize(
    ("ratios", "found"),
    [
        ({3: [0.5], 5: [0.9, 0.8], 7: [1.2, 0.9], 10: [2.0]}, 7),
        ({3: [1.5], 5: [1.1]}, 1),
        ({3: [1.5], 5: [0.9], 7: [1.1]}, 7),
        ({3: [1.5], 5: [0.9]}, NEVER),
    ],
)
def test_where_a_path_starts(ratios, found):
    assert paths.start(ratios) == found


@pytest.fixture
def _small(monkeypatch):
    """Few small shapes, and a clock by which larger values are faster and a second path is."""
    for name, value in (
        ("SIDES", (3, 7)),
        ("COUNTS", (1,)),
        ("CHANNELS", 4),
        ("FEED_FORWARDS", ((1, 4, 3),)),
        ("TRAINED", ((1, 4, 8),)),
        ("SMALL", ((1, 4, 2), (2, 4, 7))),
    ):
        monkeypatch.setattr(paths, name, value)

    def run_once(calls, rounds):
        for call in calls.values():
            call()
        return {name: {"other": 2.0, "path": 1.0}.get(name) or 1 / name for name in calls}

    monkeypatch.setattr(paths, "_time", run_once)


@pytest.mark.usefixtures("_small")
def test_every_threshold_is_measured():
    found = paths.tune(torch.float32, 1, Thresholds())
    largest = {name: max(values) for name, (values, _) in paths.CHOICES.items()}
    assert found == Thresholds(least_side=1, ffn_training_rows=1, windowed_training_rows=1, **largest)


@pytest.mark.usefixtures("_small")
def test_the_file_is_one_that_dispatch_reads(tmp_path, capsys):
    path = tmp_path / "new" / "profile.json"
    assert cli.main(["bench", "paths", "--tune", str(path), "--rounds", "1"]) == 0
    found = profile.load(path)
    assert found.processor == processor()
    out = capsys.readouterr().out
    assert "least_side" in out
    assert str(path) in out
    assert cli.main(["bench", "paths", "--tune", str(path), "--rounds", "1"]) == 0, "replaced by a second run"


def test_another_file_is_not_replaced(tmp_path, capsys):
    path = tmp_path / "notes.json"
    path.write_text("mine")
    assert cli.main(["bench", "paths", "--tune", str(path)]) == 1
    assert "not JSON" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_real_times_are_positive():
    found = paths._time({"a": lambda: None, "b": lambda: None}, rounds=2)
    assert set(found) == {"a", "b"}
    assert min(found.values()) > 0

"""The range test for the learning rate."""

import pytest

from tests.data.helpers import config, folder
from wbmm import cli
from wbmm.train import lr_find
from wbmm.train.lr_find import RateSearch, draw_search, find_rate

__all__ = ["folder"]
TINY = {
    "model": {"name": "wbmm_a", "args": {"dims": [8, 8, 16, 16]}},
    "augment": {"auto": None},
    "log": {"tensorboard": False},
}


def test_rates_grow_until_the_loss_does(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(lr_find, "HIGHEST", 1e4)
    cfg = config(
        folder, **TINY, mix={"mixup": 0.0, "cutmix": 0.0}, out=str(tmp_path / "run"), optim={"lr": 1e-3, "lr_batch": 8}
    )
    found = find_rate(cfg, steps=40)
    assert found.rates == sorted(found.rates)
    assert found.rates[0] == lr_find.LOWEST
    assert 5 < len(found.rates) < 40  # it has not gone to the end
    assert found.losses[-1] > found.losses[0]
    assert found.per_batch == 2.0
    assert found.suggestion == pytest.approx(found.lowest / 10 * 2, rel=0.06)


def test_the_suggestion_is_a_tenth_of_the_rate_of_the_lowest_loss(tmp_path):
    search = RateSearch([10.0**-n for n in range(6, 0, -1)], [3.0, 3.0, 2.0, 0.0, 9.0, 9.0])
    assert search.lowest == pytest.approx(1e-3)
    assert search.suggestion == pytest.approx(1e-4)
    assert draw_search(search, tmp_path / "lr.png", 1e-3).read_bytes().startswith(b"\x89PNG")


def test_the_command_suggests_and_changes_nothing(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lr_find, "STEPS", 3)
    monkeypatch.setattr(find_rate, "__defaults__", (3,))
    out = tmp_path / "run"
    options = ["--model", "wbmm_a", "--init", "scratch", "--size", "32", f"out={out}", "data.workers=0"]
    assert cli.main(["train", "--data", str(folder), *options, "model.args.dims=[8,8,16,16]", "--lr-find"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("suggested learning rate: optim.lr=")
    assert "the configuration has 0.0005" in line
    assert (out / "lr_find.png").is_file()
    assert not (out / "last.pt").exists()

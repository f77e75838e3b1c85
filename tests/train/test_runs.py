"""summary.md, curves.png and `wbmm runs`."""

import argparse
import json

import pytest
import yaml
from PIL import Image

from wbmm.train import log as log_module
from wbmm.train.config import config_from_dict, to_yaml
from wbmm.train.guard import write_marker
from wbmm.train.log import RunLogger
from wbmm.train.runs import RunFacts, add_arguments, find_runs, run, write_summary


def make_run(folder, top1=(80.0, 97.5, 97.0), status="finished", **changes):
    cfg = config_from_dict(
        {"log": {"tensorboard": False}, "schedule": {"epochs": 3, "warmup_epochs": 1}, "model": {"name": "wbmm_a"}}
        | changes
    )
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(cfg))
    logger = RunLogger(cfg, folder)
    for epoch, value in enumerate(top1, start=1):
        for i in range(5):
            step = 5 * (epoch - 1) + i + 1
            logger.train(step, step / 5, 2 / step, 1e-3, 100.0 if step > 1 else 10.0, 0.03, 50.0 + step, 10.0)
        logger.eval(5 * epoch, epoch, {"loss": 1 / epoch, "top1": value, "top5": 99.0})
    logger.close(status)
    return folder


def test_summary_holds_the_figures(tmp_path):
    path = write_summary(make_run(tmp_path / "first"))
    text = path.read_text()
    for part in (
        "| model | wbmm_a |",
        "| status | finished |",
        "| best top-1 | 97.50 % (epoch 2) |",
        "| final top-1 | 97.00 % |",
        "| training speed, median | 100 images/s |",
        "| waiting for data | 3.0 % of the training time |",
        "| memory, highest | 65 MB |",
        "| 3 | 15 | 0.3333 | 97 | 99 |",
    ):
        assert part in text
    with Image.open(tmp_path / "first" / "curves.png") as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 10  # something is drawn


def test_summary_of_a_run_that_stopped_before_its_first_evaluation(tmp_path):
    folder = make_run(tmp_path / "short", top1=(), status="failed")
    text = write_summary(folder).read_text()
    assert "| status | failed |" in text
    assert "top-1" not in text


def test_summary_of_a_run_that_a_signal_stopped(tmp_path):
    folder = make_run(tmp_path / "stopped", top1=(50.0,), status="stopped")
    assert "| status | stopped |" in write_summary(folder).read_text()
    write_marker(folder, signal="SIGINT", step=7, total_steps=15)
    assert "| status | stopped at step 7 of 15 |" in write_summary(folder).read_text()
    assert (folder / "curves.png").is_file()


def test_a_loss_that_is_not_finite_does_not_break_the_picture(tmp_path):
    folder = make_run(tmp_path / "nan", top1=(50.0,))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**RunFacts(folder).train[-1], "step": 6, "loss": float("nan")}) + "\n")
    assert "nan" in write_summary(folder).read_text()


def test_data_wait_is_weighted_by_time(tmp_path):
    folder = make_run(tmp_path / "one", top1=())
    records = [
        {"kind": "train", "step": 10, "epoch": 1, "images_per_s": 100.0, "data_wait": 0.1},
        {"kind": "train", "step": 20, "epoch": 2, "images_per_s": 25.0, "data_wait": 0.6},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert RunFacts(folder).data_wait() == pytest.approx((0.1 * 1 + 0.6 * 4) / 5)


def test_in_files_of_older_versions_a_long_gap_is_a_pause(tmp_path):
    folder = make_run(tmp_path / "one", top1=())
    records = [
        {"kind": "eval", "step": i, "epoch": i, "top1": 1.0, "time": t} for i, t in enumerate((0, 50, 9050, 9080))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert RunFacts(folder).seconds == 80


class FakeTime:
    def __init__(self):
        self.now = 1e9

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(log_module, "time", fake)
    return fake


def sit(folder, clock, steps, gap, **resumed):
    """A sitting that logs each step after `gap` seconds and is killed."""
    logger = RunLogger(config_from_dict({"log": {"tensorboard": False}}), folder, **resumed)
    for step in steps:
        clock.now += gap
        logger.eval(step, step, {"top1": 1.0})
    return logger


def test_slow_steps_count_and_the_time_between_sittings_does_not(tmp_path, clock):
    sit(tmp_path, clock, (1, 2, 3), gap=1200)
    clock.now += 90_000
    sit(tmp_path, clock, (3, 4), gap=1200, resumed_step=2)
    assert RunFacts(tmp_path).seconds == 4 * 1200, "step 3 of the first sitting is lost, and its time"
    clock.now += 90_000
    logger = sit(tmp_path, clock, (), gap=0, resumed_step=4, resumed_seconds=5000.0)
    clock.now += 700
    assert logger.seconds == 5700, "what the checkpoint says is more exact than the last record before it"
    assert "| time, pauses left out | 1:20:00 |" in write_summary(tmp_path).read_text()


def test_a_run_of_an_older_version_goes_on_from_its_guessed_time(tmp_path, clock):
    records = [{"kind": "eval", "step": i, "epoch": i, "top1": 1.0, "time": t} for i, t in enumerate((0, 50, 9050))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    sit(tmp_path, clock, (3, 4), gap=1200, resumed_step=2)
    assert RunFacts(tmp_path).seconds == 50 + 2400


def command(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(argument) for argument in arguments]))


def test_runs_shows_what_differs_and_sorts(tmp_path, capsys):
    make_run(tmp_path / "a", seed=0)
    make_run(tmp_path / "deep" / "b", top1=(99.0,), seed=1, status="stopped")
    assert command(tmp_path, "--sort", "top1") == 0
    head, _, first, second = capsys.readouterr().out.splitlines()
    assert " ".join(head.split()) == "run status epoch best top1 final top1 loss images/s wait time seed"
    assert first.split()[:4] == ["deep/b", "stopped", "1/3", "99.00"]
    assert second.split()[:5] == ["a", "finished", "3/3", "97.50", "97.00"]
    assert (first.split()[-1], second.split()[-1]) == ("1", "0")
    assert command(tmp_path, "--markdown") == 0
    assert capsys.readouterr().out.startswith("| run | status |")


def test_on_a_terminal_runs_shows_the_first_settings_that_differ(tmp_path, capsys):
    make_run(tmp_path / "a", seed=0)
    make_run(tmp_path / "b", seed=1)
    config = yaml.safe_load((tmp_path / "b/config.yaml").read_text())
    (tmp_path / "b/config.yaml").write_text(yaml.safe_dump(config | dict.fromkeys("wxyz", 1)))
    command(tmp_path)
    out = capsys.readouterr().out
    assert out.splitlines()[0].split()[-4:] == ["seed", "w", "x", "y"]
    assert out.endswith("They differ in z too: --markdown shows it.\n")
    command(tmp_path, "--markdown")
    assert " z |" in capsys.readouterr().out.splitlines()[0]


def test_runs_without_runs_says_so(tmp_path):
    with pytest.raises(ValueError, match="no run below"):
        command(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        find_runs(tmp_path / "nowhere")

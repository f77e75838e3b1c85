"""metrics.jsonl, console, TensorBoard, wandb: each step once, on one rank, through interruptions."""

import io
import json
import sys

import pytest

from wbmm.train import console as console_module
from wbmm.train.config import config_from_dict
from wbmm.train.console import BarConsole, duration, make_console
from wbmm.train.log import RunLogger
from wbmm.train.metrics import read_metrics


def config(**log):
    return config_from_dict({"log": {"tensorboard": False, **log}, "schedule": {"epochs": 4, "warmup_epochs": 1}})


def log_steps(logger, steps):
    for step in steps:
        logger.train(step, step / 10, 2.0 / step, 1e-3, 123.0, 0.02, 456.0, 3725.0)
        if step % 4 == 0:
            logger.eval(step, step / 10, {"top1": 50.0 + step, "loss": 1.0})


def test_a_resumed_run_has_each_step_once(tmp_path):
    log_steps(RunLogger(config(), tmp_path), range(1, 8))  # killed: never closed
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # in the middle of a line
    logger = RunLogger(config(), tmp_path, resumed_step=5)
    log_steps(logger, range(6, 11))
    logger.close("finished")
    records = read_metrics(tmp_path)
    assert [record["step"] for record in records if record["kind"] == "train"] == list(range(1, 11))
    assert [record["step"] for record in records if record["kind"] == "eval"] == [4, 8]
    assert records[0]["loss"] == 2.0
    assert json.loads((tmp_path / "status.json").read_text()) == {"status": "finished", "step": 10}


def test_resuming_at_the_start_drops_everything(tmp_path):
    log_steps(RunLogger(config(), tmp_path), range(1, 4))
    RunLogger(config(), tmp_path, resumed_step=0)
    assert read_metrics(tmp_path) == []


def test_a_new_run_keeps_the_old_metrics_aside(tmp_path):
    log_steps(RunLogger(config(), tmp_path), [1, 2])
    RunLogger(config(), tmp_path)
    assert read_metrics(tmp_path) == []
    assert len((tmp_path / "metrics.old.jsonl").read_text().splitlines()) == 2


def test_other_ranks_write_nothing(tmp_path, capsys):
    logger = RunLogger(config(), tmp_path, main=False)
    log_steps(logger, range(1, 5))
    logger.message("hello")
    logger.close("finished")
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_plain_lines_hold_every_figure(tmp_path, capsys):
    logger = RunLogger(config(), tmp_path)
    log_steps(logger, [4])
    logger.message("saved")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == ("epoch 0.40/4  step 4  loss 0.5000  lr 1.00e-03  123 images/s  wait 2.0%  456 MB  ETA 1:02:05")
    assert lines[1] == "epoch 0.4  step 4  eval  top1 54.00  loss 1.0000"
    assert lines[2] == "saved"


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    stream = _Terminal()
    console = make_console(4, stream)
    assert isinstance(console, BarConsole)
    record = {"step": 4, "epoch": 2.0, "loss": 0.5, "lr": 1e-3, "images_per_s": 99.0}
    console.train({**record, "data_wait": 0.01, "memory_mb": 10.0, "eta_s": 5.0})
    console.eval({"step": 4, "epoch": 2.0, "top1": 91.0}, ["top1"])
    console.close()
    text = stream.getvalue()
    for part in ("epoch 2.00/4", "50%", "loss 0.5000", "99 images/s", "wait 1.0%", "ETA 0:00:05", "top1 91.00"):
        assert part in text


def test_durations():
    assert [duration(s) for s in (5, 61, 3600, 90061)] == ["0:00:05", "0:01:01", "1:00:00", "1d 01:01:01"]


def test_missing_packages_name_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[wandb\]'"):
        RunLogger(config(wandb=True), tmp_path)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[train\]'"):
        RunLogger(config(tensorboard=True), tmp_path)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[train\]'"):
        console_module.BarConsole(1, _Terminal())


def test_tensorboard_has_the_figures_and_hides_undone_steps(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = RunLogger(config(tensorboard=True), tmp_path)
    log_steps(logger, range(1, 9))
    logger.trackers[0].writer.flush()
    logger = RunLogger(config(tensorboard=True), tmp_path, resumed_step=5)
    log_steps(logger, [6])
    logger.close("finished")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.value for event in events.Scalars("eval/top1")] == [54.0]


@pytest.mark.timeout(120)
def test_wandb_offline_and_resuming_keep_one_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for resumed in (None, 2):
        logger = RunLogger(config(wandb=True), tmp_path, resumed_step=resumed)
        log_steps(logger, [1, 2] if resumed is None else [3, 4])
        ids.append(logger.trackers[0].run.id)
        logger.close("stopped" if resumed is None else "finished")
    assert ids[0] == ids[1] == (tmp_path / "wandb-id.txt").read_text().strip()
    runs = list((tmp_path / "wandb").glob(f"offline-run-*-{ids[0]}"))
    assert runs
    assert all(list(folder.glob("*.wandb")) for folder in runs)

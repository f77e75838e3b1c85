"""metrics.jsonl, console, TensorBoard, wandb: each step once, on one rank, through interruptions."""

import json
import struct
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from wbmm.train.config import config_from_dict
from wbmm.train.log import RunLogger, read_metrics


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


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("tensorboard", [False, True])
def test_a_full_disk_is_one_line_and_keeps_what_was_logged(tmp_path, capsys, small_disk, tensorboard):
    if tensorboard:
        pytest.importorskip("tensorboard")
    logger = RunLogger(config(tensorboard=tensorboard), tmp_path)
    with small_disk(20_000):
        with pytest.raises(ValueError, match=rf"^cannot write {tmp_path}/\S+: File too large \(.*resume=auto$"):
            log_steps(logger, range(1, 1000))
        with suppress(ValueError):
            logger.close("failed")
    assert "Traceback" not in capsys.readouterr().err
    assert len(read_metrics(tmp_path)) > 10
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "failed"


def test_missing_packages_name_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'wbmm\[wandb\]'"):
        RunLogger(config(wandb=True), tmp_path)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'wbmm\[train\]'"):
        RunLogger(config(tensorboard=True), tmp_path)


HIDDEN = ("tensorboard", "matplotlib", "rich", "sklearn", "wandb", "datasets")
WITHOUT = """
import sys
for name in {hidden!r}:
    sys.modules[name] = None
from wbmm.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


def test_a_run_without_the_optional_packages_says_once_what_it_left_out(make_config):
    config = make_config(schedule={"epochs": 1, "warmup_epochs": 0}, log={"tensorboard": None})
    command = [sys.executable, "-c", WITHOUT.format(hidden=HIDDEN), config]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    out = config.parent / "out"
    told = [line for line in done.stderr.splitlines() if "pip install" in line]
    assert told == [
        "left out, as not installed: train_batch.png, curves.png (matplotlib), event files (tensorboard); "
        "pip install 'wbmm[train]' brings them"
    ]
    assert json.loads((out / "status.json").read_text())["status"] == "finished"
    assert "No curves: " in (out / "summary.md").read_text()
    assert not (out / "tensorboard").exists()
    assert not (out / "curves.png").exists()
    asked = subprocess.run(
        [*command, "resume=auto", "log.wandb=true"], capture_output=True, text=True, timeout=200, check=False
    )
    assert asked.returncode == 1
    told = asked.stderr.splitlines()[-1]
    assert told == "wbmm train: log.wandb=true needs the package wandb: pip install 'wbmm[wandb]'"


def test_a_run_with_the_optional_packages_leaves_nothing_out(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    pytest.importorskip("matplotlib")
    RunLogger(config(tensorboard=None), tmp_path).close("finished")
    assert capsys.readouterr().err == ""
    assert list((tmp_path / "tensorboard").iterdir())


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


def read_wandb(path) -> tuple[str, list[dict]]:
    """The id and the logged values of an offline run: LevelDB's log format around protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, message, run_id, rows = path.read_bytes(), 7, b"", None, []
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:  # a header does not fit the rest of a block, which is padding
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        message += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind not in (1, 4):  # neither whole nor the last part
            continue
        record, message = Record.FromString(message), b""
        if record.WhichOneof("record_type") == "run":
            run_id = record.run.run_id
        elif record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    return run_id, rows


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
        time.sleep(1.1)  # wandb names the folder of a sitting by the second
    assert ids[0] == ids[1] == (tmp_path / "wandb-id.txt").read_text().strip()
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*-{ids[0]}/*.wandb"))
    sittings = [read_wandb(file) for file in files]
    assert {run_id for run_id, _ in sittings} == {ids[0]}
    rows = [row for _, rows in sittings for row in rows]
    got = [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows]
    expected = []
    for record in read_metrics(tmp_path):
        figures = {name: value for name, value in record.items() if name not in ("epoch", "seconds", "time")}
        kind, step = figures.pop("kind"), figures.pop("step")
        expected.append({f"{kind}/{name}": value for name, value in figures.items()} | {"step": step})
    assert [row["step"] for row in expected] == [1, 2, 3, 4, 4], "the last one is an evaluation"
    assert got == expected

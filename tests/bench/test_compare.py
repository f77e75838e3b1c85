"""tools/compare.py on a tiny budget: the page, and that finished runs are not run again."""

import shutil
from pathlib import Path

from wbmm.bench.compare import Contender, main, parse_entry
from wbmm.train.log import read_metrics

CONFIG = Path(__file__).parents[2] / "configs" / "digits.yaml"
SMALL = [
    "data.size=32",
    "data.args={train_limit: 40, val_limit: 20}",
    "global_batch=20",
    "batch=20",
    "schedule.epochs=1",
    "schedule.warmup_epochs=0",
    "log.tensorboard=false",
]


def command(tmp_path, *changes):
    page = tmp_path / "page.md"
    options = arguments(tmp_path / "runs", "0", "1")
    return main([*options, "--results", str(page), "--rounds", "2", "--set", *SMALL, *changes]), page


def arguments(out, *seeds):
    models = ["test_convnext", "test_convnext2"]
    return [str(CONFIG), "--models", *models, "--seeds", *seeds, "--out", str(out)]


def test_compare_writes_a_page_and_does_not_repeat_finished_runs(tmp_path):
    code, page = command(tmp_path)
    assert code == 0
    text = page.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| test_")]
    assert [row.split(" | ")[0] for row in rows] == ["| test_convnext", "| test_convnext2"]
    assert "1.00x" in rows[1], "the speed of training steps, relative to the last"
    assert "in one run of 2 rounds" in text
    assert "--models test_convnext test_convnext2 --seeds 0 1 --set data.size=32" in text
    folders = sorted((tmp_path / "runs").iterdir())
    assert len(folders) == 4
    before = [(folder / "metrics.jsonl").stat().st_mtime_ns for folder in folders]
    finals = [read_metrics(folder)[-1]["top1"] for folder in folders]
    assert f"{(finals[0] + finals[1]) / 2:.2f}" in rows[0]
    assert command(tmp_path)[0] == 0
    assert [(folder / "metrics.jsonl").stat().st_mtime_ns for folder in folders] == before


def test_a_run_of_another_recipe_is_not_taken_for_this_one(tmp_path, capsys):
    assert command(tmp_path)[0] == 0
    assert command(tmp_path, "optim.lr=1e-3")[0] == 1
    assert "holds a run of another recipe" in capsys.readouterr().err


def test_records_of_finished_runs_stand_for_them(tmp_path, capsys):
    kept = tmp_path / "kept"
    assert main([*arguments(tmp_path / "runs", "0"), "--records", str(kept), "--rounds", "0", "--set", *SMALL]) == 0
    assert sorted(path.name for path in kept.rglob("*") if path.is_file()) == sorted(
        2 * ["config.yaml", "metrics.jsonl", "status.json"]
    )
    assert "out:" not in (kept / "test_convnext-seed0" / "config.yaml").read_text()
    shutil.rmtree(tmp_path / "runs")
    assert "images/s" not in capsys.readouterr().out
    elsewhere = [*arguments(tmp_path / "other", "0", "1"), "--records", str(kept), "--finished", "--rounds", "1"]
    elsewhere += ["--set", *SMALL]
    assert main(elsewhere) == 0, "nothing is trained"
    assert not (tmp_path / "other" / "test_convnext-seed0").exists()
    out = capsys.readouterr().out
    assert f"{read_metrics(kept / 'test_convnext-seed0')[-1]['top1']:.2f}" in out
    assert "| 1.00x |" in out, "speed needs no runs"
    assert main([*arguments(tmp_path / "runs", "0"), "--rounds", "-1"]) == 1
    assert "--rounds -1: expected 0, for no speed, or more" in capsys.readouterr().err
    assert main([*elsewhere, "optim.lr=1e-3"]) == 1
    assert "holds a run of another recipe" in capsys.readouterr().err
    file = kept / "test_convnext-seed0" / "config.yaml"
    assert main([*arguments(tmp_path / "third", "0"), "--records", str(file), "--set", *SMALL]) == 1
    assert f"--records {file}: expected a folder, not a file" in capsys.readouterr().err
    assert not (tmp_path / "third").exists(), "said before anything is trained"
    empty = [*arguments(tmp_path / "other", "0"), "--records", str(tmp_path / "none"), "--finished", "--set", *SMALL]
    assert main(empty) == 1
    assert "no run of this recipe is finished" in capsys.readouterr().err


def test_a_net_of_ours_may_have_another_operator():
    assert parse_entry("wbmm_a:dw7") == Contender("wbmm_a-dw7", "wbmm_a", {"mixer": "dw7"})
    assert parse_entry("convnext_atto") == Contender("convnext_atto", "convnext_atto")

"""tools/compare.py on a tiny budget: the page, and that finished runs are not run again."""

from pathlib import Path

from wbmm.bench.compare import Entry, main, parse_entry
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
    models = ["test_convnext", "test_convnext2"]
    page = tmp_path / "page.md"
    arguments = [str(CONFIG), "--models", *models, "--seeds", "0", "1", "--out", str(tmp_path / "runs")]
    return main([*arguments, "--results", str(page), "--set", *SMALL, *changes]), page


def test_compare_writes_a_page_and_does_not_repeat_finished_runs(tmp_path):
    code, page = command(tmp_path)
    assert code == 0
    text = page.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| test_")]
    assert [row.split(" | ")[0] for row in rows] == ["| test_convnext", "| test_convnext2"]
    assert "1.00x" in rows[1]
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


def test_a_net_of_ours_may_have_another_operator():
    assert parse_entry("wbmm_a:dw7") == Entry("wbmm_a-dw7", "wbmm_a", {"mixer": "dw7"})
    assert parse_entry("convnext_atto") == Entry("convnext_atto", "convnext_atto")

"""`wbmm table` from end to end, on a table of narrow nets."""

import csv
from pathlib import Path

import pytest
import torch
import yaml

from wbmm import cli, paper_tables, progress
from wbmm.bench.setting import Setting, TrainingStep
from wbmm.ops import use_backend
from wbmm.ops.backends.onednn.linear import takes_onednn
from wbmm.paper_tables import read_tables
from wbmm.tables import measure
from wbmm.timing import Timing

ROOT = Path(__file__).parents[2]
NARROW = {"dims": [8, 16, 32, 64]}
TABLE = {
    "label": "tab:toy",
    "title": "A toy",
    "note": "Nothing is claimed.",
    "model": "wbmm_a",
    "args": NARROW,
    "size": 32,
    "small": {"model": "wbmm_a", "args": {"pattern": ["D", "W", "WD", "W"], "depths": [1, 1, 2, 1]}},
    "rows": {
        "wbmm": {
            "label": "WBMM",
            "paper": {"params": 0.1, "time": "2:00", "top1": 1.5, "top1_pm": 0.1, "speed": 200.0},
        },
        "dw5-lka": {"label": "5x5 + LKA", "args": {"mixer": "dw5"}, "large_kernel": True, "paper": {"time": "2:30"}},
        "dw5": {"label": "5x5", "args": {"mixer": "dw5"}, "paper": {"time": "3:00", "speed": 100.0}},
    },
}
TRAIN = [
    *("--train", str(ROOT / "configs" / "digits.yaml"), "--epochs", "1", "--seeds", "2", "--set"),
    *("data.size=32", "data.args={train_limit: 40, val_limit: 20}", "global_batch=20", "batch=20"),
    *("schedule.warmup_epochs=0", "log.tensorboard=false"),
]
SPEED = ["--batch", "1", "2", "--train-batch", "2", "--rounds", "1"]


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    """The toy in the place of the paper's tables, in an empty folder."""
    path = tmp_path / "tables.yaml"
    path.write_text(yaml.safe_dump({"tables": {"toy": TABLE, "other": TABLE}}, sort_keys=False))
    monkeypatch.setattr(paper_tables, "load_tables", lambda: read_tables(path))
    monkeypatch.chdir(tmp_path)


def table(*arguments: str) -> int:
    return cli.main(["table", *arguments])


def sheet(path: Path) -> dict[str, dict]:
    with path.open(newline="") as file:
        return {row["row"]: row for row in csv.DictReader(file)}


def test_counts_times_and_trains(capsys, monkeypatch):
    monkeypatch.setattr(progress, "INTERVAL_S", 0.0)
    assert table("toy", *SPEED, *TRAIN) == 0
    captured = capsys.readouterr()
    text = Path("runs/table-toy/toy.md").read_text()
    assert captured.out.strip() == text.strip()
    assert "training, batch 2, rounds: 1 of 2" in captured.err
    assert "cpu, float32 weights, precision tf32 (without effect on a CPU), eager, layout channels_last," in text
    assert text.startswith("# wbmm table toy\n")
    assert "wbmm table toy --batch 1 2 --train-batch 2 --rounds 1 --train" in text
    assert "| 1.5 ± 0.1 |" in text
    found = sheet(Path("runs/table-toy/toy.csv"))
    assert list(found) == ["wbmm", "dw5-lka", "dw5"]
    assert float(found["wbmm"]["params_m"]) > float(found["wbmm"]["params_m_fused"]) > 0
    assert float(found["dw5"]["training_ratio_paper"]) == pytest.approx(120 / 180, abs=1e-4)
    assert float(found["dw5"]["inference_ratio_paper"]) == 0.5
    measured = ["training_ratio", "training_images_per_s", "inference_b1_ratio", "inference_b2_images_per_s"]
    assert [float(found["wbmm"][key]) == 1 for key in measured if key.endswith("ratio")] == [True, True]
    assert all(float(found["dw5"][key]) > 0 for key in [*measured, "small_params_m"])
    setting = ["device", "dtype", "autocast", "precision", "training_layout", "inference_b1_layout"]
    assert [found["dw5"][key] for key in setting] == ["cpu", "float32", "False", "tf32", *["channels_last"] * 2]
    lka = found["dw5-lka"]
    assert not any(lka[key] for key in [*measured, "small_top1_mean"]), "there is no CUDA package here"
    assert lka["params_m"] == found["dw5"]["params_m"]
    top1 = [float(value) for value in found["dw5"]["small_top1_seeds"].split()]
    assert float(found["dw5"]["small_top1_mean"]) == pytest.approx(sum(top1) / 2, abs=0.01)
    assert float(found["dw5"]["small_top1_spread"]) == pytest.approx(max(top1) - min(top1), abs=0.01)

    assert "one recipe for all (`" in text
    assert "digits.yaml`): 32 px, 1 epochs, 2 steps of 20 images" in text

    folders = sorted(Path("runs/ablations/digits/toy").iterdir())
    assert [folder.name for folder in folders] == ["dw5-seed0", "dw5-seed1", "wbmm-seed0", "wbmm-seed1"]
    model = yaml.safe_load((folders[0] / "config.yaml").read_text())["model"]
    assert model["args"] == {"ls_init_value": 0.1, **NARROW, **TABLE["small"]["args"], "mixer": "dw5"}
    before = [(folder / "metrics.jsonl").stat().st_mtime_ns for folder in folders]
    assert table("toy", "--no-speed", *TRAIN) == 1
    assert "has more than this command measures (of wbmm, dw5, ...): choose another" in capsys.readouterr().err
    assert table("toy", "--rows", "wbmm", *SPEED, *TRAIN) == 1, "nor are rows lost"
    assert table("toy", "--no-speed", *TRAIN, "--out", "small") == 0
    assert [(folder / "metrics.jsonl").stat().st_mtime_ns for folder in folders] == before
    again = sheet(Path("small/toy.csv"))
    assert again["dw5"]["small_top1_seeds"] == found["dw5"]["small_top1_seeds"]
    assert "## Speed" not in Path("small/toy.md").read_text()
    assert table("toy", "--no-speed", "--out", "small", *TRAIN, "optim.lr=1e-3") == 1
    assert "holds a run of another recipe" in capsys.readouterr().err


def test_speed_again_and_accuracy_kept_with_its_date(monkeypatch, capsys):
    assert table("toy", "--keep-trained", "--out", "pages") == 1
    assert "has no small-scale accuracy to keep" in capsys.readouterr().err
    assert table("toy", "--rows", "wbmm", "--no-speed", *TRAIN, "--runs", "somewhere", "--out", "pages") == 0
    page = Path("pages/toy.md")
    assert "somewhere" not in page.read_text(), "where the runs are changes no figure"
    page.write_text(page.read_text().replace("Measured: ", "Measured: long ago, "))
    before = sheet(Path("pages/toy.csv"))["wbmm"]
    monkeypatch.setattr(Setting, "time", lambda self, calls, *_, **__: dict.fromkeys(calls, Timing((1.0,))))
    again = ["toy", "--rows", "wbmm", "--batch", "1", "--train-batch", "2", "--keep-trained", "--out", "pages"]
    for _ in range(2):  # kept once more, it is the same section
        assert table(*again) == 0
        text, after = page.read_text(), sheet(Path("pages/toy.csv"))["wbmm"]
        assert text.count("These accuracies are of an earlier run than the speed above. Measured: long ago, ") == 1
        assert text.count("long ago") == 1, "the speed has a date of its own"
        assert "wbmm table toy --rows wbmm --no-speed --train" in text
        assert text.index("## Speed") < text.index("## Small-scale accuracy")
        assert after["small_top1_seeds"] == before["small_top1_seeds"]
        assert float(after["training_images_per_s"]) == 2


def test_each_row_in_its_best_layout(monkeypatch):
    """WBMM is made the faster in one format, the convolution in the other."""
    seconds = {("wbmm", "nchw"): 2.0, ("wbmm", "channels_last"): 1.0, ("dw5", "nchw"): 3.0, ("dw5", "channels_last"): 4}
    monkeypatch.setattr(Setting, "time", lambda self, calls, *_, **__: {k: Timing((seconds[k],)) for k in calls})
    assert table("toy", "--rows", "dw5", "--batch", "1", "--train-batch", "2", "--layout", "best", "--out", "best") == 0
    found = sheet(Path("best/toy.csv"))
    assert [found[row]["training_layout"] for row in ("wbmm", "dw5")] == ["channels_last", "nchw"]
    assert [float(found[row]["training_images_per_s"]) for row in ("wbmm", "dw5")] == pytest.approx(
        [2, 2 / 3], abs=1e-4
    )
    assert float(found["dw5"]["inference_b1_ratio"]) == pytest.approx(1 / 3, abs=1e-4)
    text = Path("best/toy.md").read_text()
    assert "layout best (each row in the faster of nchw and channels_last)" in text
    assert "| training layout |" in text
    assert "--layout best" in text


def test_models_and_images_are_in_the_layout(monkeypatch):
    seen = []

    def time(self, calls, *_, **__):
        for (_, layout), call in calls.items():
            model, images = (call.model, call.images) if isinstance(call, TrainingStep) else call.args
            channels_last = [
                tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (images, model.stem.conv2.weight)
            ]
            seen.append((layout, *channels_last))
        return dict.fromkeys(calls, Timing((1.0,)))

    monkeypatch.setattr(Setting, "time", time)
    assert table("toy", "--rows", "wbmm", "--batch", "1", "--train-batch", "2", "--layout", "best") == 0
    assert seen == [("nchw", False, False), ("channels_last", True, True)] * 2


@pytest.mark.parametrize(("backend", "dtype"), [("onednn", "float32"), ("reference", "bfloat16")])
def test_who_computes_windows_is_said(backend, dtype, monkeypatch):
    monkeypatch.setattr(Setting, "time", lambda self, calls, *_, **__: dict.fromkeys(calls, Timing((1.0,))))
    command = ["toy", "--rows", "wbmm", "--batch", "1", "--train-batch", "2", "--dtype", dtype]
    with use_backend(None if backend == "onednn" else backend):
        assert table(*command) == 0
    text = Path("runs/table-toy/toy.md").read_text()
    assert f"Windows are computed by {backend} in inference and by {backend} in training" in text
    assert ("as depthwise convolutions" in text) == (backend == "onednn" and takes_onednn(torch.zeros(1)))
    assert f"{dtype} weights" in text


def test_a_device_that_is_not_there(capsys):
    assert table("toy", "--device", "cuda:9") == 1
    assert "--device cuda:9 cannot be used here" in capsys.readouterr().err


def test_some_rows_and_their_baseline(capsys):
    assert table("toy", "--rows", "dw5", "--no-speed", "--out", "pages") == 0
    assert list(sheet(Path("pages/toy.csv"))) == ["wbmm", "dw5"]
    text = Path("pages/toy.md").read_text()
    assert "wbmm table toy --rows dw5 --no-speed --out pages" in text
    assert "Small-scale" not in text


def test_an_interrupted_training_writes_no_page(monkeypatch, capsys):
    monkeypatch.setattr(measure, "compare", lambda *args: None)
    assert table("toy", *TRAIN) == 1
    assert "the same command continues" in capsys.readouterr().err
    assert not Path("runs/table-toy").exists()


def test_other_files_are_not_overwritten(capsys):
    pages = Path("pages")
    assert table("other", "--no-speed", "--out", "pages") == 0
    (pages / "other.md").rename(pages / "toy.md")
    assert table("toy", "--no-speed", "--out", "pages") == 1
    assert "is not a page of `wbmm table toy`" in capsys.readouterr().err
    (pages / "toy.md").unlink()
    (pages / "other.csv").rename(pages / "toy.csv")
    assert table("toy", "--no-speed", "--out", "pages") == 1
    assert "does not hold `wbmm table toy`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tables"], "no table 'tables'; expected one of toy, other"),
        (["toy", "--rows", "dw7"], "table 'toy' has no row 'dw7'; its rows: wbmm, dw5-lka, dw5"),
        (["toy", "--train", "fashion_mnist", "--seeds", "0"], "--seeds 0: expected 1 or more"),
        (["toy", "--batch", "4", "0"], "--batch [4, 0]: expected 1 or more"),
        (["toy", "--seeds", "2"], "--seeds is for training: say --train RECIPE as well"),
        (["toy", "--train", "cifar"], "no recipe 'cifar'"),
        (["toy", "--keep-trained"], "--keep-trained takes the accuracy from the page in --out"),
    ],
)
def test_bad_input(arguments, message, capsys):
    assert table(*arguments) == 1
    assert message in capsys.readouterr().err


def test_one_seed_has_no_spread():
    arguments = [*TRAIN[:5], "1", *TRAIN[6:]]
    assert table("toy", "--rows", "wbmm", "--no-speed", *arguments) == 0
    (row,) = sheet(Path("runs/table-toy/toy.csv")).values()
    assert row["small_top1_mean"]
    assert row["small_top1_spread"] == ""

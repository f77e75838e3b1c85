"""The page of segmentors and detectors: figures from the runs' files, between the marks, and nothing else changed."""

import json

import pytest
import torch
from PIL import Image

pytest.importorskip("mmseg")

from wbmm.bench import dense_page
from wbmm.bench.dense_page import BEGIN, END, main, put_between

FACTS = {"device": "cpu", "machine": "a CPU", "threads": "1", "torch": "2.12.1", "date": "2026-11-18"}
PAGE = f"# CamVid\n\nBefore.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n"


@pytest.fixture
def run(tmp_path):
    """A segmentor's work folder, with what a finished run leaves there."""
    folder = tmp_path / "runs" / "camvid" / "dense"
    scalars = folder / "20261118" / "vis_data" / "scalars.json"
    scalars.parent.mkdir(parents=True)
    lines = [
        {"iter": 50, "time": 1.2, "loss": 2.0},
        {"iter": 100, "time": 2.4, "loss": 1.0},
        {"mIoU": 9.0, "step": 100},
    ]
    scalars.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = folder / "wbmm-a-dense_upernet_1xb8-100_camvid-64x64.py"
    config.write_text("model = dict(decode_head=dict())\ntrain_dataloader = dict(batch_size=8)\ninit = None\n")
    for step in (50, 100):
        torch.save(
            {"meta": {"iter": step, "seed": 3}, "state_dict": {"a": torch.zeros(1)}}, folder / f"iter_{step}.pth"
        )
    Image.new("RGB", (726, 600)).save(_made(folder / "test-checkpoint") / "test_mosaic.png")
    return folder


def _made(folder):
    folder.mkdir()
    return folder


def say(run, form, value):
    (run / f"test-{form}.json").write_text(json.dumps({"metrics": {"mIoU": value, "aAcc": 90.0}, "facts": FACTS}))


def test_figures_come_from_the_files_and_the_text_stays(run, tmp_path):
    for form, value in {"checkpoint": 41.234, "fused": 41.234, "multi-scale": 43.5, "onnx": 41.239}.items():
        say(run, form, value)
    page = tmp_path / "docs" / "results" / "camvid.md"
    page.parent.mkdir(parents=True)
    page.write_text(PAGE)
    assert main([str(page), str(run), "--no-tests"]) == 0
    text = page.read_text()
    assert text.startswith("# CamVid\n\nBefore.\n")
    assert text.endswith("After.\n")
    assert "old" not in text
    row = next(line for line in text.splitlines() if line.startswith("| wbmm-a-dense_upernet |"))
    assert [cell.strip() for cell in row.split("|")[2:-1]] == ["41.23", "41.23", "43.50", "41.24"]
    assert "fused 0.000, ONNX Runtime 0.005." in text
    assert "| wbmm-a-dense_upernet | scratch | 100 | 8 | 3 | 3 |" in text, "50 x 1.2 s + 50 x 2.4 s"
    assert "configs/camvid/wbmm-a-dense_upernet_1xb8-100_camvid-64x64.py --work-dir runs/camvid/dense" in text
    assert "![Annotated and predicted, by wbmm-a-dense_upernet](camvid/wbmm-a-dense_upernet.jpg)" in text
    with Image.open(page.with_suffix("") / "wbmm-a-dense_upernet.jpg") as picture:
        assert picture.width == dense_page.WIDTH


def test_runs_of_another_day_stay_on_the_page(run, tmp_path):
    say(run, "checkpoint", 41.0)
    page = tmp_path / "camvid.md"
    page.write_text(PAGE)
    assert main([str(page), str(run), "--no-tests"]) == 0
    first = page.read_text()
    other = run.with_name("convnext")
    run.rename(other)
    config = other / "wbmm-a-dense_upernet_1xb8-100_camvid-64x64.py"
    config.rename(config.with_name("convnext-atto_upernet_1xb8-100_camvid-64x64.py"))
    later = FACTS | {"date": "2026-11-19"}
    (other / "test-checkpoint.json").write_text(json.dumps({"metrics": {"mIoU": 39.0}, "facts": later}))
    assert main([str(page), str(other), "--no-tests"]) == 0
    text = page.read_text()
    rows = [line.split("|")[1:3] for line in text.splitlines() if "_upernet |" in line][:2]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["convnext-atto_upernet", "39.00"],
        ["wbmm-a-dense_upernet", "41.00"],
    ]
    assert "- wbmm-a-dense_upernet. Measured: 1 thread of a CPU, 2026-11-18" in text
    assert "- convnext-atto_upernet. Measured: 1 thread of a CPU, 2026-11-19" in text
    (page.with_suffix("") / "convnext-atto_upernet.json").unlink()
    assert main([str(page)]) == 0
    assert page.read_text() == first


def test_what_was_tested_before_is_not_tested_again(run, tmp_path, monkeypatch):
    called = []

    def call(module, *argv):
        called.append((module, argv))
        if module == "wbmm":
            (run / f"exported{argv[2][argv[2].rindex('.') :]}").touch()
        else:
            say(run, argv[argv.index("--json") + 1].rsplit("test-", 1)[1].removesuffix(".json"), 40.0)

    monkeypatch.setattr(dense_page, "_call", call)
    say(run, "checkpoint", 40.0)
    page = tmp_path / "camvid.md"
    assert main([str(page), str(run)]) == 0
    exports = [argv for module, argv in called if module == "wbmm"]
    assert [argv[1].endswith("iter_100.pth") for argv in exports] == [True, True], "the last checkpoint"
    assert len(called) == 2 + 4, "two exports; fused, multi-scale, ONNX, OpenVINO"
    called.clear()
    assert main([str(page), str(run)]) == 0
    assert not called


def test_pages_and_folders_that_do_not_fit(run, tmp_path, capsys):
    with pytest.raises(ValueError, match="has no lines"):
        put_between("# A page\n", "text")
    assert main([str(tmp_path / "page.md"), str(tmp_path), "--no-tests"]) == 1
    assert "holds no run" in capsys.readouterr().err
    assert main([str(tmp_path / "page.md"), str(run), "--no-tests"]) == 1
    assert "no run has been tested yet" in capsys.readouterr().err

"""What takes minutes: training a tiny Cascade Mask R-CNN across a kill to its AP, two processes, memory, export."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("mmdet")

from tests.mm.helpers import ROOT, logged, tool
from tests.mm.objects import write_config, write_objects
from wbmm import cli

pytestmark = pytest.mark.heavy

WIDTHS = [40, 80, 160, 320]  # of wbmm_a
EPOCHS, STEPS = 14, 48  # steps of an epoch
TINY = {
    **{"dims": WIDTHS, "width": 64, "fc": 256, "rois": 64, "side": 128, "mask_convs": 2, "score": 0.05},
    **{"batch": 4, "epochs": EPOCHS, "warmup": 120, "lr": 1e-3},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that is killed in its third epoch and continued: folder, configuration, data."""
    root = tmp_path_factory.mktemp("det")
    data = write_objects(root / "coco", train=192, val=48)
    config = write_config(root / "tiny.py", data, **TINY)
    out = root / "run"
    command = [sys.executable, str(ROOT / "tools" / "train_det.py"), str(config), "--work-dir", str(out)]
    with open(root / "log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        deadline = time.monotonic() + 600
        while not (logged(out) and logged(out)[0] and logged(out)[0][-1].get("step", 0) >= 2 * STEPS + 3):
            assert process.poll() is None, (root / "log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    result = tool("train_det", config, "--work-dir", out, "--resume", timeout=1700)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "resuming from" in result.stdout + result.stderr
    return out, config, data


def test_resumed_at_the_same_epoch_and_rate(run):
    first, second = ([line for line in lines if "loss" in line] for lines in logged(run[0]))
    assert [line["step"] for line in second] == list(range(2 * STEPS + 1, EPOCHS * STEPS + 1))
    assert (second[0]["epoch"], second[-1]["epoch"]) == (3, EPOCHS)
    before = {line["step"]: line["lr"] for line in first}
    assert len({line["lr"] for line in second[:20]}) == 20  # in the warm-up, where no two are equal
    assert all(line["lr"] == before[line["step"]] for line in second if line["step"] in before)


def read_figures(config, checkpoint, folder, *options) -> dict[str, float]:
    """What tools/test_det.py prints."""
    result = tool("test_det", config, checkpoint, "--work-dir", folder, *options, timeout=1200)
    assert result.returncode == 0, result.stderr[-3000:]
    line = re.findall(r" form, single scale: (.+)", result.stdout + result.stderr)[-1]
    return {key: float(value) for key, value in re.findall(r"coco/(\w+) ([-\d.e]+)", line)}


def test_accuracy_fused_and_not(run):
    """Held-out images, COCO's own metrics: box AP50 above 0.8, mask AP50 above 0.7, and the same fused."""
    out, config, _ = run
    figures = {}
    for name, options in {"plain": [], "compact": ["--fuse"], "dense": ["--fuse", "dense"]}.items():
        figures[name] = read_figures(config, out / f"epoch_{EPOCHS}.pth", out / name, *options)
    print(figures["plain"])
    assert figures["plain"]["bbox_mAP_50"] > 0.8
    assert figures["plain"]["segm_mAP_50"] > 0.7
    for form in ("compact", "dense"):
        for key, value in figures["plain"].items():
            assert figures[form][key] == pytest.approx(value, abs=0.001), (form, key)


def test_a_trained_detector_is_the_same_in_one_file(run, tmp_path, capsys):
    out, config, _ = run
    checkpoint = out / f"epoch_{EPOCHS}.pth"
    expected = read_figures(config, checkpoint, out / "again")
    for suffix in ("onnx", "xml"):
        target = tmp_path / f"whole.{suffix}"
        assert cli.main(["export", str(checkpoint), str(target), "--config", str(config)]) == 0, capsys.readouterr().err
        found = read_figures(config, target, out / suffix)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, abs=0.002), (suffix, key)


def test_detected_objects_are_where_they_were_drawn(run, tmp_path, capsys):
    """`wbmm detect` on held-out images, scored by pycocotools from its JSON."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    out, config, data = run
    annotations = data / "annotations" / "instances_val2017.json"
    argv = ["detect", out / f"epoch_{EPOCHS}.pth", data / "val2017", "--config", config, "--out", tmp_path / "pictures"]
    argv += ["--json", tmp_path / "results.json", "--annotations", annotations]
    assert cli.main([*map(str, argv)]) == 0
    assert len(list((tmp_path / "pictures").glob("*.png"))) == 48
    truth = COCO(str(annotations))
    score = COCOeval(truth, truth.loadRes(str(tmp_path / "results.json")), "segm")
    score.evaluate()
    score.accumulate()
    score.summarize()
    assert score.stats[1] > 0.7


def test_two_processes_over_gloo(tmp_path):
    config = write_config(tmp_path / "tiny.py", write_objects(tmp_path / "coco"), epochs=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "tools" / "train_det.py"), str(config), "--work-dir", str(tmp_path / "run")]
    for options in ([], ["--resume", "--cfg-options", "train_cfg.max_epochs=3"]):
        result = subprocess.run(
            [*command, *options], capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        output = result.stdout + result.stderr
        assert result.returncode == 0, output[-3000:]
        assert "SyncBN becomes BN, gloo between the 2 processes" in output
    steps = [line["step"] for lines in logged(tmp_path / "run") for line in lines if "loss" in line]
    assert steps == list(range(1, 7))  # 8 images, 2 processes, 2 images each
    result = tool("test_det", config, tmp_path / "run" / "epoch_3.pth", "--work-dir", tmp_path / "test", "--fuse")
    assert result.returncode == 0, result.stderr[-3000:]


def test_tensorboard_and_wandb(tmp_path):
    config = write_config(tmp_path / "tiny.py", write_objects(tmp_path / "coco"), epochs=1)
    options = ["--work-dir", tmp_path / "run", "--track", "tensorboard", "wandb"]
    result = tool("train_det", config, *options, env={**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    assert result.returncode == 0, result.stderr[-3000:]
    assert list((tmp_path / "run").rglob("events.out.tfevents.*"))
    assert list((tmp_path / "run").rglob("offline-run-*"))


def test_large_maps_within_memory(capsys):
    """A detector's input through the hierarchical backbone; prints the peaks."""
    assert cli.main(["bench", "memory", "wbmm_t_hier", "--size", "800", "1333", "--markdown"]) == 0
    out = capsys.readouterr().out
    print(out)
    rows = [line.split("|") for line in out.splitlines() if "wbmm_t_hier" in line]
    inference, training, checkpointing = (int(row[4]) for row in rows)
    assert inference < 2500
    assert training < 3500  # one of the wide tensors of a block is kept, not three
    assert checkpointing < 0.75 * training

"""What works without mmengine, mmcv, mmseg and mmdet, and what is said where they are needed."""

import json
import subprocess
import sys

import pytest
import torch
from PIL import Image

from tests.mm.helpers import ROOT, backbone, checkpoint
from wbmm.mm import tools

MODULES = ("mmengine", "mmcv", "mmseg", "mmdet", "pycocotools")
SCRIPT = """
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys({modules!r}))
from wbmm import cli
from wbmm.mm import backbone, detect, exportable, prepare, segment
from wbmm.mm.tools import evaluate_tool, train_tool

def run(call):
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = call()
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), error.getvalue()

calls = [lambda argv=argv: cli.main(argv) for argv in {commands!r}]
calls += [lambda: train_tool("seg", ["x.py"]), lambda: evaluate_tool("det", ["x.py", "x.pth"])]
print(json.dumps([run(call) for call in calls]))
"""


def test_without_the_packages(tmp_path):
    torch.save(checkpoint(backbone()), tmp_path / "net.pth")
    Image.new("RGB", (40, 30)).save(tmp_path / "photo.png")
    net, photo = str(tmp_path / "net.pth"), str(tmp_path / "photo.png")
    config, out = ["--config", "configs/ade20k/x.py"], ["--out", str(tmp_path / "out")]
    commands = [
        ["segment", "--help"],
        ["detect", "--help"],
        ["reparam", net, str(tmp_path / "fused.pth")],
        ["segment", net, photo, *config, *out],
        ["detect", net, photo, *config, *out],
        ["export", net, str(tmp_path / "net.onnx"), *config],
        ["bench", "seg", "--cost"],
        ["bench", "det"],
    ]
    script = SCRIPT.format(modules=MODULES, commands=commands)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    for code, text, error in answers[:3]:
        assert code == 0, error
        assert text
    assert (tmp_path / "fused.pth").is_file()
    extras = ["seg", "det", "seg", "seg", "det", "seg", "det"]
    for (code, _, error), extra in zip(answers[3:], extras, strict=True):
        assert code == 1
        assert error.count("\n") == 1, error
        assert "mmengine" in error
        assert f"pip install 'wbmm[{extra}]'" in error


def test_the_tools_without_a_checkout(capsys):
    assert tools.main(["train_segs"]) == 2
    assert "{train_seg,train_det,test_seg,test_det}" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        tools.main(["train_seg", "--help"])
    assert end.value.code == 0
    assert "config" in capsys.readouterr().out

"""The wheel in an empty folder: every command works there, or says in one line what to install."""

import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image

from wbmm import cli
from wbmm.extras import PACKAGES

pytestmark = pytest.mark.heavy
ROOT = Path(__file__).parents[1]
SHORT = [
    *("schedule.epochs=1", "schedule.warmup_epochs=0", "data.size=32", "global_batch=32", "batch=32", "eval_every=1"),
    *("optim.lr=1e-3", "optim.lr_batch=32"),
]
FOLDER = [
    *("data.source=folder", "data.in_memory=false", "data.args={train_limit: null, val_limit: null}"),
    *("data.num_classes=null", "data.in_chans=3", "data.mean=[0.5,0.5,0.5]", "data.std=[0.5,0.5,0.5]"),
    "augment.shift=0",
]
DIGITS = ["train", "digits", *SHORT, "data.args={train_limit: 64, val_limit: 32}"]


def required(distributions: Iterable[str]) -> set[str]:
    """These distributions and all that they need, as pip would install it."""
    found, todo = set(), [canonicalize_name(name) for name in distributions]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        try:
            needs = map(Requirement, metadata.requires(name) or [])
        except metadata.PackageNotFoundError:
            continue
        todo += [canonicalize_name(r.name) for r in needs if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


class Installed:
    """The wheel in an environment of its own, run in a folder of its own.

    Args:
        extras: whose packages it has besides torch, torchvision and timm; None for all.
    """

    def __init__(self, place: Path, wheel: Path, extras: Sequence[str] | None = None) -> None:
        venv.create(place / "env", with_pip=False)
        self.python = place / "env" / "bin" / "python"
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.site = Path(subprocess.check_output([self.python, "-c", code], text=True).strip())
        packages = Path(torch.__file__).parents[1]  # what is tested, without a download
        if extras is None:  # a folder in a .pth file comes after the environment's own
            (self.site / "packages.pth").write_text(f"{packages}\n")
        else:
            brought = required(package.distribution for package in PACKAGES if package.extra in ("core", *extras))
            optional = [package for package in PACKAGES if canonicalize_name(package.distribution) not in brought]
            hidden = {canonicalize_name(package.distribution).replace("-", "_") for package in optional}
            hidden |= {package.module for package in optional}
            for path in packages.iterdir():
                if path.name.partition("-")[0].partition(".")[0].lower() not in hidden:
                    (self.site / path.name).symlink_to(path)
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "-q", "--no-deps", "--no-index"]
        subprocess.run([*pip, str(wheel)], check=True)
        self.folder = place / "empty"
        self.folder.mkdir()

    def __call__(self, *argv: object) -> subprocess.CompletedProcess:
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "WBMM_DEBUG")}
        command = [self.python.parent / "wbmm", *map(str, argv)]
        return subprocess.run(command, capture_output=True, text=True, cwd=self.folder, env=environment)

    def works(self, *argv: object) -> str:
        result = self(*argv)
        assert result.returncode == 0, f"wbmm {argv}: {result.stdout[-2000:]}{result.stderr[-3000:]}"
        return result.stdout

    def says(self, message: str, *argv: object) -> None:
        """Ends with 1 and a line that matches."""
        result = self(*argv)
        assert result.returncode == 1, (
            f"wbmm {argv}: {result.returncode} {result.stdout[-2000:]}{result.stderr[-3000:]}"
        )
        assert re.search(message, result.stderr.strip().splitlines()[-1]), result.stderr
        assert "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]  # by way of the sdist
    subprocess.run(command, check=True, capture_output=True, cwd=out)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def wbmm(wheel, tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("installed"), wheel)


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """With torch, torchvision and timm alone."""
    return Installed(tmp_path_factory.mktemp("bare"), wheel, extras=())


def draw_classes(folder: Path, images: int = 16) -> Path:
    """Images of two classes, for training and validation."""
    for part in ("train", "val"):
        for name, colour in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
            (folder / part / name).mkdir(parents=True)
            for i in range(images):
                Image.new("RGB", (32, 32), tuple(c + i for c in colour)).save(folder / part / name / f"{i}.png")
    return folder


def test_it_is_the_wheel_that_runs(wbmm):
    code = "import wbmm; print(wbmm.__file__)"
    found = subprocess.check_output([wbmm.python, "-c", code], text=True, cwd=wbmm.folder).strip()
    assert Path(found).is_relative_to(wbmm.site)


def test_looking_around(wbmm):
    assert "usage: wbmm COMMAND" in wbmm.works("--help")
    assert "wbmm_t_hier" in wbmm.works("list")
    assert "M parameters" in wbmm.works("info", "wbmm_t_hier", "--size", 512, 512)
    assert "torch" in wbmm.works("doctor")
    assert wbmm("lst").returncode == 2
    assert wbmm("train").returncode == 2
    wbmm.says("did you mean digits", "train", "digit")
    wbmm.says("did you mean windows", "train", "table:window/hier")
    wbmm.works("table", "convnext", "--no-speed")


def test_the_readme_from_training_to_prediction(wbmm):
    wbmm.works(*DIGITS)
    wbmm.works("runs", "runs")
    wbmm.works("reparam", "runs/digits/best.pt", "digits.safetensors", "--check")
    wbmm.works("export", "digits.safetensors", "digits.onnx", "--dynamic-batch")
    images = draw_classes(wbmm.folder / "data", images=1) / "val" / "red"
    assert "1 of 1 images" in wbmm.works("predict", "digits.onnx", images)
    table = wbmm.works("eval", "runs/digits/best.pt", "digits.safetensors", "digits.onnx", "--source", "digits")
    assert all(name in table for name in ("best.pt", "digits.safetensors", "digits.onnx"))
    int8 = ("quantize", "digits.safetensors", "--format", "openvino", "--source", "digits", "--calib")
    assert "INT8" in wbmm.works(*int8).upper()
    wbmm.works("bench", "runtime", "wbmm_a", "--runtimes", "eager", "onnxruntime", "--batch", 1, "--rounds", 2)
    for kind in (
        ["model", "wbmm_a:compact", "--baseline", "wbmm_a:compact"],
        ["train", "wbmm_a", "--baseline", "wbmm_a"],
    ):
        wbmm.works("bench", *kind, "--batch", 2, "--size", 32, 32, "--rounds", 1)


def test_the_readme_from_a_folder_of_pictures(wbmm):
    draw_classes(wbmm.folder / "photos", images=6)
    photos = ("--data", "photos", "--model", "wbmm_a", "--epochs", 1, "--size", 32, "--export", "onnx")
    wbmm.works("train", *photos, "device=cpu")
    image = wbmm.folder / "photos" / "val" / "red" / "0.png"
    assert "1 of 1 images" in wbmm.works("predict", "runs/photos-wbmm_a", image)
    assert "1 of 1 images" in wbmm.works("predict", "wbmm_a.tiny50", image)  # its weights are in the wheel


def test_a_row_of_a_table_trains(wbmm):
    draw_classes(wbmm.folder / "rows")
    wbmm.works("train", "table:cross-operator/dw13@fashion_mnist", *SHORT, *FOLDER, "data.root=rows")
    assert (wbmm.folder / "runs/ablations/fashion_mnist/wbmm_a_dense-mixer-dw13/last.pt").is_file()


def test_the_demo(wbmm):
    table = wbmm.works("demo", *SHORT, "data.args={train_limit: 64, val_limit: 32}")
    assert "ONNX Runtime" in table


def test_without_any_extra(bare):
    assert "usage: wbmm COMMAND" in bare.works("--help")
    assert "wbmm_t_hier" in bare.works("list")
    bare.works("info", "wbmm_a")
    assert "pip install 'wbmm[export]'" in bare.works("doctor")
    for name in cli.COMMANDS:
        assert f"usage: wbmm {name}" in bare.works(name, "--help")
    bare.says(r"scikit-learn.*pip install 'wbmm\[train\]'", *DIGITS)
    bare.says(r"pip install 'wbmm\[export,train\]'", "demo")
    bare.works("table", "convnext", "--no-speed")


def test_training_and_files_without_any_extra(bare):
    draw_classes(bare.folder / "data")
    bare.works("train", "digits", *SHORT, *FOLDER, "data.root=data", "out=runs/colours")
    bare.works("runs", "runs")
    bare.works("reparam", "runs/colours/best.pt", "colours.safetensors", "--check")
    assert "16 of 16 images" in bare.works("predict", "colours.safetensors", "data/val/red")
    bare.works("eval", "colours.safetensors", "--data", "data")
    bare.works("export", "colours.safetensors", "colours.pt2")
    bare.says(r"pip install 'wbmm\[export\]'", "export", "colours.safetensors", "colours.onnx")
    bare.says(r"pip install 'wbmm\[export\]'", "export", "colours.safetensors", "colours.xml")
    bare.says(
        r"pip install 'wbmm\[export\]'",
        *("quantize", "colours.safetensors", "--format", "openvino", "--source", "digits", "--calib"),
    )
    (bare.folder / "config.py").write_text("model = dict()\n")
    bare.says(r"pip install 'wbmm\[seg\]'", "segment", "colours.safetensors", "data/val/red", "--config", "config.py")
    bare.says(r"pip install 'wbmm\[det\]'", "detect", "colours.safetensors", "data/val/red", "--config", "config.py")


def test_the_extra_for_training(wheel, tmp_path):
    wbmm = Installed(tmp_path, wheel, ["train"])
    wbmm.works(*DIGITS)
    assert (wbmm.folder / "runs/digits/curves.png").is_file()
    wbmm.says(r"pip install 'wbmm\[export\]'", "export", "runs/digits/best.pt", "digits.onnx")


def test_the_extra_for_export(wheel, tmp_path):
    wbmm = Installed(tmp_path, wheel, ["export"])
    for name in ("a.onnx", "a.xml", "a.pt2"):
        wbmm.works("export", "wbmm_a", name, "--random-weights", "--size", 64, 64)
    wbmm.says(r"pip install 'wbmm\[wandb\]'", *DIGITS, "log.wandb=true")


def test_the_extras_for_segmentation_and_detection(wheel, tmp_path):
    wbmm = Installed(tmp_path, wheel, ["seg", "det"])
    assert "conv3x3" in wbmm.works("bench", "seg", "--cost", "--models", "t", "--backbones", "conv3x3")
    assert "conv3x3" in wbmm.works("bench", "det", "--models", "t", "--backbones", "conv3x3")
    tool = [wbmm.python, "-m", "wbmm.mm.tools", "train_seg", "ade20k/wbmm-t-dense_upernet_8xb2-160k_ade20k-512x512"]
    result = subprocess.run(tool, capture_output=True, text=True, cwd=wbmm.folder)
    assert result.returncode == 1
    assert "data/ade" in result.stderr.strip().splitlines()[-1]

"""What the package promises as a whole: a quiet, light import and a wheel with `wbmm` only."""

import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPTIONAL = [
    *("mmengine", "mmcv", "mmseg", "mmdet", "triton", "wandb", "onnx", "onnxscript", "onnxruntime", "openvino", "nncf"),
    *("rich", "tensorboard", "matplotlib", "sklearn"),
]


def python(code, **kwargs):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, **kwargs)


def test_import_is_quiet_and_light():
    code = (
        "import sys, timm, torch, torchvision\n"  # which may bring some of them on their own
        "had = set(sys.modules)\n"
        "import wbmm\n"
        f"print([name for name in {OPTIONAL} if name in sys.modules and name not in had])"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
    assert result.stderr == ""
    assert python("import wbmm").stdout == ""


def test_import_needs_only_torch_torchvision_and_timm():
    """With every other optional package made unimportable."""
    code = (
        "import sys\n"
        f"for name in {OPTIONAL}: sys.modules[name] = None\n"
        "import timm, torch, wbmm\n"
        "m = timm.create_model('wbmm_a', num_classes=2).eval()\n"
        "print(tuple(wbmm.fuse(m)(torch.zeros(1, 3, 32, 32)).shape))"
    )
    result = python(code)
    assert result.stdout.strip() == "(1, 2)", result.stderr


def test_the_wheel_holds_wbmm_only(tmp_path):
    pytest.importorskip("build")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"wbmm"}
    data = {"wbmm/zoo.yaml", "wbmm/zoo_counts.yaml", "wbmm/paper_tables.yaml"}
    configs = [path for path in (ROOT / "configs").rglob("*") if path.suffix in (".yaml", ".py")]
    assert data | {f"wbmm/{path.relative_to(ROOT).as_posix()}" for path in configs} <= set(names)
    assert "wbmm/models/wbmm.py" in names
    assert {"wbmm/py.typed", "wbmm/weights/wbmm_a.tiny50.safetensors"} <= set(names)
    assert not any("tests" in name for name in names)
    check_metadata(wheel)


def check_metadata(*files):
    """As the package index would: the description renders, the fields are known."""
    if importlib.util.find_spec("twine") is None:
        return
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *map(str, files)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("PASSED") == len(files)


def test_the_source_archive(tmp_path):
    """It builds the same wheel: configs and weights are in it."""
    pytest.importorskip("build")
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    (archive,) = tmp_path.glob("wbmm-*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"setup.py", "README.md", "LICENSE", "wbmm/py.typed", "models/wbmm_a.tiny50.safetensors"} <= names
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.yaml")} <= names
    check_metadata(archive)


def test_configs_named_in_the_zoo_exist():
    from wbmm.zoo import load_zoo

    configs = [model.config for model in load_zoo().values() if model.config]
    assert configs
    assert [config for config in configs if not (ROOT / config).is_file()] == []

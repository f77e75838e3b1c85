"""The command line as a user meets it."""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import wbmm
from wbmm import cli
from wbmm.commands import doctor
from wbmm.commands.list import rows as list_rows
from wbmm.extras import Package
from wbmm.ops import use_backend
from wbmm.zoo import load_counts, load_zoo

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("count_zoo", ROOT / "scripts" / "count_zoo.py")
count_zoo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(count_zoo)


def run(capsys, *argv):
    code = cli.main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_module_and_overview():
    result = subprocess.run([sys.executable, "-m", "wbmm"], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 2
    for name in cli.COMMANDS:
        assert f"  {name} " in result.stdout


SCRIPT = "import sys\nfrom wbmm.cli import main\nsys.exit(main())\n"  # as pip writes it


@pytest.mark.parametrize("started", ["script", "module"])
@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["list"], ["bench", "--help"]])
def test_what_needs_no_torch_does_not_import_it(started, argv, tmp_path):
    """Of which a user would wait seconds for a line of help."""
    (tmp_path / "wbmm").write_text(SCRIPT)
    start = [str(tmp_path / "wbmm")] if started == "script" else ["-m", "wbmm"]
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *start, *argv],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "wbmm.cli" in imported
    assert imported.isdisjoint({"torch", "timm", "torchvision", "numpy", "wbmm.models"})


@pytest.mark.parametrize("order", ["timm, wbmm", "wbmm, timm"])
def test_a_program_that_imports_the_package_has_the_models_at_once(order, tmp_path):
    program = tmp_path / "wbmm_program.py"
    program.write_text(
        f"import {order}\nprint(timm.is_model('wbmm_t'), all(hasattr(wbmm, name) for name in wbmm.__all__))\n"
    )
    result = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert result.stdout.strip() == "True True", result.stderr


def test_no_module_imports_the_names_of_the_package():
    """They are not there when the process is the command: each module imports what it uses from where that is."""
    offered = set(wbmm.__all__) - {"models", "__version__"}
    found = []
    for path in (ROOT / "wbmm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
            of_package = isinstance(node, ast.ImportFrom) and node.module == "wbmm" and names & offered
            if of_package or (isinstance(node, ast.Import) and "wbmm" in names):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def test_unknown_command(capsys):
    code, _, error = run(capsys, "lst")
    assert code == 2
    assert "unknown command 'lst'" in error
    assert "list" in error


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_shows_an_example(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert f"example:\n  wbmm {name}" in capsys.readouterr().out


def test_list(capsys):
    code, out, _ = run(capsys, "list", "wbmm_t*")
    assert code == 0
    rows = [line.split() for line in out.splitlines() if line.startswith("wbmm_")]
    assert [row[0] for row in rows] == ["wbmm_t", "wbmm_t_dense", "wbmm_t_hier"]
    assert rows[0][1:7] == ["classification", "31.07", "31.01", "31.0", "4.77", "4.8"]
    assert run(capsys, "list", "resnet*")[0] == 1


def test_every_model_is_counted():
    assert list(load_counts()) == list(load_zoo()), "run: python scripts/count_zoo.py"


@pytest.mark.parametrize("name", ["wbmm_a", "wbmm_t_hier", "unireplknet_a"])
def test_the_counts_are_those_of_the_models(name):
    assert load_counts()[name] == count_zoo.count(name), "run: python scripts/count_zoo.py"


@pytest.mark.heavy
def test_all_counts_are_those_of_the_models():
    assert load_counts() == {name: count_zoo.count(name) for name in load_zoo()}, "run: python scripts/count_zoo.py"


def test_list_as_markdown(capsys):
    code, out, _ = run(capsys, "list", "wbmm_t*", "--markdown")
    assert code == 0
    assert [line.split(" | ")[0] for line in out.splitlines()[2:]] == ["| wbmm_t", "| wbmm_t_dense", "| wbmm_t_hier"]


def test_figures_agree_with_the_paper_within_rounding():
    """Or docs/models.md explains the difference."""
    explained = {("wbmm_p", "flops"), ("wbmm_s", "flops"), ("wbmm_t_hier", "flops"), ("wbmm_b", "params")}
    different = set()
    for row in list_rows():
        name, _, _, params, paper_params, flops, paper_flops = row[:7]
        for kind, computed, paper in (("params", params, paper_params), ("flops", flops, paper_flops)):
            if paper != "-" and abs(float(computed) - float(paper)) > 0.0501:
                different.add((name, kind))
    assert different == explained
    docs = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for name, _ in explained:
        assert f"`{name}`" in docs


def test_info_of_backends(capsys):
    code, out, _ = run(capsys, "info", "wbmm_a_hier", "--backends")
    assert code == 0
    rows = [line.split() for line in out.splitlines() if line.startswith(("inference", "training"))]
    assert {row[0] for row in rows} == {"inference", "training"}
    assert {row[-2] for row in rows} <= {"onednn", "tiled", "reference"}
    assert any(row[1:4] == ["stage", "2,", "W"] and row[-3] == "windowed" for row in rows)
    assert "tiled, windowed in inference: the matrix takes at most 256 MB, and is faster as a whole" in out


def test_info(capsys):
    code, out, _ = run(capsys, "info", "wbmm_t_hier", "--size", "512", "384")
    assert code == 0
    assert "512x384 input" in out
    assert "14+7" in out
    assert "33.06 M parameters" in out
    stage = next(line for line in out.splitlines() if line.startswith("1 "))
    assert "128x96" in stage
    code, _, error = run(capsys, "info", "wbmm_x")
    assert code == 1
    assert "unknown model 'wbmm_x'; did you mean" in error
    assert run(capsys, "info", "wbmm_a", "--size", "0", "5")[0] == 1


def test_doctor(capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    for word in ("torch", "timm", "openvino", "onedl-mmcv", "mmcv operators", "gloo"):
        assert word in out


def test_doctor_says_what_to_install():
    ok, version, advice = doctor.check_package(Package("no-such-thing", "openvino", "export"))
    assert (ok, version, advice) == (False, "-", "pip install 'wbmm[export]'")
    assert doctor.check_package(Package("no-such-thing", "no_such_thing"))[2] == "pip install no-such-thing"
    ok, version, advice = doctor.check_package(Package("timm", "no_such_thing"))
    assert not ok
    assert "import fails: No module named 'no_such_thing'" in advice


def test_doctor_tells_mmcv_without_operators(monkeypatch):
    def without_ops(name):
        if name == "mmcv.ops":
            raise ImportError("no compiled extension")

    monkeypatch.setattr(doctor.importlib, "import_module", without_ops)
    ok, detail = doctor.check_mmcv_ops()
    assert not ok
    assert "--no-build-isolation" in detail


@pytest.mark.parametrize("backend", ["onednn", "tiled", "reference"])
def test_a_backend_asked_for_by_name_does_not_keep_models_from_being_counted(backend, capsys):
    with use_backend(backend):
        assert cli.main(["info", "wbmm_a"]) == 0
    assert "M parameters" in capsys.readouterr().out


def test_the_public_names_are_there_in_the_command_too():
    """`wbmm ...` loads nothing by itself, but a module that it imports may ask for them."""
    start = "import sys; sys.argv = ['wbmm']; import wbmm; print('torch' in sys.modules, wbmm.WBMM2d.__name__"
    code = f"{start}, wbmm.nonsense)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "module 'wbmm' has no attribute 'nonsense'" in result.stderr
    result = subprocess.run([sys.executable, "-c", f"{start})"], capture_output=True, text=True)
    assert result.stdout.split() == ["False", "WBMM2d"]

"""How a command ends: one line, the right exit code, and a log file for a bug."""

import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from wbmm.extras import PACKAGES
from wbmm.handler import run_command

ROOT = Path(__file__).parents[1]


def raise_(error):
    raise error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("batch must be above 0, got -1"), "wbmm x: batch must be above 0, got -1"),
        (FileNotFoundError(2, "No such file or directory", "a.pth"), "wbmm x: a.pth: No such file or directory"),
        (PermissionError(13, "Permission denied", "/root/x"), "wbmm x: /root/x: Permission denied"),
        (OSError(28, "No space left on device"), "wbmm x: No space left on device"),
        (FloatingPointError("the loss is nan"), "wbmm x: the loss is nan"),
        (ModuleNotFoundError("No module named 'rich'", name="rich"), "wbmm x: No module named 'rich'"),
        (MemoryError(), "wbmm x: out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."), "wbmm x: out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"), "wbmm x: out of memory"),
    ],
)
def test_expected_errors_are_one_line(error, text, capsys):
    assert run_command("wbmm x", lambda: raise_(error)) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(text)
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [KeyError("foo"), RuntimeError("shape mismatch"), AttributeError("x"), ModuleNotFoundError("gone", name="wbmm.x")],
)
def test_a_bug_leaves_a_log_file(error, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_command("wbmm x", lambda: raise_(error)) == 1
    printed = capsys.readouterr().err
    (log,) = tmp_path.glob("wbmm-error-*.log")
    assert printed.count("\n") == 1
    assert "please report it" in printed
    assert str(log) in printed
    assert "raise_" in log.read_text()
    assert type(error).__name__ in log.read_text()


def test_ctrl_c_and_results(capsys):
    assert run_command("wbmm x", lambda: raise_(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "wbmm x: interrupted\n"
    assert run_command("wbmm x", lambda: 3) == 3
    assert run_command("wbmm x", lambda: None) == 0


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("WBMM_DEBUG", "1")
    with pytest.raises(KeyError):
        run_command("wbmm x", lambda: raise_(KeyError("foo")))


def test_ranks_say_who_they_are(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    run_command("wbmm x", lambda: raise_(ValueError("no")))
    assert capsys.readouterr().err == "[rank 1] wbmm x: no\n"


def test_every_command_and_tool_ends_through_it():
    """No entry point prints errors by itself; the tools hand over to a `main` that is handled."""
    for tool in sorted((ROOT / "tools").glob("*.py")):
        text = tool.read_text()
        assert "except" not in text, tool
    for path in (ROOT / "wbmm").rglob("*.py"):
        text = path.read_text()
        if "\ndef main(" in text and path.name != "cli.py":
            assert "run_command(" in text or "wbmm_main(" in text, path


def test_a_command_as_typed(tmp_path):
    code = "import sys; from wbmm.cli import main; sys.exit(main(sys.argv[1:]))"
    for argv, expected in ((["train", str(tmp_path / "none.yaml")], 1), (["train"], 2), (["nonsense"], 2)):
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False)
        assert done.returncode == expected, done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            ModuleNotFoundError("No module named 'onnx'", name="onnx"),
            "No module named 'onnx': pip install 'wbmm[export]'",
        ),
        (ImportError("needs mmcv: pip install x", name="mmcv"), "needs mmcv: pip install x"),
        (ModuleNotFoundError("No module named 'foo'", name="foo"), "No module named 'foo'"),
    ],
)
def test_a_missing_package_is_named_with_what_brings_it(error, line, capsys):
    def fail():
        raise error

    assert run_command("wbmm x", fail) == 1
    assert capsys.readouterr().err == f"wbmm x: {line}\n"


def test_the_optional_packages_are_those_of_the_extras():
    wanted = {(requirement.name, str(requirement.marker)) for requirement in map(Requirement, requires("wbmm"))}
    for package in PACKAGES:
        if package.extra != "core":
            assert (package.distribution, f'extra == "{package.extra}"') in wanted

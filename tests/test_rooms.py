"""The plan of the house: imports point one way, and layers and models leave the choice of a backend to `ops`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What belongs behind `ops.dispatch`: who may compute this, and private operators.
CHOICES = re.compile(
    r"is_eager|takes_onednn|differentiates_on_cpu|torch\.ops\.|is_cuda\b|device\.type|is_grad_enabled|is_autocast_enabled|"
    r"is_compiling|is_exporting|is_tracing|is_scripting|\.dtype (?:==|!=|in|not in) "
)
ALLOWED = {
    ("models/wbmm.py", "is_compiling"),  # activation checkpointing: torch cannot compile our context
    ("models/wbmm.py", "is_scripting"),  # nor script a checkpoint
    ("models/state.py", ".dtype not in "),  # of a file's tensors
}


def test_imports_point_one_way():
    """The contract of pyproject.toml; the failure prints the chains of imports that break it."""
    pytest.importorskip("importlinter")
    code = (
        "import sys; from importlinter.cli import lint_imports\n"
        "sys.exit(lint_imports(config_filename='pyproject.toml', no_cache=True, no_logo=True))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 kept, 0 broken" in result.stdout


@pytest.mark.parametrize("room", ["layers", "models"])
def test_only_ops_chooses_how_to_compute(room):
    files = sorted((ROOT / "wbmm" / room).rglob("*.py"))
    assert files
    found = []
    for path in files:
        name = path.relative_to(ROOT / "wbmm").as_posix()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = CHOICES.search(line)
            if match and (name, match[0]) not in ALLOWED:
                found.append(f"wbmm/{name}:{number}: {line.strip()}")
    assert found == [], "ask wbmm.ops for what you want; wbmm/ops/dispatch.py chooses who computes it"


@pytest.mark.parametrize(
    "line", ["if x.is_cuda:", "if x.device.type == 'cpu':", "torch.ops.mkldnn._linear(x)", "if x.dtype == torch.half:"]
)
def test_such_a_choice_is_seen(line):
    assert CHOICES.search(line)


def test_the_two_walks_of_the_design_are_true():
    """Every file that docs/design.md names is there, and each walk goes through as many as it says."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    walks = re.findall(r"^\*\*.*\), (\d+) files:\n\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert len(walks) == 2
    for count, table in walks:
        files = set(re.findall(r"`([\w/]+\.py)`", table))
        assert [name for name in sorted(files) if not (ROOT / "wbmm" / name).is_file()] == []
        assert len(files) == int(count)


def test_every_room_is_in_the_plan():
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rooms = {path.name + "/" for path in (ROOT / "wbmm").iterdir() if (path / "__init__.py").is_file()}
    rooms |= {path.stem for path in (ROOT / "wbmm").glob("*.py") if not path.stem.startswith("_")} - {"cli"}
    table = page[page.index("## The rooms") : page.index("## One door")]
    assert rooms - set(re.findall(r"`([\w/]+)`", table)) == set()

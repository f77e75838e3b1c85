"""Types: mypy finds nothing in the public API and the operators, and users of the package get its types."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytest.importorskip("mypy", reason="mypy is not installed")


def mypy(*arguments):
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(ROOT / "build" / "mypy"), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_the_public_api_and_the_operators_are_clean():
    assert mypy().startswith("Success: no issues found"), mypy()


def test_users_get_types(tmp_path):
    """`import wbmm` alone: the names that are imported at their first use have their types too."""
    assert (ROOT / "wbmm" / "py.typed").is_file()
    (tmp_path / "user.py").write_text(
        "import wbmm\n"
        "reveal_type(wbmm.WBMM2d(dim=8))\n"
        "reveal_type(wbmm.load_model)\n"
        "wbmm.WBMM2d(dim='eight')\n"
        "wbmm.fuse(model=None, shape='compact')\n"
    )
    said = mypy(tmp_path / "user.py")
    assert 'Revealed type is "wbmm.layers.mixers.WBMM2d"' in said
    assert 'Revealed type is "def (path: str | pathlib.Path' in said
    assert 'incompatible type "str"; expected "int"' in said
    assert 'Unexpected keyword argument "shape" for "fuse"' in said

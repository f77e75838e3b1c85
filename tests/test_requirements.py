"""The lock: complete, nothing superfluous, every file hashed; and a set-up that refuses any other file."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("lock", ROOT / "scripts" / "lock.py")
lock = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(lock)

TEXT = lock.LOCK.read_text()
PINS = {canonicalize_name(name): version for name, version in lock.read_pins(TEXT).items()}
complete = pytest.mark.skipif(
    sys.version_info < (3, 11) or (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="the lock is complete for Linux on x86-64 with Python 3.11 and newer",
)


def locked_sections():
    """Section -> the canonical names in it, as the file has them."""
    parts = re.split(r"^# \[(\w+)\]\n", TEXT, flags=re.MULTILINE)[1:]
    named = zip(parts[::2], parts[1::2], strict=True)
    return {name: set(map(canonicalize_name, lock.read_pins(text))) for name, text in named}


def test_every_pin_has_hashes_and_nothing_else():
    pin = r'[\w.-]+==[\w.+]+( ; python_version >= "3\.11")?'
    entry = pin + r"( \\\n    --hash=sha256:[0-9a-f]{64})+\n(    # for [\w., -]+\n)?"
    assert re.fullmatch(rf"(#.*\n|{entry})+", TEXT)
    assert "://" not in TEXT
    assert len(PINS) > 100


def test_one_opencv():
    assert [name for name in PINS if "opencv" in name] == ["opencv-python-headless"]


@complete
def test_the_lock_is_what_the_project_needs_and_no_more():
    """Section by section, from the metadata of what is installed."""
    expected = lock.sections(lambda name: importlib.metadata.requires(name) or [])
    assert locked_sections() == {section: set(needed) for section, needed in expected.items()}


@complete
def test_the_locked_versions_are_the_installed_ones():
    assert {name: importlib.metadata.version(name) for name in PINS} == PINS


def test_setup_py_allows_every_pin():
    ours = [Requirement(text) for text in importlib.metadata.requires("wbmm")]
    assert [str(r) for r in ours if not r.specifier.contains(PINS[canonicalize_name(r.name)])] == []


def test_closure_follows_extras_and_markers_and_keeps_one_opencv():
    packages = {
        "a": ["B_b[fast]>=1", "never; python_version < '3'", "opencv-python>=3"],
        "b-b": ["c", "d; extra == 'fast'", "e; extra == 'slow'", "a"],
    }
    needed = lock.closure(["A"], lambda name: packages.get(name, []))
    assert needed == {"a": {"b-b"}, "b-b": {"a"}, "c": {"b-b"}, "d": {"b-b"}, "opencv-python-headless": {"a"}}


def index_page(*files):
    links = "\n".join(f'<a href="../x/{name}{tail}">{name}</a>' for name, tail in files)
    return f"<html><body>\n{links}\n</body></html>"


def resolved(version="1.0", sha256="a" * 64):
    file = {"url": "p", "archive_info": {"hashes": {"sha256": sha256}}}
    return {"metadata": {"version": version}, "download_info": file}


def test_hashes_are_those_of_all_wheels_of_the_version():
    page = index_page(
        ("pkg-1.0-cp311-cp311-manylinux_2_28_x86_64.whl", "#sha256=" + "b" * 64),
        ("pkg-1.0-cp311-cp311-macosx_11_0_arm64.whl", "#sha256=" + "a" * 64),
        ("pkg-1.0.tar.gz", "#sha256=" + "c" * 64),  # pip would build it if it may not have the wheel
        ("pkg-1.0.1-py3-none-any.whl", "#sha256=" + "d" * 64),
        ("pkg-1.0.exe", ""),
    )
    assert lock.hashes("pkg", resolved(), lambda name: page) == ["a" * 64, "b" * 64]


def test_without_wheels_the_source_is_hashed():
    page = index_page(("pkg-1.0.tar.gz", "#sha256=" + "a" * 64))
    assert lock.hashes("pkg", resolved(), lambda name: page) == ["a" * 64]


@pytest.mark.parametrize(
    ("tail", "item", "message"),
    [
        ("", resolved(), "pkg==1.0: the index gives no sha256 for one of pkg-1.0.tar.gz"),
        ("#sha256=" + "a" * 64, resolved("2.0"), "pkg==2.0: the index has no file of that version"),
        ("#sha256=" + "b" * 64, resolved(), "pkg==1.0: pip chose p, which is not one of the index's files"),
    ],
)
def test_hashes_that_cannot_be_trusted_are_an_error(tail, item, message):
    page = index_page(("pkg-1.0.tar.gz", tail))
    with pytest.raises(ValueError, match=message):
        lock.hashes("pkg", item, lambda name: page)


def test_setup_takes_only_files_of_the_lock(tmp_path):
    """`setup_env.sh lint` where another `ruff` of the pinned version is on offer."""
    (tmp_path / "scripts").mkdir()
    for name in ("requirements.txt", "setup.py", "scripts/setup_env.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    info = f"ruff-{PINS['ruff']}.dist-info"
    with zipfile.ZipFile(tmp_path / f"ruff-{PINS['ruff']}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: ruff\nVersion: {PINS['ruff']}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    environment = {**os.environ, **settings, "PYTHON": sys.executable, "WBMM_ENV_HOME": str(tmp_path / "env")}
    command = ["bash", str(tmp_path / "scripts" / "setup_env.sh"), "lint"]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert "section [lint] of requirements.txt could not be installed as it is locked" in refused.stderr
    assert list((tmp_path / "env").glob("*/.complete")) == []

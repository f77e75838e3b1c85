"""Refresh requirements.txt: the exact version of every package in the tested stack, with the hashes of its wheels.

    make lock

The versions in requirements.txt stay: to change one, edit it there, or delete its line to let pip choose. What nothing
requires any more is dropped, what is newly required is added. pip resolves `.[all]` for it; from an index that does not
serve metadata on its own it has to download every package (5 GB).
"""

import json
import re
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.txt"
HEADER = """\
# The exact versions of the whole tested stack, with the hashes of their wheels (of the source where there are none):
# scripts/setup_env.sh installs with --require-hashes, section by section. Written by `make lock`; version ranges and
# extras are in setup.py.
#
# Complete for Linux on x86-64 with Python 3.11 and 3.12. Elsewhere the versions are used as constraints, and what needs
# Python 3.11 is left free on 3.10.
"""
# A section holds what its roots need beyond the sections before it; setup_env.sh installs them in this order.
SECTIONS = {
    "lint": ["ruff"],
    "build": ["setuptools>=80,<82", "wheel", "packaging", "ninja", "torch", "torchvision"],
    "demo": ["wbmm[train,export,dev]"],
    "docs": ["wbmm[docs]"],
    "full": ["wbmm[all]"],
    "mmcv": [],  # from source, against everything above
}
MMCV = "onedl-mmcv"
# mmcv asks for the one, imaug for both, and they install the same `cv2`: keep the one that needs no libGL.
INSTEAD = {"opencv-python": "opencv-python-headless"}


def read_pins(text):
    """Name -> version of every pin in a requirements file, hashes or not."""
    return dict(re.findall(r"^([A-Za-z0-9][\w.-]*)==([^\s;]+)", text, flags=re.MULTILINE))


def closure(roots, requires):
    """What `roots` need, directly or not.

    Args:
        roots: Requirements, e.g. `wbmm[train]`.
        requires: Called with a canonical name, returns the requirements of that package as strings.

    Returns:
        Canonical name -> the names that ask for it (empty for a root).
    """
    needed, seen = {}, set()
    queue = [(Requirement(root), None) for root in roots]
    while queue:
        requirement, parent = queue.pop()
        name = canonicalize_name(requirement.name)
        name = INSTEAD.get(name, name)
        needed.setdefault(name, set()).update({parent} - {None})
        for extra in {"", *requirement.extras} - {extra for package, extra in seen if package == name}:
            seen.add((name, extra))
            children = map(Requirement, requires(name))
            queue += [(c, name) for c in children if c.marker is None or c.marker.evaluate({"extra": extra})]
    return needed


def sections(requires):
    """Section -> canonical name -> who asks for it, for every package of the lock."""
    result, earlier = {}, {"wbmm"}
    for section, roots in SECTIONS.items():
        needed = closure(roots, requires)
        result[section] = {name: via for name, via in sorted(needed.items()) if name not in earlier}
        earlier |= set(needed)
    result["mmcv"][MMCV] = result["full"].pop(MMCV)
    return result


def resolve(pins):
    """Canonical name -> pip's report on the file it would install, with `pins` as constraints."""
    both = pins | {name: pins[kept] for name, kept in INSTEAD.items() if kept in pins}
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in both.items()))
        command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed"]
        command += ["--report", report, "-c", constraints, *SECTIONS["build"], ".[all]"]
        if subprocess.run(command, cwd=ROOT).returncode:
            raise ValueError("no versions fit: edit or delete the lines of requirements.txt that pip names above")
        found = json.loads(report.read_text())["install"]
    return {canonicalize_name(item["metadata"]["name"]): item for item in found}


class Links(HTMLParser):
    """The files on an index page: name -> sha256 or None."""

    def __init__(self, page):
        super().__init__()
        self.files, self.href = {}, None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag == "a":
            self.href = dict(attrs).get("href", "")

    def handle_data(self, data):
        if self.href is not None and data.strip():
            found = re.search(r"#sha256=([0-9a-f]{64})$", self.href)
            self.files[data.strip()] = found and found[1]
            self.href = None


def file_version(name):
    """The version in a file's name; None if it is neither a wheel nor a source distribution."""
    try:
        return parse_wheel_filename(name)[1] if name.endswith(".whl") else parse_sdist_filename(name)[1]
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def hashes(name, item, fetch):
    """The sorted sha256 of one version's wheels, for all platforms; of its source distribution if it has no wheels."""
    version, download = item["metadata"]["version"], item["download_info"]
    files = {f: digest for f, digest in Links(fetch(name)).files.items() if file_version(f) == Version(version)}
    # Next to wheels a source is left out: pip would build it, and run its code, wherever no wheel has the right hash.
    files = {f: digest for f, digest in files.items() if f.endswith(".whl")} or files
    if not files:
        raise ValueError(f"{name}=={version}: the index has no file of that version")
    if None in files.values():
        raise ValueError(f"{name}=={version}: the index gives no sha256 for one of {', '.join(files)}")
    if download["archive_info"]["hashes"]["sha256"] not in files.values():
        raise ValueError(f"{name}=={version}: pip chose {download['url']}, which is not one of the index's files")
    return sorted(set(files.values()))


def index_pages():
    """A function that fetches a project's page from pip's index, with pip's own settings."""
    from pip._internal.commands import create_command  # the only place where all of pip's settings come together

    install = create_command("install")
    options, _ = install.parse_args([])
    session = install._build_session(options)

    def fetch(name):
        response = session.get(f"{options.index_url.rstrip('/')}/{name}/", headers={"Accept": "text/html"})
        response.raise_for_status()
        return response.text

    return fetch


def render(found, fetch):
    """The text of the lock."""
    lines = [HEADER]
    for section, needed in sections(lambda name: found[name]["metadata"].get("requires_dist", [])).items():
        lines.append(f"# [{section}]\n")
        for name, via in needed.items():
            about = found[name]["metadata"]
            old_python = SpecifierSet(about.get("requires_python", "")).contains("3.10.0")
            lines.append(f"{about['name']}=={about['version']}" + ("" if old_python else ' ; python_version >= "3.11"'))
            lines.append("".join(f" \\\n    --hash=sha256:{digest}" for digest in hashes(name, found[name], fetch)))
            lines.append(f"\n    # for {', '.join(sorted(via))}\n" if via else "\n")
    return "".join(lines)


def main():
    before = read_pins(LOCK.read_text())
    text = render(resolve(before), index_pages())
    LOCK.write_text(text)
    after = read_pins(text)
    for name in sorted({*before, *after}, key=str.lower):
        if before.get(name) != after.get(name):
            print(f"{name}: {before.get(name, 'not there')} -> {after.get(name, 'dropped')}")
    print(f"{LOCK.name}: {len(after)} packages, {text.count('--hash=')} files")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"lock: {error}")

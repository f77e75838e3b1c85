"""The files around the code: workflows call targets that exist, templates parse, versions agree."""

import re
from pathlib import Path

import pytest
import yaml

from wbmm.models.named_mixers import MIXERS
from wbmm.ops import BACKENDS

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES += [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "models").glob("*.md")), ROOT / "wbmm/ops/README.md"]


def read_yaml(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_make_targets(path):
    workflow = read_yaml(path)
    runs = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert runs
    for run in runs:
        assert run.startswith("make ")
        assert run.removeprefix("make ") in TARGETS


def test_there_are_a_fast_a_full_and_a_gpu_job():
    jobs = {name: job for path in WORKFLOWS for name, job in read_yaml(path)["jobs"].items()}
    assert set(jobs) == {"fast", "full", "gpu"}
    assert "vars.WBMM_GPU_RUNNER" in jobs["gpu"]["if"]  # off unless someone turns it on
    assert [step["run"] for step in jobs["full"]["steps"] if "run" in step] == ["make test"]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_issue_templates(path):
    template = read_yaml(path)
    assert {"name", "description", "body"} <= set(template)
    assert all(part["type"] in ("markdown", "textarea") for part in template["body"])


def test_pre_commit_has_the_ruff_of_the_lock():
    repos = read_yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    revisions = {repo["repo"].split("/")[-1]: repo["rev"] for repo in repos}
    locked = re.search(r"^ruff==(\S+)", (ROOT / "requirements.txt").read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert revisions["ruff-pre-commit"] == f"v{locked}"
    assert "typos" in revisions


def test_every_target_is_explained():
    assert set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE)) == TARGETS
    assert set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split()) == TARGETS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(link)
    assert broken == []


def anchors(page):
    """What GitHub makes of the page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def blocks(page):
    """The Python examples of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_examples_of_contributing_run(monkeypatch, capsys):
    """The mixer compares its fused form with the training form by itself."""
    mixer, backend = blocks("CONTRIBUTING.md")
    monkeypatch.setattr("wbmm.models.named_mixers.MIXERS", dict(MIXERS))
    exec(mixer, {"__name__": "example"})
    before = list(BACKENDS)
    try:
        exec(backend, {"__name__": "example"})
    finally:
        BACKENDS[:] = before
    assert "windowed (2, 64, 56, 56) window (7, 7)" in capsys.readouterr().out

"""The files around the code: workflows call targets that exist, templates parse, versions agree."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

import wbmm

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


def test_there_are_a_fast_a_full_a_docs_and_a_gpu_job():
    jobs = {name: job for path in WORKFLOWS for name, job in read_yaml(path)["jobs"].items()}
    assert set(jobs) == {"fast", "full", "docs", "gpu"}
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


def test_the_changelog_has_the_release():
    """Keep a Changelog's layout: what is not released on top, then the version of the package with its date."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(wbmm.__version__)} - \d{{4}}-\d\d-\d\d", headings[1])
    assert read_yaml(ROOT / "CITATION.cff")["version"] == wbmm.__version__


def test_every_target_is_explained():
    assert set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE)) == TARGETS
    joined = MAKEFILE.replace("\\\n", "")
    assert set(re.search(r"^\.PHONY: (.*)$", joined, re.MULTILINE)[1].split()) == TARGETS


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


def test_all_tables_of_the_paper_have_their_row():
    text = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| .*? \| `(tab:\w+)` \| `(.*?)` \|", text, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 21))
    # The tables that are data name their label, and, where they have it, all labels have their command.
    data = read_yaml(ROOT / "wbmm" / "paper_tables.yaml")
    assert {table["label"] for table in data["tables"].values() if "tab:" in table["label"]} <= {row[1] for row in rows}
    assert data.get("commands", {}).items() <= {label: command for _, label, command in rows}.items()


def test_the_drawings_of_the_operator_are_what_their_script_draws():
    spec = importlib.util.spec_from_file_location("draw_operator", ROOT / "scripts" / "draw_operator.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    drawn = {f"{name}.svg": draw() for name, draw in script.DRAWINGS.items()}
    assert drawn == {path.name: path.read_text(encoding="utf-8") for path in script.FOLDER.glob("*.svg")}

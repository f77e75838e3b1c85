"""The files around the code: workflows call targets that exist, templates parse, versions agree."""

import argparse
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import yaml

import wbmm
from wbmm import cli
from wbmm.models.named_mixers import MIXERS
from wbmm.ops import BACKENDS

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES += [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "models").glob("*.md")), ROOT / "wbmm/ops/README.md"]

CHECKED = ["README.md", "CONTRIBUTING.md", "SECURITY.md"]
NAMES = ["install", "models", "baselines", "checkpoints", "fusion", "export", "deployment", "quantization", "predict"]
CHECKED += [f"docs/{name}.md" for name in [*NAMES, "logging", "training", "data", "security", "migrate"]]


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


def test_the_changelog_has_the_release():
    """Keep a Changelog's layout: what is not released on top, then the version of the package with its date."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(wbmm.__version__)} - \d{{4}}-\d\d-\d\d", headings[1])
    assert read_yaml(ROOT / "CITATION.cff")["version"] == wbmm.__version__


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


def test_the_examples_of_the_readme_run(monkeypatch, tmp_path):
    """With the smallest model and random weights in place of a download."""
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks("README.md"))
    assert code.count("pretrained=True") == 1
    exec(code.replace(", pretrained=True", "").replace("wbmm_t", "wbmm_a"), {"__name__": "example"})
    assert (tmp_path / "wbmm_a.safetensors").is_file()


def test_the_examples_for_people_who_move_run(capsys):
    code = "\n".join(blocks("docs/migrate.md"))
    exec(code, {"__name__": "example"})
    assert "[(1, 40, 56, 56), (1, 80, 28, 28), (1, 160, 14, 14), (1, 320, 7, 7)]" in capsys.readouterr().out


def test_all_tables_of_the_paper_have_their_row():
    text = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| .*? \| `(tab:\w+)` \| `(.*?)` \|", text, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 21))
    # The tables that are data name their label, and, where they have it, all labels have their command.
    data = read_yaml(ROOT / "wbmm" / "paper_tables.yaml")
    assert {table["label"] for table in data["tables"].values() if "tab:" in table["label"]} <= {row[1] for row in rows}
    assert data.get("commands", {}).items() <= {label: command for _, label, command in rows}.items()


def commands(page):
    """The lines of a page's shell examples that call `wbmm`, without comments; lines that go on are joined."""
    text = re.sub(r"\\\n\s*", "", (ROOT / page).read_text(encoding="utf-8"))
    for block in re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] == "wbmm":
                yield words[1:]


@pytest.mark.parametrize("page", CHECKED)
def test_commands_in_the_docs_have_arguments_that_exist(page, capsys):
    for name, *arguments in commands(page):
        module = importlib.import_module(cli.COMMANDS[name][0])
        parser = argparse.ArgumentParser(prog=f"{page}: wbmm {name}")
        module.add_arguments(parser)
        try:
            parse = parser.parse_args if name in ("bench", "table", "analyze") else parser.parse_intermixed_args
            parse(arguments)
        except SystemExit:
            pytest.fail(f"wbmm {name} {shlex.join(arguments)}: {capsys.readouterr().err.splitlines()[-1]}")


def test_the_drawing_of_the_operator_is_what_its_script_draws():
    spec = importlib.util.spec_from_file_location("draw_operator", ROOT / "scripts" / "draw_operator.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.TARGET.read_text(encoding="utf-8") == script.draw()

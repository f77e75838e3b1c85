"""scripts/compare_commits.py: the speed of two trees, in turn."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compare_commits", ROOT / "scripts" / "compare_commits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_tree_runs_every_case(script):
    cases = ["infer:wbmm_a:1:32", "train:wbmm_a:2:32"]
    times = script.measure(ROOT, cases, calls=1, seconds=0)
    assert list(times) == cases
    assert min(times.values()) > 0


def test_a_case_that_cannot_run_is_one_line(script):
    with pytest.raises(SystemExit, match="Unknown model \\(nosuch\\)"):
        script.measure(ROOT, ["infer:nosuch:1:32"], calls=1, seconds=0)


def test_a_slower_commit_has_ratios_above_one(script, monkeypatch):
    order = []
    times = {"other": {"a": 3.0}, script.ROOT: {"a": 2.0}}
    monkeypatch.setattr(script, "measure", lambda tree, cases, calls, seconds: order.append(tree) or times[tree])
    assert script.compare("other", ["a"], rounds=2) == {"a": [1.5, 1.5]}
    assert order == ["other", script.ROOT, script.ROOT, "other"]

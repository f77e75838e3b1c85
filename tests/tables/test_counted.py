"""Tables in which nothing is timed, what the paper contradicts itself in, and that every table has its command."""

import re
from pathlib import Path

import pytest

from wbmm import cli
from wbmm.bench import detectors, segmentors
from wbmm.paper_tables import load_commands, load_dense_tables, load_tables
from wbmm.tables.counted import COUNTED
from wbmm.tables.table_page import contradictions, dense_contradictions

ROOT = Path(__file__).parents[2]


def rows(text):
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]


def test_every_table_of_the_paper_has_a_command_that_is_there(capsys):
    commands = load_commands()
    assert len(commands) == 20
    for command in commands.values():
        kind, name = command.split()[1:3] if command != "wbmm list" else ("list", "")
        assert kind in ("table", "bench", "list")
        assert kind != "table" or name in {*load_tables(), *COUNTED}
    assert cli.main(["table", "list"]) == 0
    assert set(commands) <= {row[0] for row in rows(capsys.readouterr().out)}


def test_the_documentation_lists_them_all():
    page = (ROOT / "docs" / "ablations.md").read_text()
    for label, command in load_commands().items():
        assert re.search(rf"\| `{label}` \|[^|]+\| `{re.escape(command)}` \|", page), label


def test_one_net_with_three_figures():
    found = " ".join(contradictions("windows"))
    assert "`w7` has mIoU 48.0 here and, for the same net, 48.3 in `cross-operator/wbmm`, 48.32 in `patterns/" in found
    assert "0.954x for T at 512x512, batch 2" in found


def test_memory_that_is_not_lower():
    assert any("15.16 against 14.77 GB" in text for text in contradictions("cross-operator"))
    assert not any("GB" in text for text in contradictions("windows"))


def test_figures_that_agree_are_not_contradictions():
    assert not any("`hier`" in text for text in contradictions("windows")), "48.8 in both tables"
    assert contradictions("base") == []
    assert contradictions("no such table") == []
    assert dense_contradictions() == ["`7x7-t` has mIoU 48.3 here and 48.0 in `windows/w7`."]


def test_our_recipes_are_the_papers():
    found = rows(COUNTED["recipes"]())[2:]
    assert len(found) == 13
    assert {row[-1] for row in found} == {"yes"}


def test_the_family():
    found = {row[0]: row for row in rows(COUNTED["specs"]())}
    assert found["wbmm_t"][2:4] == ["DDD WDW (WD)x9 WWW", "7 7 7 7"]
    assert found["wbmm_p"][4:6] == ["10.6", "10.6"]
    assert found["wbmm_s_hier"][3] == "14+7 14+7 14 7"


def test_attention_grows_with_the_batch_and_the_table_does_not():
    found = [row for row in rows(COUNTED["attention"]()) if row[0].startswith("S1")]
    assert [row[1] for row in found] == ["1", "16", "128"]
    looked_up, computed = ([float(row[column]) for row in found] for column in (2, 3))
    assert len(set(looked_up)) == 1
    assert computed[2] == pytest.approx(128 * computed[0], rel=0.05)


@pytest.mark.parametrize("name", ["ade20k", "coco"])
def test_segmentors_and_detectors(name, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(segmentors, "count", lambda backbone, size: (61_900_000, 944_000_000_000))
    monkeypatch.setattr(detectors, "build", lambda backbone, size: None)
    monkeypatch.setattr(detectors, "count", lambda detector: (88_500_000, 0, {"": 747_000_000_000}))
    assert cli.main(["table", name, "--out", str(tmp_path)]) == 0
    table = load_dense_tables()[name]
    found = {row[0]: row for row in rows((tmp_path / f"{name}.md").read_text())}
    for row in table.rows:
        cells = found[f"{row.backbone}, {row.size.upper()}"]
        assert cells[2] == str(row.paper["params"])
        assert cells[4] == str(row.paper["flops"])
        assert cells[5:] == [str(row.paper[key]) for key in list(row.paper)[2:]]
    assert f"wbmm table {name}" in capsys.readouterr().out

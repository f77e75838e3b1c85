"""The tables as data: what the paper prints, and that every row's size is that or a known difference."""

import pytest
import yaml

from wbmm.bench.training import epoch_seconds
from wbmm.paper_tables import get_table, load_tables, read_tables
from wbmm.tables.measure import Measured, count_costs, records
from wbmm.tables.table_page import differences
from wbmm.zoo import load_zoo

NAMES = [
    *("imagenet", "cross-operator", "feature-extraction", "patterns", "windows", "padding", "convnext", "base"),
    "multi-kernel",
]
ROWS = [(table, row) for table in load_tables().values() for row in table.rows]
IN_ZOO = [row for _, row in ROWS if not row.args and row.model in load_zoo()]
PRINTED = [(table, row) for table, row in ROWS if "params" in row.paper and not row.large_kernel]
# What we count is further from the paper's figure than its rounding, in either form; docs/models.md, baselines.md.
DIFFERENT = {
    "wbmm-p": ["flops_g"],
    "p-multi": ["flops_g"],
    "wbmm-s": ["flops_g"],
    "wbmm-b": ["params_m"],
    "wbmm-hier": ["flops_g"],
    "dw13-reparam": ["params_m"],
    "slak": ["params_m"],
    "slak-all": ["params_m"],
    "win-attn": ["params_m", "flops_g"],
}


def test_the_papers_tables():
    assert list(load_tables()) == NAMES
    assert [len(table.rows) for table in load_tables().values()] == [12, 9, 6, 8, 5, 3, 2, 2, 4]
    assert sum(row.large_kernel for _, row in ROWS) == 6


@pytest.mark.parametrize(("table", "row"), PRINTED, ids=[row.id for _, row in PRINTED])
def test_sizes_are_the_papers(table, row):
    (record,) = records(Measured(table, [row], {row.id: count_costs(row.model, row.args)}))
    assert differences(record) == DIFFERENT.get(row.id, [])


def test_models_of_the_zoo_have_its_figures():
    assert len(IN_ZOO) == 17
    for row in IN_ZOO:
        assert {key: row.paper[key] for key in ("params", "flops", "top1")}.items() <= load_zoo()[
            row.model
        ].paper.items()


def test_lka_rows_are_the_nets_of_the_rows_without():
    for table, row in ROWS:
        if row.large_kernel:
            plain = table.row(row.id.removesuffix("-lka"))
            assert (plain.model, plain.args) == (row.model, row.args)
            assert (plain.small_model, plain.small_args) == (row.small_model, row.small_args)
            assert all(plain.paper[key] == row.paper[key] for key in ("params", "flops", "memory", "top1"))


def test_the_printed_speedups_follow_from_the_printed_times():
    checked = 0
    for table, row in ROWS:
        if "speedup" in row.paper:
            ratio = epoch_seconds(row.paper["time"]) / epoch_seconds(table.row(row.baseline).paper["time"])
            assert ratio == pytest.approx(row.paper["speedup"], abs=0.0051)
            checked += 1
    assert checked == 8


def test_a_rows_arguments_come_before_its_tables():
    table = get_table("feature-extraction")
    assert table.row("half").args == {"pattern": ["WWW", "WWW", "(W)x18", "WWW"], "mixer": "half"}
    assert table.row("half").small_args == {"pattern": ["WW", "WW", "(W)x6", "WW"], "mixer": "half"}
    row = get_table("cross-operator").row("slak-all")
    assert row.small_args == {"mixer": "slak", "pattern": ["WW", "WW", "(W)x6", "WW"]}


def test_select_adds_the_baselines():
    table = get_table("imagenet")
    assert [row.id for row in table.select(["unireplknet-t"])] == ["wbmm-t", "unireplknet-t"]
    assert table.select(None) == list(table.rows)


def test_bad_names():
    with pytest.raises(ValueError, match=r"no table 'cross'; expected one of imagenet, cross-operator"):
        get_table("cross")
    with pytest.raises(ValueError, match=r"table 'convnext' has no row 'x'; its rows: convnext-t, convnext-t-wbmm"):
        get_table("convnext").select(["x"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, r"unknown key 'colour'"),
        ({"paper": {"acc": 1}}, r"paper: unknown key 'acc'"),
        ({"small": {"net": "wbmm_a"}}, r"small: unknown key 'net'"),
        ({"small": {}}, r"needs `model`, and a model under `small`"),
        ({"baseline": "none"}, r"has no row 'none'"),
    ],
)
def test_a_bad_file(tmp_path, change, message):
    row = {"label": "A", "model": "wbmm_a", "small": {"model": "wbmm_a"}, **change}
    path = tmp_path / "tables.yaml"
    path.write_text(yaml.safe_dump({"tables": {"t": {"label": "tab:t", "title": "T", "rows": {"a": row}}}}))
    with pytest.raises(ValueError, match=message):
        read_tables(path)

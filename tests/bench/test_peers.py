"""`wbmm bench peers`: every net exists and has a source, the run goes on, and the pictures show what was measured."""

import csv
import xml.etree.ElementTree as ElementTree

import pytest
import timm

from wbmm import cli
from wbmm.bench import peers


def small(*more: str) -> list[str]:
    return ["bench", "peers", "convnext_atto", "wbmm_p", "--px", "32", "--rounds", "1", *more]


@pytest.fixture
def _atto(monkeypatch):
    monkeypatch.setattr(peers, "BASELINE", "convnext_atto")


def test_every_net_is_known_to_timm_and_names_its_source():
    known = peers.peers()
    assert {"wbmm_p", "wbmm_t", "unireplknet_t", "convnext_tiny"} <= set(known)
    for peer in known.values():
        assert timm.is_model(peer.model)
        assert 70 < peer.top1 < 90
        assert peer.source
        assert peer.family in peers.COLOURS
    assert known["wbmm_t"].top1 == 83.2


@pytest.mark.usefixtures("_atto")
def test_table_files_and_pictures(tmp_path, capsys):
    assert cli.main(small("--precisions", "float32", "bfloat16", "--out", str(tmp_path))) == 0
    assert "top-1 %, published" in capsys.readouterr().out
    with (tmp_path / "peers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["model"], row["precision"]) for row in rows} == {
        (model, precision) for model in ("convnext_atto", "wbmm_p") for precision in ("float32", "bfloat16")
    }
    for precision in ("float32", "bfloat16"):
        root = ElementTree.parse(tmp_path / f"peers-{precision}.svg").getroot()
        text = "".join(root.itertext())
        assert "wbmm_p, 80.3 %" in text
        assert "convnext_atto, 75.7 %" in text
        assert "prefers-color-scheme:dark" in text
    assert not (tmp_path / "peers-int8.svg").exists()


@pytest.mark.usefixtures("_atto")
def test_a_second_call_goes_on(tmp_path, monkeypatch, capsys):
    assert cli.main(small("--precisions", "float32", "--out", str(tmp_path))) == 0
    monkeypatch.setattr(peers, "measure", lambda nets, *_: {net.model: {"seconds": [1.0]} for net in nets})
    assert cli.main(small("--out", str(tmp_path))) == 0
    assert "1 of 3 cells were measured before" in capsys.readouterr().err
    assert (tmp_path / "peers-int8.svg").exists()


@pytest.mark.usefixtures("_atto")
def test_dry_run_measures_nothing(monkeypatch, capsys):
    monkeypatch.setattr(peers, "measure", lambda *_: pytest.fail("measured"))
    assert cli.main(small("--dry-run")) == 0
    assert "precision int8" in capsys.readouterr().out


def test_a_net_without_top1(capsys):
    assert cli.main(["bench", "peers", "resnet18"]) == 1
    assert "'resnet18' has no published top-1 here" in capsys.readouterr().err


@pytest.mark.heavy
def test_int8(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "BASELINE", "convnext_atto")
    assert cli.main(small("--precisions", "int8", "--out", str(tmp_path))) == 0
    assert "INT8, OpenVINO" in (tmp_path / "peers.md").read_text()

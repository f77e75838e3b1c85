"""Configuration text inside checkpoints: read as data, changed in place, never run."""

import pytest

from wbmm.mm.mm_checkpoint import read_model, set_backbone_form

TEXT = """crop = (512, 512)  # größe
model = dict(
    backbone=dict(
        arch='wbmm_t_hier', drop_path_rate=-0.2, out_indices=(0, 1), type='WBMMBackbone'),
    decode_head=dict(channels=[8, 16], loss={'type': 'CE', 1: None}),
    name='größe')
other = open('/etc/passwd').read()
"""


def test_read():
    model = read_model(TEXT)
    assert model["backbone"] == {
        "arch": "wbmm_t_hier",
        "drop_path_rate": -0.2,
        "out_indices": (0, 1),
        "type": "WBMMBackbone",
    }
    assert model["decode_head"] == {"channels": [8, 16], "loss": {"type": "CE", 1: None}}


def test_set_form():
    changed = set_backbone_form(TEXT, "compact")
    assert read_model(changed)["backbone"] == {**read_model(TEXT)["backbone"], "form": "compact"}
    assert changed.replace("form='compact', ", "") == TEXT
    again = set_backbone_form(changed, "dense")
    assert read_model(again)["backbone"]["form"] == "dense"
    assert again.count("form=") == 1


@pytest.mark.parametrize(
    "text",
    [
        "model = dict(backbone=__import__('os').mkdir('pwned'))",
        "model = dict(**open('x'))",
        "model = list(a=1)",
        "model = dict(a=b)",
        "model = [1]",
        "model =",
        "",
        "x = 1",
        "\0",
    ],
)
def test_anything_else_is_left_alone(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_model(text) is None
    assert set_backbone_form(text, "compact") == text
    assert list(tmp_path.iterdir()) == []

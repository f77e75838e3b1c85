"""`wbmm bench det`: the cost of a whole detector, beside the paper's."""

from pathlib import Path

import pytest

pytest.importorskip("mmdet")

from mmengine.config import Config

from wbmm import cli
from wbmm.bench.det import PAPER, build, count

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("letter", "name"), [key for key in PAPER if key[0] == "t"])
def test_the_papers_flops(letter, name):
    params, fused, macs = count(build(name, letter))
    assert fused < params
    assert macs[""] / 1e9 == pytest.approx(PAPER[letter, name][1], abs=1)
    assert macs[""] == sum(value for part, value in macs.items() if part)
    if name != "hier":  # its tables add 2.0 M by our count, where the paper adds 3
        assert round(params / 1e6) == PAPER[letter, name][0]


def test_what_is_counted_is_what_the_configuration_builds():
    """Nothing is left out of the configuration's model, and nothing added to it: parameters agree, name by name."""
    from tests.mm.test_configs import build_on_meta

    path = ROOT / "configs" / "coco" / "wbmm-t-dense_cascade-mask-rcnn_8xb2-3x_coco.py"
    configured = build_on_meta(Config.fromfile(path)).state_dict()
    counted = build("7x7", "t").state_dict()
    renamed = {key.removeprefix("roi_head."): value.shape for key, value in configured.items()}
    assert renamed == {key: value.shape for key, value in counted.items()}


def test_the_command(capsys):
    assert (
        cli.main(["bench", "det", "--cost", "--models", "t", "--backbones", "7x7", "--sizes", "96x128", "--markdown"])
        == 0
    )
    out = capsys.readouterr().out
    assert "| 7x7, T" in out
    assert "| --" in out, "no figure of the paper at another size"
    assert cli.main(["bench", "det", "--cost", "--sizes", "8x8"]) == 1
    assert "at least 32" in capsys.readouterr().err

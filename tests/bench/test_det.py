"""`wbmm bench det`: the cost of a whole detector, beside the paper's."""

import pytest

pytest.importorskip("mmdet")

from wbmm import cli
from wbmm.bench.det import PAPER, build, count


@pytest.mark.parametrize(("letter", "name"), [key for key in PAPER if key[0] == "t"])
def test_the_papers_flops(letter, name):
    params, macs = count(build(name, letter))
    assert macs[""] / 1e9 == pytest.approx(PAPER[letter, name][1], abs=1)
    assert macs[""] == sum(value for part, value in macs.items() if part)
    if name != "hier":  # its tables add 2.0 M by our count, where the paper adds 3
        assert params / 1e6 == pytest.approx(PAPER[letter, name][0], abs=0.6)


def test_the_command(capsys):
    assert cli.main(["bench", "det", "--models", "t", "--backbones", "7x7", "--size", "96", "128", "--markdown"]) == 0
    out = capsys.readouterr().out
    assert "| 7x7, T" in out
    assert "| --" in out, "no figure of the paper at another size"
    assert cli.main(["bench", "det", "--size", "8", "8"]) == 1
    assert "at least 32" in capsys.readouterr().err

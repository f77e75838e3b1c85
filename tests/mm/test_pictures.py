"""Colours that can be told apart, sheets of pictures, and imports that say nothing of what nobody asked for."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from wbmm.mm import _import_quietly
from wbmm.mm.pictures import TILE, _lab, class_colours, distinct_colours, draw_examples


def test_colours_can_be_told_apart():
    for count, least in ((11, 40), (20, 30), (40, 15)):
        places = _lab(distinct_colours(count) / 255)
        distances = np.linalg.norm(places[:, None] - places[None], axis=-1) + 1e3 * np.eye(count)
        assert distances.min() > least, count
    assert distinct_colours(0).shape == (0, 3)
    assert len({tuple(colour) for colour in distinct_colours(150)}) == 150
    np.testing.assert_array_equal(class_colours(2, [[1, 2, 3], [4, 5, 6], [7, 8, 9]]), [[1, 2, 3], [4, 5, 6]])
    np.testing.assert_array_equal(class_colours(4, [[1, 2, 3]]), distinct_colours(4))


def test_a_mosaic():
    rows = [[Image.new("RGB", (40, 20), (9, 9, 9)), Image.new("RGB", (40, 20), (200, 0, 0))]] * 3
    sheet = draw_examples(rows, ("annotated", "predicted"))
    assert sheet.width > 2 * TILE
    assert sheet.height > 3 * TILE // 2
    assert (np.asarray(sheet) == (200, 0, 0)).all(-1).sum() == 3 * TILE * TILE // 2


def test_imports_are_quiet_about_onedl_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "noisy_module_of_a_test.py").write_text("print('Could not import OneDL')\nprint('hello')\n")
    monkeypatch.syspath_prepend(tmp_path)
    _import_quietly("noisy_module_of_a_test")
    assert capsys.readouterr().out == "hello\n"


@pytest.mark.parametrize("extra", ["seg", "det"])
def test_the_packages_are_imported_quietly(extra):
    pytest.importorskip({"seg": "mmseg", "det": "mmdet"}[extra])
    line = f"from wbmm.mm.tools import prepare_packages; prepare_packages({extra!r})"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert "OneDL" not in done.stdout + done.stderr
    assert "faster_coco_eval" not in done.stdout + done.stderr

"""What wbmm/downstream_counts.yaml says of segmentors and detectors is what is counted."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("mmseg")

from wbmm.zoo import load_downstream, load_downstream_counts

_path = Path(__file__).parents[2] / "scripts" / "count_zoo.py"
_spec = importlib.util.spec_from_file_location("count_zoo", _path)
count_zoo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(count_zoo)


def check(name):
    counted = count_zoo.count_downstream(load_downstream()[name])
    assert load_downstream_counts()[name] == counted, "run: python scripts/count_zoo.py --downstream"


def test_a_segmentor():
    check("wbmm-t-hier_upernet")


def test_a_detector():
    pytest.importorskip("mmdet")
    check("wbmm-a_mask-rcnn")


@pytest.mark.heavy
@pytest.mark.parametrize("name", load_downstream())
def test_all(name):
    pytest.importorskip("mmdet")
    check(name)

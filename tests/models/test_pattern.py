"""Patterns and windows as data: every row of the paper's tables is one call; a wrong one says what was expected."""

import pytest
import timm
import torch

from wbmm.layers import DepthwiseConv2d, HierarchicalWBMM2d, MultiKernelWBMM2d, WBMM2d

TABLE_3 = [
    ("WWW", "WWW", "(WW)x9", "WWW"),
    ("WWW", "WWW", "(WD)x9", "WWW"),
    ("DDD", "WWW", "(WD)x9", "WWW"),
    ("DDD", "WDW", "(WD)x9", "WWW"),
    ("WDW", "WWW", "(WD)x9", "WWW"),
    ("WDW", "WDW", "(WD)x9", "WWW"),
    ("WDW", "WDW", "(WD)x9", "WDW"),
    ("DWD", "WDW", "(WD)x9", "WWW"),
]
TABLE_4 = [(7, 7, 7, 7), (14, 14, 14, 14), (14, 14, 14, 7), ("14+7", "14+7", 14, 7), ("14+7", "14+7", "14+7", 7)]


@pytest.mark.parametrize("pattern", TABLE_3)
def test_rows_of_table_3(pattern):
    model = timm.create_model("wbmm_t", pattern=pattern, device="meta")
    kinds = "".join("D" if isinstance(b.mixer, DepthwiseConv2d) else "W" for s in model.stages for b in s.blocks)
    assert kinds == "".join(model.patterns)
    assert model.patterns[2] == ("WW" if pattern[2] == "(WW)x9" else "WD") * 9
    assert model(torch.zeros(1, 3, 64, 64, device="meta")).shape == (1, 1000)


@pytest.mark.parametrize("windows", TABLE_4)
def test_rows_of_table_4(windows):
    model = timm.create_model("wbmm_t_dense", window_size=windows, device="meta")
    for stage, window in zip(model.stages, windows, strict=True):
        mixer = stage.blocks[0].mixer
        assert isinstance(mixer, HierarchicalWBMM2d if window == "14+7" else WBMM2d)
        assert mixer.window == ((14, 14) if window in (14, "14+7") else (7, 7))
    assert model(torch.zeros(1, 3, 96, 64, device="meta")).shape == (1, 1000)


def test_one_window_for_all_and_pairs():
    wide = timm.create_model("wbmm_a", window_size=(3, 5), num_classes=2)
    assert {m.window for m in wide.modules() if isinstance(m, (WBMM2d, MultiKernelWBMM2d))} == {(3, 5)}
    assert wide(torch.randn(1, 3, 40, 40)).shape == (1, 2)
    assert timm.create_model("wbmm_a_dense", window_size="6+3", device="meta").windows[0].hierarchical


def test_patterns_as_lists_of_letters():
    model = timm.create_model("wbmm_a", pattern=[["D", "D"], ["W", "D"], list("WDWDWD"), ["W", "W"]], device="meta")
    assert model.patterns == ("DD", "WD", "WDWDWD", "WW")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pattern": ("DD", "WD", "WD", "WW")}, "stage 3 has 2 blocks; depths says 6"),
        ({"pattern": ("DD", "WX", "WDWDWD", "WW")}, "'WX' of stage 2: 'X' is not a block; use W .WBMM., D"),
        ({"pattern": ("DD", "WD", "WW")}, "one entry for each of the 4 stages"),
        ({"depths": (2, 2)}, "depths .2, 2.: expected one number for each of the 4 stages"),
        ({"pattern": "DDWD"}, "one entry for each of the 4 stages"),
        ({"pattern": ("DD", "", "WDWDWD", "WW")}, "'' of stage 2: 'empty' is not a block"),
        ({"window_size": "14+6"}, "'14.6': a hierarchical window is written 'G.L' with G twice L"),
        ({"window_size": (7, 7, 7)}, "one window, or one for each of 4 stages"),
        ({"window_size": 0}, "window size 0: expected a positive int"),
        ({"window_size": "14+7"}, "an M block has no hierarchical form"),
        ({"dims": (40, 80)}, "expected 4 multiples of 8"),
        ({"padding_mode": "wrap"}, "'wrap': expected one of zeros, reflect, replicate"),
    ],
)
def test_what_is_wrong_is_said(arguments, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model("wbmm_a", device="meta", **arguments)

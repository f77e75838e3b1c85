"""Counting: parameters, multiply-adds, receptive fields."""

import timm
import torch

from wbmm.models.costs import Reach, build_on_meta, count_macs, count_params, receptive_fields
from wbmm.models.named_mixers import parse_windows


def test_macs_of_known_layers():
    conv = torch.nn.Conv2d(3, 8, 3, padding=1)
    assert count_macs(conv, (10, 12))[""] == 8 * 3 * 9 * 120
    model = build_on_meta("wbmm_a")
    macs = count_macs(model, (224, 224))
    parts = [macs["stem"], *(macs[f"stages.{i}"] for i in range(4)), macs["head"]]
    assert sum(parts) == macs[""]
    assert macs["stem"] == 112 * 112 * 20 * 27 + 56 * 56 * 40 * 20 * 9
    assert macs["stages.1.blocks.0.mixer"] == 80 * 16 * 49 * 49


def test_meta_and_real_models_count_alike():
    real, meta = timm.create_model("wbmm_a").eval(), build_on_meta("wbmm_a")
    assert count_params(real) == count_params(meta)
    assert count_macs(real, (64, 96))[""] == count_macs(meta, (64, 96))[""]


def test_reach_of_convolutions_and_windows():
    assert Reach.of_input(32).conv(3, 2).conv(3, 2).largest() == 7
    windows = Reach.of_input(10).windows(4)
    assert windows.low == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]
    assert windows.high == [3, 3, 3, 3, 7, 7, 7, 7, 9, 9]


def test_receptive_field_is_what_the_gradient_sees():
    """Against the input pixels with a gradient, in a net whose SE and GRN are switched off."""
    patterns, size = ("WD", "W", "D", "W"), (90, 70)
    model = (
        timm.create_model(
            "wbmm_a", pattern=patterns, depths=(2, 1, 1, 1), window_size=(3, 2), dims=(8, 8, 8, 8), ls_init_value=1.0
        )
        .double()
        .eval()
    )
    for module in model.modules():
        if type(module).__name__ == "SqueezeExcite":
            module.fc1.weight.data.zero_()
    fields = receptive_fields(size, patterns, parse_windows((3, 2)))
    x = torch.randn(1, 3, *size, dtype=torch.float64, requires_grad=True)
    maps = model.forward_intermediates(x, intermediates_only=True)
    for feature, expected in zip(maps, fields[1:], strict=True):
        largest = [0, 0]
        for i in range(feature.shape[2]):
            for j in range(feature.shape[3]) if i in (0, feature.shape[2] // 2) else [feature.shape[3] // 2]:
                (grad,) = torch.autograd.grad(feature[0, :, i, j].sum(), x, retain_graph=True)
                seen = grad[0].abs().sum(0) > 0
                largest[0] = max(largest[0], int(seen.any(1).nonzero().max() - seen.any(1).nonzero().min()) + 1)
                largest[1] = max(largest[1], int(seen.any(0).nonzero().max() - seen.any(0).nonzero().min()) + 1)
        assert tuple(largest) == expected

"""Effective receptive fields of nets whose field is known, and `wbmm analyze erf`."""

import json

import pytest
import timm
import torch
import torch.nn as nn

import wbmm
from wbmm.analysis.erf import area_ratio, effective_field, smallest_square


class Map(nn.Module):
    """A net whose map is what a few convolutions give."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward_features(self, x):
        return self.layers(x)


def conv(kernel, stride=1, dilation=1):
    layer = nn.Conv2d(1, 1, kernel, stride, padding=dilation * (kernel // 2), dilation=dilation, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    return layer


def test_a_box_blur_has_its_kernel_as_field():
    field = effective_field(Map(conv(5)), torch.randn(3, 1, 21, 21))
    expected = torch.zeros(21, 21, dtype=torch.float64)
    expected[8:13, 8:13] = 1 / 25
    torch.testing.assert_close(field, expected, check_dtype=False, atol=1e-9, rtol=0)
    assert smallest_square(field, 1.0) == (5, 8, 8)
    assert area_ratio(field, 0.99) == pytest.approx(25 / 441)


def test_two_blurs_make_a_triangle():
    field = effective_field(Map(conv(3), conv(3)), torch.randn(2, 1, 15, 15))
    triangle = torch.tensor([1.0, 2, 3, 2, 1], dtype=torch.float64) / 9
    torch.testing.assert_close(field[5:10, 5:10], triangle[:, None] * triangle[None])
    assert smallest_square(field, 0.5) == (3, 6, 6)  # 49 of 81


def test_rows_and_columns_are_not_mixed_up():
    wide = nn.Conv2d(1, 1, (1, 7), padding=(0, 3), bias=False)
    nn.init.constant_(wide.weight, 1.0)
    field = effective_field(Map(wide), torch.randn(1, 1, 15, 21))
    assert field[7].count_nonzero() == 7
    assert field.count_nonzero() == 7
    assert field[7, 7:14].sum().item() == pytest.approx(1)


def test_an_even_map_is_seen_from_its_middle():
    field = effective_field(Map(conv(1)), torch.randn(1, 1, 8, 8))
    assert field[3:5, 3:5].tolist() == [[0.25, 0.25], [0.25, 0.25]]
    assert torch.equal(field, field.flip(0))
    assert torch.equal(field, field.flip(1))


def test_a_field_off_the_middle_is_not_larger():
    """A strided convolution with padding looks half a stride further up and left."""
    field = torch.zeros(20, 20)
    field[2:6, 11:15] = 1
    assert smallest_square(field, 1.0) == (4, 2, 11)
    assert area_ratio(field, 1.0) == area_ratio(field.roll((5, -5), (0, 1)), 1.0)
    assert area_ratio(torch.ones(20, 20), 0.25) == 0.25


def test_every_image_counts_alike_and_scale_does_not_matter():
    net = Map(conv(3), nn.Tanh(), conv(3))
    images = torch.randn(4, 1, 15, 15)
    one = effective_field(net, images, batch=4)
    torch.testing.assert_close(one, effective_field(net, images.flip(0), batch=3))
    with torch.no_grad():
        net.layers[2].weight.mul_(-50)
    torch.testing.assert_close(one, effective_field(net, images, batch=1))
    assert one.sum().item() == pytest.approx(1)


def test_windows_bound_the_field_of_a_w_block(trained):
    """The middle of a 14x14 map lies in all four windows of 7x7; one D block reaches one position across."""
    layer = wbmm.WBMM2d(1, 7)
    with torch.no_grad():
        layer.table.fill_(1.0)
    x = torch.randn(1, 1, 21, 21)
    assert effective_field(Map(layer), x).nonzero().aminmax(dim=0).min.tolist() == [7, 7]
    assert effective_field(Map(layer), x).nonzero().aminmax(dim=0).max.tolist() == [13, 13]
    both = effective_field(Map(layer, conv(3)), torch.randn(1, 1, 28, 28))
    assert both.nonzero().aminmax(dim=0).min.tolist() == [7, 7]
    assert both.nonzero().aminmax(dim=0).max.tolist() == [20, 20]


def test_training_and_fused_forms_have_one_field(trained):
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(
        effective_field(wbmm.fuse(trained), images), effective_field(trained, images), atol=1e-7, rtol=1e-3
    )


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet10t"])
def test_any_model_of_timm(name):
    options = {"img_size": 64} if name.startswith("vit") else {}
    field = effective_field(timm.create_model(name, **options).eval(), torch.randn(1, 3, 64, 64))
    assert field.sum().item() == pytest.approx(1)


def test_the_command(forms, images, command, tmp_path, capsys):
    options = ("--images", images / "val", "--most", "3", "--out", tmp_path)
    models = (forms["compact"], "convnext_atto", "--random-weights")
    assert command("analyze", "erf", *models, *options) == 0
    out = capsys.readouterr().out
    assert "32x32 px, 3 photographs" in out
    assert "convnext_atto, untrained" in out
    facts = json.loads((tmp_path / "erf.json").read_text())
    for model in facts["models"]:
        areas = list(model["area_ratio"].values())
        assert areas == sorted(areas)
        assert 0 < areas[0] < 1
    assert {"erf.png", "erf.pdf", "erf.md"} <= {path.name for path in tmp_path.iterdir()}
    assert command("analyze", "erf", forms["compact"], "--stage", "7", "--out", tmp_path / "b", "--most", "1") == 1
    assert "--stage 7: a WBMM has maps 1 to 4" in capsys.readouterr().err

"""Grad-CAM of nets whose answer is known, in every layout and form, and `wbmm analyze cam`."""

import json

import pytest
import timm
import torch
import torch.nn as nn

import wbmm
from wbmm.analysis.cam import activation_maps, target_layer

pytest.importorskip("pytorch_grad_cam")


class Corner(nn.Module):
    """Two channels of a map as logits: the mean of red, and the mean of green. Its map may be NCHW, NHWC or tokens."""

    feature_info = [{"module": "body"}]  # noqa: RUF012

    def __init__(self, layout):
        super().__init__()
        self.layout, self.body, self.conv = layout, nn.Identity(), nn.Conv2d(3, 2, 4, 4, bias=False)
        self.output_fmt = "NHWC" if layout == "NHWC" else "NCHW"
        self.num_prefix_tokens = 1 if layout == "tokens" else 0
        self.patch_embed = type("Grid", (), {"grid_size": (4, 6)})()
        with torch.no_grad():
            self.conv.weight.zero_()[0, 0] = 1
            self.conv.weight[1, 1] = 1

    def forward(self, x):
        x = self.conv(x)
        if self.layout == "NCHW":
            return self.body(x).mean((2, 3))
        x = x.permute(0, 2, 3, 1)
        if self.layout == "NHWC":
            return self.body(x).mean((1, 2))
        x = x.flatten(1, 2)
        return self.body(torch.cat([torch.zeros_like(x[:, :1]), x], 1)).mean(1)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "tokens"])
def test_the_map_is_where_the_class_is(layout):
    image = torch.zeros(1, 3, 16, 24)
    image[:, 0, :4, 20:] = 1  # red in the upper right corner
    image[:, 1, 12:, 4:8] = 1  # green below, on the left
    red, _ = activation_maps(Corner(layout), image.clone(), [0])
    green, logits = activation_maps(Corner(layout), image.clone(), [1])
    assert red.shape == (1, 16, 24)
    assert logits.shape == (1, 2)
    assert divmod(int(red[0].argmax()), 24)[0] < 4
    assert divmod(int(red[0].argmax()), 24)[1] >= 20
    assert divmod(int(green[0].argmax()), 24)[0] >= 12
    assert 4 <= divmod(int(green[0].argmax()), 24)[1] < 8
    assert red[0, 8:, :12].max() < 0.05


def test_without_a_class_it_is_the_predicted_one():
    image = torch.zeros(1, 3, 16, 24)
    image[:, 1, :4, :4] = 1
    assert torch.equal(*(activation_maps(Corner("NCHW"), image.clone(), c)[0] for c in (None, [1])))


def test_training_and_fused_forms_look_at_the_same_place(trained):
    images = torch.randn(2, 3, 64, 64)
    for stage in (None, 2):
        one = activation_maps(trained, images.clone(), [0, 3], stage)
        for form in ("compact", "dense"):
            other = activation_maps(wbmm.fuse(trained, form), images.clone(), [0, 3], stage)
            torch.testing.assert_close(one[0], other[0], atol=1e-3, rtol=1e-2)
            torch.testing.assert_close(one[1], other[1], atol=1e-4, rtol=1e-4)
    assert one[0].amax((1, 2)).tolist() == pytest.approx([1, 1], abs=1e-3)


def test_target_layers():
    net = timm.create_model("wbmm_a", num_classes=2)
    assert target_layer(net)[0] is net.stages[3]
    assert target_layer(net, 2)[0] is net.stages[1]
    assert target_layer(wbmm.fuse(net.eval()))[0].__class__.__name__ == "Stage"
    vit = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=2)
    assert target_layer(vit)[0] is vit.blocks[-1].norm1  # what follows gives patches no gradient
    with pytest.raises(ValueError, match="--stage 9: a WBMM has maps 1 to 4"):
        target_layer(net, 9)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_transformers_of_timm(name):
    net = timm.create_model(name, img_size=64, num_classes=3).eval()
    maps, _ = activation_maps(net, torch.randn(1, 3, 64, 64))
    assert maps.shape == (1, 64, 64)
    assert maps.max() > 0


def test_the_command(forms, images, command, tmp_path, capsys):
    argv = ("analyze", "cam", forms["compact"], images / "val", "--most", "3", "--stage", "2", "--out", tmp_path)
    assert command(*argv, "--class", "red") == 0
    facts = json.loads((tmp_path / "cam.json").read_text())
    assert [fact["class"] for fact in facts["images"]] == ["red"] * 3
    assert {"cam.png", "cam.pdf", "cam.md"} <= {path.name for path in tmp_path.iterdir()}
    capsys.readouterr()
    assert command(*argv, "--force", "--class", "pink") == 1
    assert "--class pink: give a name such as black, or a number from 0 to 3" in capsys.readouterr().err

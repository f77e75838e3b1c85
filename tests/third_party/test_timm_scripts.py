"""What timm's own scripts do: feature maps, a validation loop on a fused model."""

import timm
import torch
from timm.utils import reparameterize_model

import wbmm
from wbmm.layers import Block


def test_the_examples_of_feature_maps(example, capsys):
    names = example("Feature maps")
    assert "stride 32: 320 channels, (1, 320, 5, 7)" in capsys.readouterr().out
    assert [one.shape[1] for one in names["maps"]] == [80, 160]
    assert names["logits"].shape == (1, 50)


def test_the_validation_loop(example, capsys):
    names = example("timm's own scripts")
    assert names["top1"].count == names["top5"].count == 8
    assert not any(isinstance(module, Block) for module in names["model"].modules())  # all of them are fused
    assert "8 pictures, top-1" in capsys.readouterr().out
    # The same sums from the training form.
    model = timm.create_model("wbmm_a.tiny50", pretrained=True).eval()
    right = 0
    with torch.inference_mode():
        for images, target in names["loader"]:
            logits = model(images)
            torch.testing.assert_close(names["model"](images), logits, rtol=1e-3, atol=1e-3)
            right += (logits.argmax(1) == target).sum().item()
    assert names["top1"].avg == 100 * right / 8


def test_reparameterize_model_is_fuse():
    model = timm.create_model("wbmm_a.tiny50", pretrained=True).eval()
    images = torch.rand(1, 3, 56, 56)
    with torch.inference_mode():
        assert torch.equal(reparameterize_model(model)(images), wbmm.fuse(model)(images))
        assert any(isinstance(module, Block) for module in model.modules())  # it worked on a copy

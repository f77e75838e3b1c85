"""torchvision's Faster R-CNN on our feature maps: trains, predicts, and fuses."""

import torch


def test_the_example_of_the_page(example):
    names = example("torchvision's Faster R-CNN")
    losses = names["losses"]
    assert losses[-1] < 0.6 * losses[0]
    found, fused = names["found"], names["fused"]
    assert len(found["boxes"]) > 0
    assert set(found) == {"boxes", "labels", "scores"}
    torch.testing.assert_close(fused["scores"], found["scores"], rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(fused["boxes"], found["boxes"], rtol=1e-2, atol=0.1)

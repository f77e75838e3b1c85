"""segmentation_models_pytorch: our models as encoders, by name."""

import pytest
import torch
import torch.nn.functional as F

import wbmm

smp = pytest.importorskip("segmentation_models_pytorch", reason="segmentation_models_pytorch is not installed")


def test_the_example_of_the_page(example):
    names = example("segmentation_models_pytorch")
    losses = names["losses"]
    assert losses[-1] < 0.8 * losses[0]
    with torch.no_grad():
        torch.testing.assert_close(names["fused"](names["images"]), names["net"](names["images"]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["wbmm_a", "wbmm_t"])
def test_a_u_net_learns(name):
    net = smp.Unet(f"tu-{name}", encoder_weights=None, classes=2)
    assert net.encoder.out_channels[2:] == [dim * net.encoder.out_channels[2] for dim in (1, 2, 4, 8)]
    images = torch.rand(2, 3, 64, 64)
    labels = (images.mean(1) > 0.5).long()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    used = [name for name, parameter in net.encoder.named_parameters() if parameter.grad is None]
    assert used == []


@pytest.mark.parametrize("decoder", ["FPN", "UPerNet"])
def test_other_decoders(decoder):
    net = getattr(smp, decoder)("tu-wbmm_a_dense", encoder_weights=None, classes=3).eval()
    images = torch.rand(1, 3, 64, 96)
    with torch.no_grad():
        masks = net(images)
        assert masks.shape == (1, 3, 64, 96)
        torch.testing.assert_close(wbmm.fuse(net)(images), masks, rtol=1e-3, atol=1e-3)

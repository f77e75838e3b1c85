"""Validation counts each image once."""

import pytest
import torch

from wbmm.train.dist import World
from wbmm.train.validate import validate


class Share:
    """Images whose only pixel is their class, `wrong` of which the model below gets wrong."""

    def __init__(self, size: int, sizes: list[int], wrong: int = 0):
        targets = torch.arange(size) % 7
        pixels = torch.where(torch.arange(size) < wrong, (targets + 1) % 7, targets)
        self.size, self.batches = size, list(zip(pixels.split(sizes), targets.split(sizes), strict=True))

    def __iter__(self):
        return ((pixels[:, None, None, None].float(), targets) for pixels, targets in self.batches)


class Reader(torch.nn.Module):
    def forward(self, images):
        return torch.nn.functional.one_hot(images.flatten().long(), 7).float() * 20


def test_evaluation_counts_images_not_batches():
    world = World(0, 1, torch.device("cpu"))
    figures = validate(Reader(), Share(11, [4, 4, 3], wrong=3), world)
    assert figures["top1"] == pytest.approx(100 * 8 / 11)
    assert figures["loss"] == pytest.approx(20 * 3 / 11, rel=1e-5)


def test_an_image_lost_in_evaluation_is_an_error():
    world = World(0, 1, torch.device("cpu"))
    share = Share(11, [4, 4, 3])
    share.batches.pop()
    with pytest.raises(RuntimeError, match="counted 8 images, but the validation set has 11"):
        validate(Reader(), share, world)
    assert validate(Reader(), share, world, exact=False)["top1"] == 100


def test_an_evaluation_can_be_abandoned():
    assert validate(Reader(), Share(4, [4]), World(0, 1, torch.device("cpu")), stop=lambda: True) is None

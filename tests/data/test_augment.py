import pytest
from PIL import Image

from wbmm.data.augment import seeded, train_transform
from wbmm.data.settings import AugmentConfig, DataConfig


@pytest.mark.parametrize("auto", ["rand-m9-mstd0.5-inc1", "rand-m10-inc1", "rand-m0", "original", "augmix-m10"])
def test_no_strength_of_augmentation_fails(auto):
    """Posterize at its strongest keeps 0 bits of a pixel, which recent versions of Pillow refuse."""
    transform = train_transform(DataConfig(), AugmentConfig(auto=auto))
    image = Image.new("RGB", (40, 40), (200, 100, 50))
    for seed in range(150):
        with seeded(seed):
            assert transform(image).shape == (3, 224, 224)

"""Drawn landscapes: always the same, each another one, and unlike noise."""

import numpy as np

from wbmm.data.images import check_batch, draw_landscape
from wbmm.io.card import ModelCard


def test_a_number_is_a_picture():
    first, again, other = (np.asarray(draw_landscape(number), dtype=float) for number in (0, 0, 1))
    assert first.shape[2] == 3
    assert (first == again).all()
    assert np.abs(first - other).mean() > 10


def test_it_has_the_statistics_of_a_photograph():
    """Neighbours are alike but for edges, the channels are correlated, and light and dark are both there."""
    for number in range(4):
        picture = np.asarray(draw_landscape(number), dtype=float)
        grey = picture.mean(2)
        steps = np.abs(np.diff(grey, axis=1))
        assert np.corrcoef(grey[:, 1:].ravel(), grey[:, :-1].ravel())[0, 1] > 0.85
        assert steps.max() > 8 * steps.mean(), "no edges"
        assert np.corrcoef(picture[..., 0].ravel(), picture[..., 1].ravel())[0, 1] > 0.4
        assert grey.std() > 20


def test_a_batch_for_comparing():
    images, what = check_batch(ModelCard(model="x", input_size=(1, 40, 48), mean=(0.5,), std=(0.2,)), count=3)
    assert images.shape == (3, 1, 40, 48)
    assert what == "drawn landscapes"

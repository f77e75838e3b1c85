"""Which pictures are taken."""

import pytest

from wbmm.analysis.opening import find_pictures, spread


def test_pictures_are_spread_over_a_folder(images):
    assert spread(10, 3) == [0, 4, 9]
    assert spread(3, 5) == [0, 1, 2]
    assert spread(5, 1) == [0]
    found = find_pictures([images / "val"], 4)
    assert len({name.convert("RGB").resize((1, 1)).getpixel((0, 0)) for name in found.originals}) == 4
    assert found.what == "photographs"


def test_without_any_there_are_drawn_ones():
    assert find_pictures(None, 3).what == "drawn"
    assert len(find_pictures(None, 50).originals) == 16
    with pytest.raises(ValueError, match="0 images: give 1 or more"):
        find_pictures(None, 0)

"""Maps to windows and back, at every size and padding."""

import pytest
import torch

from wbmm.ops import merge_windows, pad_to_windows, partition_windows, to_window


@pytest.mark.parametrize("size", [(14, 14), (7, 21), (1, 1), (5, 30), (15, 8)])
@pytest.mark.parametrize("window", [(7, 7), (3, 5)])
@pytest.mark.parametrize("channels_last", [True, False])
def test_merge_undoes_partition(size, window, channels_last):
    x = torch.randn(2, 3, *size)
    windows = partition_windows(pad_to_windows(x, window), window)
    nh, nw = -(-size[0] // window[0]), -(-size[1] // window[1])
    assert windows.shape == (3, 2 * nh * nw, window[0] * window[1])
    back = merge_windows(windows, (2, *size), window, channels_last)
    torch.testing.assert_close(back, x, rtol=0, atol=0)


def test_partition_takes_positions_in_reading_order():
    x = torch.arange(24.0).view(1, 1, 4, 6)
    windows = partition_windows(x, (2, 3))
    assert windows[0, 0].tolist() == [0, 1, 2, 6, 7, 8]
    assert windows[0, 3].tolist() == [15, 16, 17, 21, 22, 23]


def test_partition_is_the_same_from_either_memory_format():
    x = torch.randn(2, 3, 14, 7)
    torch.testing.assert_close(
        partition_windows(x, (7, 7)), partition_windows(x.contiguous(memory_format=torch.channels_last), (7, 7))
    )


def test_padding_modes():
    x = torch.arange(1.0, 4.0).view(1, 1, 1, 3)
    assert pad_to_windows(x, (1, 5)).flatten().tolist() == [1, 2, 3, 0, 0]
    assert pad_to_windows(x, (1, 5), "reflect").flatten().tolist() == [1, 2, 3, 2, 1]
    assert pad_to_windows(x, (1, 5), "replicate").flatten().tolist() == [1, 2, 3, 3, 3]


def test_a_map_too_small_to_reflect_says_so():
    with pytest.raises(ValueError, match=r"cannot reflect a 3x7 map.*7x7 windows.*padding_mode='zeros'"):
        pad_to_windows(torch.zeros(1, 1, 3, 7), (7, 7), "reflect")


@pytest.mark.parametrize("wrong", [0, -7, 7.0, (7,), (7, 0), "7", True])
def test_wrong_windows_are_refused(wrong):
    with pytest.raises(ValueError, match="window size"):
        to_window(wrong)

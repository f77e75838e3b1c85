"""Each statistic on tables with a known answer, and what must not change it."""

import math

import pytest
import torch
import torch.nn.functional as F

from wbmm.analysis import effective_tables as st
from wbmm.ops.tables import expand_table, identity_table, kernel_to_table

WINDOW = (7, 7)
SOBEL_X = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]])  # answers to vertical edges


def table_of(kernel, window=WINDOW):
    """A k x k kernel as a table `[1, 2wh-1, 2ww-1]`, as the model folds it."""
    table = kernel_to_table(torch.as_tensor(kernel, dtype=torch.float64)[None, None], window)
    return table.view(1, 2 * window[0] - 1, 2 * window[1] - 1)


def identity(window=WINDOW):
    return identity_table(1, window, dtype=torch.float64).view(1, 2 * window[0] - 1, 2 * window[1] - 1)


def gaussian(sigma_h, sigma_w, window=WINDOW):
    dh = torch.arange(1 - window[0], window[0], dtype=torch.float64)
    dw = torch.arange(1 - window[1], window[1], dtype=torch.float64)
    return torch.exp(-(dh[:, None] ** 2) / (2 * sigma_h**2) - dw[None] ** 2 / (2 * sigma_w**2))[None]


def white_noise(channels, window=WINDOW):
    return torch.randn(channels, 2 * window[0] - 1, 2 * window[1] - 1, dtype=torch.float64)


def oriented(table):
    found = st.orientation(st.spectrum(table))
    return st.ORIENTATIONS[int(found.label[0])], float(found.coherence[0]), float(found.angle[0])


@pytest.mark.parametrize("window", [(7, 7), (3, 5)])
def test_pairs_and_distances_are_those_of_the_matrix(window):
    positions = [(h, w) for h in range(window[0]) for w in range(window[1])]
    counts = torch.zeros(2 * window[0] - 1, 2 * window[1] - 1, dtype=torch.float64)
    for h, w in positions:
        for i, j in positions:
            counts[h - i + window[0] - 1, w - j + window[1] - 1] += 1
    assert torch.equal(st.pair_counts(window), counts)
    assert st.distances(window)[window[0] - 1, window[1] - 1] == 0
    assert st.distances(window)[window[0] - 1 + 2, window[1] - 2] == pytest.approx(math.sqrt(5))


@pytest.mark.parametrize("window", [(7, 7), (3, 5)])
def test_the_diagonal_ratio_is_that_of_the_expanded_matrix(window):
    table = white_noise(4, window) + 20 * identity(window)
    matrix = expand_table(table.flatten(1), window).abs()
    d = matrix.shape[1]
    eye = torch.eye(d, dtype=torch.bool)
    expected = matrix[:, eye].mean(1) / matrix[:, ~eye].mean(1)
    torch.testing.assert_close(st.diagonal_ratio(table.abs(), window), expected)


def test_the_diagonal_ratio_of_the_identity_and_of_a_constant():
    assert st.diagonal_ratio(identity(), WINDOW).item() == math.inf
    assert st.diagonal_ratio(torch.ones(1, 13, 13).double(), WINDOW).item() == pytest.approx(1)


def test_profile_of_a_table_that_falls_with_the_distance():
    falling = torch.exp(-st.distances(WINDOW).round())[None]
    found = st.profile(falling, WINDOW)
    torch.testing.assert_close(found / found[:, :1], torch.exp(-torch.arange(9.0, dtype=torch.float64))[None])
    assert st.lost_between(found, 0, 2) == pytest.approx(1 - math.exp(-2))
    assert st.lost_between(found, 1, 2) == pytest.approx(1 - math.exp(-1))


def test_profile_counts_pairs_not_offsets():
    """At distance 1 a 7x7 window has 42 pairs for each of four offsets, and 36 for each of the four diagonal ones."""
    table = torch.zeros(1, 13, 13).double()
    table[0, 6, 6] = table[0, 6, 7] = 1.0  # the centre, and one step to the right
    found = st.profile(table, WINDOW)
    assert (found[0, 1] / found[0, 0]).item() == pytest.approx(42 / (4 * 42 + 4 * 36))
    assert found.sum().item() == pytest.approx(1)
    assert math.isnan(st.lost_between(st.profile(st.without_centre(table), WINDOW), 0, 2))  # nothing there to lose
    assert math.isnan(st.lost_between(st.profile(torch.ones(1, 1, 1).double(), (1, 1)), 0, 2))  # no such distance


def test_energy_within_two():
    constant, pairs = st.energy_within(torch.ones(1, 13, 13).double(), WINDOW)
    assert constant.item() == pytest.approx(pairs)
    local, _ = st.energy_within(table_of(torch.ones(3, 3)).square(), WINDOW)
    assert local.item() == pytest.approx(1)
    far = torch.zeros(1, 13, 13).double()
    far[0, 6, 9] = 1
    assert st.energy_within(far, WINDOW)[0].item() == 0
    edge = torch.zeros(1, 13, 13).double()
    edge[0, 6, 8] = 1  # exactly at 2
    assert st.energy_within(edge, WINDOW)[0].item() == 1


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (table_of(SOBEL_X), "vertical"),
        (table_of(SOBEL_X.T), "horizontal"),
        (table_of(-SOBEL_X), "vertical"),
        (table_of(torch.diag(torch.ones(5))), "diagonal \\"),
        (table_of(torch.diag(torch.ones(5)).flip(1)), "diagonal /"),
        (gaussian(0.5, 2.5), "horizontal"),
        (gaussian(2.5, 0.5), "vertical"),
        (identity(), "isotropic"),
        (table_of(torch.ones(3, 3)), "isotropic"),
        (gaussian(1.5, 1.5), "isotropic"),
    ],
)
def test_orientation(table, expected):
    label, coherence, _ = oriented(table)
    assert label == expected
    assert (coherence < 0.05) == (expected == "isotropic")


@pytest.mark.parametrize("degrees", [0, 30, 60, 90, 120, 150])
def test_the_angle_of_a_grating_is_that_of_its_lines(degrees):
    theta = math.radians(degrees)
    rows = torch.arange(-6, 7, dtype=torch.float64)[:, None]
    columns = torch.arange(-6, 7, dtype=torch.float64)[None]
    across = columns * math.sin(theta) + rows * math.cos(theta)  # constant along lines that rise at theta
    table = (torch.cos(2 * math.pi * 0.25 * across) * gaussian(2, 2)[0])[None]
    _, coherence, angle = oriented(table)
    assert coherence > 0.8
    assert min(abs(angle - degrees), 180 - abs(angle - degrees)) < 2


def test_few_channels_of_white_noise_look_oriented():
    found = st.orientation(st.spectrum(white_noise(400)))
    assert (found.label == 4).double().mean() > 0.85
    assert found.coherence.median() < 0.2


def test_the_direction_of_a_flipped_table_is_mirrored():
    table = table_of(torch.diag(torch.ones(5)))
    assert oriented(table)[0] != oriented(table.flip(2))[0]
    assert oriented(table)[0] == oriented(table.flip(1, 2))[0]  # a table and its point reflection have one spectrum


def test_spectrum_is_that_of_the_filter_the_table_is():
    """Power at frequency (fv, fh) is the squared amplitude with which a wave of that frequency passes."""
    table = white_noise(1)
    power = st.spectrum(table)[0]
    n = power.shape[-1]
    k_v, k_h = 5, 11
    rows, columns = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    phase = 2 * math.pi * (k_v * rows + k_h * columns).double() / n
    inside = [
        F.conv2d(wave[None, None], table[:, None]) for wave in (torch.cos(phase), torch.sin(phase))
    ]  # valid region: no border
    gain = inside[0].square() + inside[1].square()
    torch.testing.assert_close(gain, torch.full_like(gain, power[n // 2 + k_v, n // 2 + k_h].item()))


def test_low_frequency_ratio():
    flat = st.flat_ratio()
    assert flat == pytest.approx(math.pi / 16, abs=0.003)
    ratio = lambda table: st.low_frequency_ratio(st.spectrum(table))  # noqa: E731
    assert ratio(identity()).item() == pytest.approx(flat)
    assert ratio(white_noise(300)).mean().item() == pytest.approx(flat, abs=0.01)
    assert ratio(table_of(torch.ones(5, 5))).item() > 0.8
    assert ratio(gaussian(2, 2)).item() > 0.99
    laplacian = torch.tensor([[0.0, -1, 0], [-1, 4, -1], [0, -1, 0]])
    assert ratio(table_of(laplacian)).item() < 0.1
    checkerboard = gaussian(2, 2) * torch.tensor([(-1.0) ** (i + j) for i in range(13) for j in range(13)]).view(13, 13)
    assert ratio(checkerboard).item() < 0.01


def test_frequency_classes():
    names = lambda table: [  # noqa: E731
        st.CLASSES[int(i)] for i in st.frequency_class(st.low_frequency_ratio(st.spectrum(table)))
    ]
    laplacian = torch.tensor([[0.0, -1, 0], [-1, 4, -1], [0, -1, 0]])
    tables = [identity(), table_of(torch.ones(3, 3)), gaussian(2, 2), table_of(laplacian)]
    assert names(torch.cat(tables)) == ["broad", "low-pass", "low-pass", "high-pass"]
    assert st.frequency_class(torch.tensor([0.83, 0.09])).tolist() == [0, 2]  # the paper's two examples


def test_scaling_a_channel_changes_nothing():
    table = white_noise(5) + 3 * identity()
    scaled = table * torch.tensor([2.0, -1, 1e-3, -50, 7]).double()[:, None, None]

    def all_of(t):
        found = st.orientation(st.spectrum(t))
        return [
            st.diagonal_ratio(t.abs(), WINDOW),
            st.profile(t.abs(), WINDOW),
            st.energy_within(t.square(), WINDOW)[0],
            st.low_frequency_ratio(st.spectrum(t)),
            found.coherence,
            found.angle,
        ]

    for one, other in zip(all_of(table), all_of(scaled), strict=True):
        torch.testing.assert_close(one, other)


def test_the_centre_is_left_out_of_the_surround():
    table = white_noise(3)
    torch.testing.assert_close(st.without_centre(table + 5 * identity()), st.without_centre(table))
    assert st.without_centre(table)[:, 6, 6].tolist() == [0, 0, 0]
    assert table[:, 6, 6].abs().min() > 0

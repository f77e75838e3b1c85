"""Seams on maps with a known answer, maps as pictures, and `wbmm analyze features`."""

import json

import numpy as np
import pytest
import timm
import torch

import wbmm
from wbmm.analysis.features import SeamMeter, measure_seams, stage_maps, summarise_seams, to_rgb

WINDOW = (7, 7)


def noise(height=28, width=28, channels=6):
    return torch.randn(16, channels, height, width, dtype=torch.float64)


def steps(height, width, row=0, column=0):
    """+1 and -1 in a checkerboard of 7x7 windows whose grid is shifted."""
    rows = (torch.arange(height) - row) // 7
    columns = (torch.arange(width) - column) // 7
    return (1 - 2 * ((rows[:, None] + columns[None]) % 2)).double()


def seam(x, window=WINDOW):
    meter = SeamMeter()
    for part in x.split(5):  # in parts of unequal size
        meter.add(part)
    return meter.seam(window)


def test_noise_has_no_seam():
    found = seam(noise())
    assert found.jump == pytest.approx(1, abs=0.05)
    assert found.level == pytest.approx(1, abs=0.05)
    assert len(found.phases) == 7
    assert found.phases[0] == found.jump


def test_a_step_at_every_border():
    """Noise of variance 1: neighbours differ by 2 in the mean square; across a step of 2 by 4 more, so 3 times that."""
    found = seam(noise() + steps(28, 28))
    assert found.jump == pytest.approx(3, rel=0.1)
    assert found.visible
    assert max(found.phases[1:]) < 1


@pytest.mark.parametrize("shift", [1, 3, 6])
def test_a_shifted_grid_is_found_where_it_is(shift):
    found = seam(noise() + steps(28, 28, shift, shift))
    assert not found.visible
    assert int(np.argmax(found.phases)) == shift


def test_rows_and_columns_have_their_own_windows():
    x = noise(28, 40) + steps(28, 40)[:, :1]  # steps between rows alone
    assert seam(x, (7, 20)).jump > seam(x, (5, 7)).jump + 0.5
    columns = noise(40, 28) + steps(40, 28)[:1]
    assert seam(columns, (20, 7)).jump > seam(columns, (7, 5)).jump + 0.5


@pytest.mark.parametrize("dim", [2, 3])
def test_the_level_beside_borders(dim):
    def level(start):
        """Of noise that is twice as strong in two rows (columns), in every window."""
        x = noise()
        for border in (0, 7, 14):
            x.narrow(dim, border + start, 2).mul_(2)
        return seam(x).level

    assert level(6) > 1.9  # the last of a window and the first of the next
    assert level(6) > level(5) + 0.3
    assert level(6) > level(7) + 0.3
    assert level(3) < 0.9  # inside


def test_scale_and_offset_of_a_channel_do_not_matter():
    x = noise() + steps(28, 28)
    scaled = x * torch.tensor([1e-3, -1, 5, 100, 2, 1]).view(1, -1, 1, 1) + torch.arange(6).view(1, -1, 1, 1)
    one, other = seam(x), seam(scaled)
    assert one.jump == pytest.approx(other.jump)
    assert one.level == pytest.approx(other.level)


def test_the_edge_of_the_picture_is_no_seam():
    x = noise(14, 14)
    x[..., :1] += 30
    x[..., -1:, :] -= 30
    assert seam(x).jump == pytest.approx(1, abs=0.1)
    assert max(seam(x).phases) < 1.2


def test_a_map_of_one_window_has_none():
    assert seam(noise(7, 7)) is None
    assert seam(noise(8, 8)) is None  # its border is at the edge
    assert seam(noise(14, 7)) is not None


@pytest.mark.parametrize("form", ["training", "compact"])
def test_seams_of_a_net_whose_windows_differ(form):
    """A W block that passes each window's mean jumps at borders; its D block does not add to that."""
    net = timm.create_model(
        "wbmm_a", dims=(8, 8, 8, 8), depths=(1, 2, 1, 1), pattern=("D", "WD", "W", "W"), ls_init_value=None
    ).eval()
    mixer = net.stages[1].blocks[0].mixer
    with torch.no_grad():
        mixer.table.fill_(1.0)
        mixer.shortcut = False
    net = net if form == "training" else wbmm.fuse(net)
    found = measure_seams(net, torch.randn(6, 3, 224, 224), batch=4)
    assert [(item["stage"], item["letter"], item["where"]) for item in found[2:6]] == [
        (2, "W", "mixer"),
        (2, "W", "block"),
        (2, "D", "mixer"),
        (2, "D", "block"),
    ]
    summary = summarise_seams(found)
    assert list(summary) == [2, 3]  # stage 1 has no W block, the map of stage 4 is one window
    assert list(summary[2]) == ["W mixer", "W block", "D mixer", "D block"]
    assert summary[2]["W mixer"]["jump"] > 5
    assert summary[2]["W mixer"]["jump"] > summary[2]["W block"]["jump"]
    assert all(not module._forward_hooks for module in net.modules())


def test_three_components_become_red_green_and_blue():
    rows = torch.linspace(-1, 1, 12)[:, None].expand(12, 10)
    columns = torch.linspace(-1, 1, 10)[None].expand(12, 10)
    mixing = torch.linalg.qr(torch.randn(5, 5))[0]
    values = torch.einsum("ck,khw->chw", mixing[:, :2], torch.stack([3 * rows, columns]))
    picture = to_rgb(values)
    assert picture.shape == (12, 10, 3)
    assert picture.min() == 0
    assert picture.max() == 1
    assert abs(np.corrcoef(picture[..., 0].ravel(), rows.numpy().ravel())[0, 1]) > 0.99
    assert abs(np.corrcoef(picture[..., 1].ravel(), columns.numpy().ravel())[0, 1]) > 0.99


def test_maps_of_any_model():
    images = torch.randn(2, 3, 64, 64)
    assert [tuple(m.shape[2:]) for m in stage_maps(timm.create_model("convnext_atto").eval(), images)] == [
        *((16, 16), (8, 8), (4, 4), (2, 2))
    ]
    vit = timm.create_model("vit_tiny_patch16_224", img_size=64).eval()
    assert [tuple(m.shape) for m in stage_maps(vit, images)] == [(2, 192, 4, 4)] * 4


def test_the_command(forms, images, command, tmp_path, capsys):
    for form in ("training", "compact"):
        options = ("--size", "224", "--most", "4", "--shown", "2", "--out", tmp_path / form)
        assert command("analyze", "features", forms[form], images / "val", *options) == 0
    found = [json.loads((tmp_path / form / "features.json").read_text()) for form in ("training", "compact")]
    assert found[0]["stages"].keys() == {"2", "3"}
    assert "32x32 px, where no map is larger than a window" in (tmp_path / "compact" / "features.md").read_text()
    for stage, points in found[0]["stages"].items():
        for name, values in points.items():
            assert found[1]["stages"][stage][name]["jump"] == pytest.approx(values["jump"], rel=0.01)
    names = {path.name for path in (tmp_path / "compact").iterdir()}
    assert {"features.md", "features.png", "features.pdf", "features-seams.png", "features-seams.pdf"} <= names
    capsys.readouterr()
    assert command("analyze", "features", forms["compact"], images / "val", "--out", tmp_path / "small") == 0
    assert "try a larger --size" in capsys.readouterr().out  # 32 px: no map with windows is larger than one
    assert command("analyze", "features", forms["compact"], tmp_path / "none.png", "--out", tmp_path / "x") == 1
    assert "there is no such file or folder" in capsys.readouterr().err

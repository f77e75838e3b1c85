"""Tables of every form of a layer, and `wbmm analyze weights` as a user meets it."""

import json

import pytest
import timm
import torch

import wbmm
from tests.helpers import randomize
from wbmm.analysis import effective_tables as st
from wbmm.analysis.effective_tables import effective_tables, map_sizes
from wbmm.analysis.opening import open_subject
from wbmm.analysis.weights import in_words, measure_layer, summarise
from wbmm.layers import FusedWBMM2d, HierarchicalWBMM2d, WBMM2d
from wbmm.mm.backbone import WBMMBackbone

SMALL = {
    "dims": (8, 8, 16, 16),
    "depths": (1, 2, 2, 1),
    "pattern": ("D", "WD", "WD", "M"),
    "window_size": ("4+2", "4+2", 5, 3),
    "num_classes": 3,
}


@pytest.fixture(scope="module")
def nets():
    """A model with single-scale, hierarchical and multi-kernel layers, in its three forms."""
    net = randomize(timm.create_model("wbmm_a", **SMALL)).double().eval()
    return {"training": net, "compact": wbmm.fuse(net), "dense": wbmm.fuse(net, "dense")}


@pytest.mark.parametrize("size", [None, (64, 96)])
def test_every_form_has_the_same_tables(nets, size):
    found = {form: list(effective_tables(net, size)) for form, net in nets.items()}
    assert [layer.kind for layer in found["training"]] == ["hierarchical", "single-scale", "multi-kernel"]
    assert [layer.stage for layer in found["training"]] == [2, 3, 4]
    for form in ("compact", "dense"):
        assert len(found[form]) == 3
        for one, other in zip(found["training"], found[form], strict=True):
            assert (one.name, one.window) == (other.name, other.window)
            for name in ("table", "magnitude", "energy"):
                torch.testing.assert_close(getattr(one, name), getattr(other, name))


def test_the_table_is_what_the_layer_does(nets):
    """An impulse at position i gives table[i - j] at output j."""
    layer = list(effective_tables(nets["compact"]))[1]
    mixer = nets["compact"].get_submodule(layer.name)
    x = torch.zeros(1, 16, 5, 5, dtype=torch.float64)
    x[:, :, 1, 3] = 1
    y = (mixer(x) - mixer(torch.zeros_like(x)))[0]
    for h, w in [(0, 0), (1, 3), (4, 1), (2, 4)]:
        torch.testing.assert_close(y[:, h, w], layer.table[:, 1 - h + 4, 3 - w + 4])


def test_a_hierarchical_layer_counts_pairs_inside_and_across_quarters():
    layer = HierarchicalWBMM2d(1, 2, shortcut=False)
    with torch.no_grad():
        layer.table.zero_()
        layer.local_table.zero_()[:, 5] = 3.0  # offset (0, 1) of the 2x2 window's 3x3 table
    (found,) = effective_tables(layer)
    share = 8 / 12  # of the 12 pairs a step apart in a 4x4 window, those inside of a 2x2 quarter
    assert found.table[0, 3, 4].item() == pytest.approx(3 * share)
    assert found.magnitude[0, 3, 4].item() == pytest.approx(3 * share)
    assert found.energy[0, 3, 4].item() == pytest.approx(9 * share)
    assert found.table.count_nonzero() == 1


@pytest.mark.parametrize("form", ["training", "compact"])
def test_the_backbone_of_a_segmentor(form, tmp_path):
    arch = {key: value for key, value in SMALL.items() if key not in ("num_classes", "depths")}
    backbone = randomize(WBMMBackbone(**arch)).eval()
    expected = list(effective_tables(backbone))
    backbone = backbone if form == "training" else wbmm.fuse(backbone)
    state_dict = {f"backbone.{key}": value for key, value in backbone.state_dict().items()}
    torch.save({"meta": {}, "state_dict": {**state_dict, "decode_head.bias": torch.zeros(1)}}, tmp_path / "seg.pth")
    subject = open_subject(str(tmp_path / "seg.pth"))
    found = list(effective_tables(subject.net))
    assert [layer.name for layer in found] == [layer.name for layer in expected]
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one.table, other.table, atol=1e-5, rtol=1e-4)
    assert len(list(effective_tables(subject.untrained()))) == len(expected)


def test_tables_are_cut_to_the_map():
    assert map_sizes((224, 224)) == [(56, 56), (28, 28), (14, 14), (7, 7)]
    assert map_sizes((57, 33)) == [(15, 9), (8, 5), (4, 3), (2, 2)]
    net = timm.create_model("wbmm_a", **SMALL).eval()
    whole, cut = list(effective_tables(net)), list(effective_tables(net, (48, 32)))
    assert [layer.window for layer in cut] == [(4, 4), (3, 2), (2, 1)]
    assert cut[1].own_window == (5, 5)
    torch.testing.assert_close(cut[1].table, whole[1].table[:, 2:7, 3:6])


def test_layers_inside_a_model_of_timm():
    net = timm.create_model("convnext_tiny_wbmm", depths=(1, 1, 1, 1), dims=(8, 8, 8, 8)).eval()
    layers = list(effective_tables(net))
    assert layers
    for layer in layers:
        module = net.get_submodule(layer.name)
        torch.testing.assert_close(layer.table.flatten(1), module.folded_table().double())


def test_a_layer_alone_and_one_without_any():
    table = torch.randn(4, 25)
    (found,) = effective_tables(FusedWBMM2d(table, torch.zeros(4), (3, 3)))
    assert found.stage is None
    torch.testing.assert_close(found.table, table.double().view(4, 5, 5))
    assert list(effective_tables(torch.nn.Conv2d(3, 3, 1))) == []


def test_an_untrained_layer_has_the_ratio_of_its_initialisation():
    """1 on the diagonal from the shortcut; off it the mean magnitude of a normal distribution, 0.02 * sqrt(2 / pi)."""
    (layer,) = effective_tables(WBMM2d(512, 7))
    found = summarise([measure_layer(layer)])
    assert found["ratio"] == pytest.approx(1 / (0.02 * (2 / torch.pi) ** 0.5), rel=0.02)
    assert found["lost_0_to_2"] > 0.98
    assert abs(found["lost_1_to_2"]) < 0.03
    assert found["near_energy"] == pytest.approx(found["near_pairs"], rel=0.05)
    assert found["low"] == pytest.approx(st.flat_ratio(), rel=0.05)
    assert found["frequencies"]["broad"] == 1


def test_what_was_learned_is_said_in_words():
    (before,) = effective_tables(WBMM2d(256, 7))
    net = WBMM2d(256, 7)
    with torch.no_grad():
        for channel, table in enumerate(net.table.view(256, 13, 13)):
            table[5:8, 5:8] += (0.3 if channel < 128 else -0.3) * torch.rand(3, 3)
    (after,) = effective_tables(net)
    untrained, trained = (summarise([measure_layer(layer)]) for layer in (before, after))
    text = in_words("stage 2", trained, untrained)
    assert text.startswith("- Stage 2: locality was learned: ")
    assert "Frequency selectivity emerged: " in text
    assert "50 % high-pass channels, untrained 0 % and 0 %" in text
    same = in_words("stage 2", untrained, untrained)
    assert "no locality was learned" in same
    assert "did not emerge: 0 % low-pass and 0 % high-pass" in same


def test_the_order_of_layers_does_not_matter(nets):
    layers = [measure_layer(layer) for layer in effective_tables(nets["compact"])]
    one, other = summarise(layers), summarise(layers[::-1])
    assert one.keys() == other.keys()
    for key in one:
        assert one[key] == pytest.approx(other[key]) if key != "windows" else one[key] == other[key], key


def test_the_command_gives_the_same_for_each_form(forms, command, tmp_path, capsys):
    found = {}
    for form in ("training", "compact", "dense"):
        options = ("--out", tmp_path / form, "--channels", "4", "--size", "224")
        assert command("analyze", "weights", forms[form], *options) == 0
        found[form] = json.loads((tmp_path / form / "weights.json").read_text())["stages"]
    assert "stage 2" in capsys.readouterr().out
    for form in ("compact", "dense"):
        for stage, values in found["training"].items():
            for key in ("ratio", "lost_0_to_2", "low", "coherence", "near_energy"):
                assert found[form][stage][key] == pytest.approx(values[key], rel=1e-3), (form, stage, key)
    names = {path.name for path in (tmp_path / "dense").iterdir()}
    assert {"weights.md", "weights.png", "weights.pdf", "weights-stage2.png", "weights-stage2.pdf"} <= names
    page = (tmp_path / "dense" / "weights.md").read_text()
    assert "41-58x" in page
    assert "](weights-stage4.png)" in page
    assert (tmp_path / "dense" / "weights.pdf").read_bytes().startswith(b"%PDF")


def test_maps_of_one_position_have_no_figures_but_do_not_fail(forms, command, tmp_path):
    assert command("analyze", "weights", forms["compact"], "--out", tmp_path) == 0
    facts = json.loads((tmp_path / "weights.json").read_text())
    assert facts["size"] == [32, 32]
    assert facts["stages"]["stage 4"]["windows"] == ["1x1"]
    assert facts["stages"]["stage 4"]["lost_0_to_2"] is None


def test_a_tag_means_weights():
    trained = open_subject("wbmm_a.tiny50", random_weights=True)
    untrained = open_subject("wbmm_a", random_weights=True)
    assert trained.label == "wbmm_a.tiny50"
    assert untrained.label == "wbmm_a, untrained"
    ratios = [
        summarise([measure_layer(layer)])["ratio"]
        for net in (trained.net, trained.untrained(), untrained.net)
        for layer in list(effective_tables(net))[:1]
    ]
    assert ratios[0] < 40
    assert ratios[1:] == pytest.approx([63, 63], rel=0.03)


def test_errors_are_one_line(forms, command, tmp_path, capsys):
    out = ("--out", tmp_path)
    assert command("analyze", "weights", "model.onnx", *out) == 1
    assert "an exported file has no layers to look into" in capsys.readouterr().err
    assert command("analyze", "weights", tmp_path, *out) == 1
    assert "is a folder without best.pt or last.pt" in capsys.readouterr().err
    assert command("analyze", "weights", "unireplknet_a", "--random-weights", *out) == 1
    assert "has no WBMM layer: its W blocks hold dw13_reparam" in capsys.readouterr().err
    assert command("analyze", "weights", "wbmm_x", *out) == 1
    assert "neither a file nor a model that timm knows" in capsys.readouterr().err
    (tmp_path / "weights.json").write_text("{}")
    assert command("analyze", "weights", forms["dense"], *out) == 1
    assert "exists already; say --force" in capsys.readouterr().err

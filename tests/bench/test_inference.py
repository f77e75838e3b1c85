"""`wbmm bench model`: forms, the limit, and the files written; never how fast."""

import csv

import pytest
import timm
import torch

from wbmm import cli
from wbmm.bench.limit import COMMON, count_gmacs, ffn_shapes, limit
from wbmm.bench.setting import FORMS, build, images_for
from wbmm.layers import DenseWBMM2d, FusedBlock
from wbmm.models.plain import PlainNet
from wbmm.timing import Timing

SMALL = ["--size", "32", "48", "--rounds", "1", "--batch", "1"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_logits_in_its_own_layout(form):
    torch.manual_seed(3)
    expected = build("wbmm_a")
    torch.manual_seed(3)
    model = build(f"wbmm_a:{form}")
    assert isinstance(model, PlainNet) == form.startswith("plain")
    assert any(isinstance(m, FusedBlock) for m in model.modules()) == (form in ("compact", "dense"))
    assert any(isinstance(m, DenseWBMM2d) for m in model.modules()) == (form == "dense")
    images = images_for(f"wbmm_a:{form}", torch.randn(2, 3, 32, 48))
    layout = torch.contiguous_format if form.startswith("plain") else torch.channels_last
    assert images.is_contiguous(memory_format=layout)
    assert model.stem.conv2.weight.is_contiguous(memory_format=layout)
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected(images), rtol=1e-4, atol=1e-5)


def test_models_of_one_size_are_built_for_the_size_asked_for():
    size = (64, 96)
    assert build("swin_tiny_patch4_window7_224", size=size).patch_embed.img_size == size


def test_multiply_adds_do_not_depend_on_the_layout():
    counts = {form: count_gmacs(build(f"wbmm_a:{form}"), (64, 64)) for form in ("compact", "dense", "plain")}
    assert counts["compact"] > 0
    assert counts["dense"] == counts["plain"] == counts["compact"]


def test_shapes_are_those_of_the_feed_forward_parts():
    model, seen = build("wbmm_a"), []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and max(module.weight.shape) == 4 * min(module.weight.shape):
            module.register_forward_hook(
                lambda m, args, out: seen.append((args[0].numel() // m.in_features, m.in_features, m.out_features))
            )
    with torch.no_grad():
        model(torch.randn(2, 3, 75, 50))
    wide = {shape for shape in seen if shape[0] > 2}  # those of squeeze and excitation have a row a sample
    assert wide <= set(ffn_shapes(model, 2, (75, 50)))
    assert len(wide) >= 6


def test_the_limit_is_the_fastest_product():
    small, large = COMMON[0], COMMON[1]
    speed, shape = limit({small: Timing((1.0,)), large: Timing((0.5, 1.0, 9.0))})
    assert shape == large
    assert speed == 2048**3


@pytest.mark.heavy
def test_share_of_the_limit_and_files(tmp_path, capsys):
    out = tmp_path / "results"
    argv = ["bench", "model", "wbmm_a:compact", "wbmm_a:plain", "--baseline", "test_convnext", *SMALL, "--limit"]
    assert cli.main([*argv, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "share of the limit" in printed
    with (out / "model.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == ["test_convnext", "wbmm_a:compact", "wbmm_a:plain"]
    for row in rows:
        share = float(row["gmacs"]) * float(row["images_per_s"]) / float(row["limit_gmacs_per_s"])
        assert float(row["share"]) == pytest.approx(share, rel=1e-4)
        assert float(row["images_per_s_best"]) >= float(row["images_per_s"])
        assert (row["torch"], row["timm"], row["height"], row["width"]) == (
            torch.__version__,
            timm.__version__,
            "32",
            "48",
        )
        assert row["threads"] == str(torch.get_num_threads())
        assert row["machine"]
        assert row["date"]
    command = rows[0]["command"]
    assert command.startswith("wbmm bench model wbmm_a:compact wbmm_a:plain --baseline test_convnext")
    assert command.endswith("--limit")
    page = (out / "model.md").read_text()
    assert command in page
    assert "| wbmm_a:plain | 32x48 | 1 |" in page
    assert sorted(path.name for path in out.iterdir()) == ["model.csv", "model.jsonl", "model.md"]
    assert cli.main([*argv[:3], *argv[4:], "--out", str(out)]) == 0, "its own files are replaced"
    assert "plain" not in (out / "model.md").read_text().split("contiguous")[0]


@pytest.mark.heavy
def test_compiled(capsys):
    argv = ["bench", "model", "wbmm_a:compact", "--baseline", "wbmm_a:compact", *SMALL, "--compile"]
    assert cli.main(argv) == 0
    assert "compiled" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["wbmm_a:sparse"], "form 'sparse' is none of training, compact, dense, plain, plain-training"),
        (["test_convnext:plain"], "the reference implementation is of the WBMM family alone"),
        (["wbmm_q"], "timm knows no model 'wbmm_q'"),
        (["wbmm_a", "--batch", "0"], "--batch [0]"),
        (["wbmm_a", "--pause", "-1"], "--pause -1.0"),
    ],
)
def test_what_cannot_be_measured(argv, reason, capsys):
    assert cli.main(["bench", "model", "--baseline", "test_convnext", "--rounds", "1", *argv]) == 1
    assert reason in capsys.readouterr().err


def test_other_files_are_left_alone(tmp_path, capsys):
    (tmp_path / "model.md").write_text("mine")
    assert cli.main(["bench", "model", "wbmm_a", *SMALL, "--out", str(tmp_path)]) == 1
    assert "choose another --out" in capsys.readouterr().err
    assert (tmp_path / "model.md").read_text() == "mine"
    assert cli.main(["bench", "model", "wbmm_a", *SMALL, "--out", str(tmp_path / "model.md")]) == 1
    assert "expected a folder" in capsys.readouterr().err

"""`wbmm reparam` as a user meets it: what it reads, what it writes, what it prints."""

import json
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open

import wbmm
from tests.helpers import randomize
from tests.reference import image, released_fused_state_dict, released_logits, released_state_dict
from wbmm import cli
from wbmm.data.images import check_batch
from wbmm.io.card import ModelCard
from wbmm.io.reader import safe_load
from wbmm.zoo import load_zoo

ROOT = Path(__file__).parents[2]


def run(capsys, *argv):
    code = cli.main(["reparam", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def train_a_little(model, steps=2, size=64):
    """Real optimiser steps from weights and statistics far from their initial values."""
    randomize(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, _ = check_batch(ModelCard(model="x", input_size=(3, size, size)), count=4)
    for step in range(steps):
        loss = torch.nn.functional.cross_entropy(model(images), torch.arange(4) + step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.fixture
def checkpoint(tmp_path):
    model = train_a_little(timm.create_model("wbmm_a", num_classes=10))
    torch.save({"model": model.state_dict(), "optimizer": {}}, tmp_path / "last.pt")
    return tmp_path / "last.pt"


def agree(name, forms):
    """The largest difference of the forms from the training form on pictures, over the largest output."""
    model = train_a_little(timm.create_model(name))
    images, _ = check_batch(ModelCard(model=name), count=2)
    with torch.inference_mode():
        expected = model(images)
        scale = max(1.0, expected.abs().max().item())
        # the blocks must matter, or the comparison is vacuous
        moved = model.stages[0](model.stem(images)) - model.stages[0].downsample(model.stem(images))
        assert moved.abs().max() > 0.1
        for form in forms:
            assert (wbmm.fuse(model, form)(images) - expected).abs().max() / scale < 1e-5, (name, form)


@pytest.mark.parametrize("name", ["wbmm_a", "wbmm_a_dense", "wbmm_a_hier"])
def test_forms_agree_on_pictures_after_training(name):
    agree(name, ["compact", "dense"])


@pytest.mark.heavy
@pytest.mark.parametrize("name", load_zoo())
def test_forms_of_every_variant_agree_on_pictures_after_training(name):
    agree(name, ["compact", "dense"] if name.split("_")[1] in "apt" else ["compact"])


def test_fused_file(checkpoint, tmp_path, capsys):
    out = tmp_path / "a.safetensors"
    code, text, _ = run(capsys, checkpoint, out, "--check")
    assert code == 0, text
    rows = [line.split() for line in text.splitlines() if line.startswith(("last.pt", "a.safetensors"))]
    assert [row[1] for row in rows] == ["training", "compact"]
    assert float(rows[1][3]) < float(rows[0][3])
    assert float(rows[1][4]) < float(rows[0][4])
    assert "differ by at most" in text
    with safe_open(out, framework="pt") as file:
        card = json.loads(file.metadata()["wbmm"])
    assert card["source"]["file"] == "last.pt"
    assert len(card["source"]["sha256"]) == 64
    assert card["form"] == "compact"
    images, _ = check_batch(ModelCard(model="wbmm_a"), count=2)
    with torch.inference_mode():
        expected = wbmm.load_model(checkpoint)(images)
        torch.testing.assert_close(wbmm.load_model(out)(images), expected, rtol=1e-5, atol=1e-5)


def test_dense_half_and_pth(checkpoint, tmp_path, capsys):
    code, text, _ = run(capsys, checkpoint, tmp_path / "a.pth", "--form", "dense", "--half", "--check")
    assert code == 0, text
    model = wbmm.load_model(tmp_path / "a.pth")
    assert (model.card.form, model.card.dtype) == ("dense", "float16")
    # a fused file may be fused further, not back
    assert run(capsys, checkpoint, tmp_path / "b.safetensors")[0] == 0
    assert run(capsys, tmp_path / "b.safetensors", tmp_path / "c.pth", "--form", "dense", "--check")[0] == 0
    code, _, error = run(capsys, tmp_path / "a.pth", tmp_path / "d.pth")
    assert code == 1
    assert "dense form already" in error
    assert not (tmp_path / "d.pth").exists()


def test_a_released_fused_file_becomes_one_that_describes_itself(tmp_path, capsys):
    model = timm.create_model("wbmm_p").eval()
    model.load_state_dict(released_state_dict("wbmm_p"))
    torch.save({"model": released_fused_state_dict(wbmm.fuse(model))}, tmp_path / "released.pth")
    code, text, _ = run(capsys, tmp_path / "released.pth", tmp_path / "a.safetensors", "--check")
    assert code == 0, text
    loaded = wbmm.load_model(tmp_path / "a.safetensors")
    assert (loaded.card.model, loaded.card.form) == ("wbmm_p", "compact")
    size, expected = released_logits("wbmm_p")
    with torch.no_grad():
        torch.testing.assert_close(loaded(image(*size)), expected, rtol=1e-4, atol=1e-5)


def test_a_difference_above_the_tolerance_writes_nothing(checkpoint, tmp_path, capsys):
    code, _, error = run(capsys, checkpoint, tmp_path / "a.safetensors", "--check", "--tolerance", "1e-12")
    assert code == 1
    assert "NOT written" in error
    assert not (tmp_path / "a.safetensors").exists()


def test_a_run_is_reparameterised_with_its_average(tmp_path, capsys):
    """From a real run with an EMA; its transform and class names go into the file."""
    from wbmm.train.config import load_config
    from wbmm.train.fit import fit

    overrides = [
        "model.args={dims: [8, 16, 32, 64]}",
        "ema.decay=0.5",
        "schedule.epochs=1",
        "data.args={train_limit: 64, val_limit: 20}",
    ]
    cfg = load_config(
        ROOT / "configs" / "digits.yaml", [f"out={tmp_path / 'run'}", "log.tensorboard=false", *overrides]
    )
    fit(cfg)
    capsys.readouterr()
    checkpoint = tmp_path / "run" / "last.pt"
    for flags, key in (([], "ema"), (["--no-ema"], "model")):
        assert run(capsys, checkpoint, tmp_path / "a.pth", "--force", "--check", *flags)[0] == 0
        model = wbmm.load_model(tmp_path / "a.pth")
        saved = safe_load(checkpoint)[key]
        torch.testing.assert_close(model.stem.conv1.weight.data, saved["stem.conv1.weight"])
    assert model.card.input_size == (1, 56, 56)
    assert model.card.class_names == [str(digit) for digit in range(10)]
    assert tuple(model.card.mean) == tuple(cfg.data.mean)


def test_nothing_to_fuse(tmp_path, capsys):
    wbmm.save_model(timm.create_model("convnext_atto", num_classes=3).eval(), tmp_path / "a.pth")
    code, _, error = run(capsys, tmp_path / "a.pth", tmp_path / "b.pth")
    assert code == 1
    assert "nothing to fuse in convnext_atto" in error


def test_check_needs_no_photographs(checkpoint, tmp_path, capsys, monkeypatch):
    """Neither a folder nor scikit-learn's: it draws its pictures, and says so."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    code, text, _ = run(capsys, checkpoint, tmp_path / "a.pth", "--check")
    assert code == 0
    assert "drawn landscapes (8, 3, 224, 224): outputs up to" in text


def test_own_photographs(checkpoint, tmp_path, capsys):
    from PIL import Image

    (tmp_path / "photos").mkdir()
    Image.effect_noise((300, 250), 90).convert("RGB").save(tmp_path / "photos" / "a.png")
    code, text, _ = run(capsys, checkpoint, tmp_path / "a.pth", "--check", "--images", tmp_path / "photos")
    assert code == 0
    assert f"images of {tmp_path / 'photos'} (1, 3, 224, 224)" in text
    code, _, error = run(capsys, checkpoint, tmp_path / "b.pth", "--check", "--images", tmp_path / "none")
    assert code == 1
    assert "no such file or folder" in error


@pytest.mark.parametrize("name", ["last.pt", "net.safetensors"])
def test_a_checkpoint_is_read_once(name, tmp_path, capsys, count_reads):
    """Its hash, for the card of the new file, is the only other pass over it."""
    wbmm.save_model(timm.create_model("wbmm_a", num_classes=10).eval(), tmp_path / name)
    with count_reads() as counts:
        assert run(capsys, tmp_path / name, tmp_path / "fused.safetensors")[0] == 0
    assert counts == {"read": 1, "state dict found": 1, "names converted": 0, "hashed": 1}

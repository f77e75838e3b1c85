"""One reader for every file: what loads, what is refused, and what the refusal says."""

import argparse
import os
import pickle

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

import wbmm
from tests.helpers import randomize
from wbmm.io.files import load_weights, read_state_dict, round_weights
from wbmm.io.reader import safe_load
from wbmm.models.state import CheckpointError, find_state_dict, identify

NARROW = {"dims": (8, 16, 32, 64)}


def make(name="wbmm_a", **kwargs):
    return timm.create_model(name, **{**NARROW, "num_classes": 4, **kwargs})


@pytest.mark.parametrize("wrap", [None, "model", "state_dict", "model_ema"])
def test_files_that_load(tmp_path, wrap):
    source, target = randomize(make()), make()
    contents = source.state_dict() if wrap is None else {wrap: source.state_dict(), "epoch": 3}
    torch.save(contents, tmp_path / "a.pth")
    load_weights(target, tmp_path / "a.pth")
    torch.testing.assert_close(target.state_dict(), source.state_dict())


def test_safetensors_and_ddp_prefixes(tmp_path):
    source, target = randomize(make()), make()
    save_file({f"module.{k}": v.contiguous() for k, v in source.state_dict().items()}, tmp_path / "a.safetensors")
    load_weights(target, tmp_path / "a.safetensors")
    torch.testing.assert_close(target.state_dict(), source.state_dict())


def test_ema_is_preferred_unless_told_otherwise(tmp_path):
    model, ema = randomize(make(), 1).state_dict(), randomize(make(), 2).state_dict()
    contents = {"model": model, "model_ema": ema}
    assert find_state_dict(contents)["stem.conv1.bias"] is ema["stem.conv1.bias"]
    assert find_state_dict(contents, ema=False)["stem.conv1.bias"] is model["stem.conv1.bias"]


def test_harmless_extras_are_accepted(tmp_path):
    args = argparse.Namespace(lr=4e-3, name="run")
    torch.save({"model": make().state_dict(), "args": args, "best": np.float64(1.5)}, tmp_path / "a.pth")
    assert safe_load(tmp_path / "a.pth")["args"].lr == 4e-3
    assert "stem.conv1.weight" in read_state_dict(tmp_path / "a.pth")


class Bomb:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_a_malicious_pickle_is_refused_and_never_run(tmp_path):
    target, file = tmp_path / "pwned", tmp_path / "evil.pth"
    doors = [
        lambda: safe_load(file),
        lambda: read_state_dict(file),
        lambda: load_weights(make(), file),
    ]
    for contents in ({"model": Bomb(target)}, {"model": make().state_dict(), "x": Bomb(target)}):
        torch.save(contents, file)
        for door in doors:
            with pytest.raises(CheckpointError, match=r"refused.*could run code"):
                door()
        with pytest.raises((pickle.UnpicklingError, RuntimeError)):
            timm.create_model("wbmm_a", pretrained=True, pretrained_cfg_overlay={"file": str(file)})
        with pytest.raises((pickle.UnpicklingError, RuntimeError)):
            timm.create_model("wbmm_a", checkpoint_path=str(file))
    assert not target.exists()
    file.write_bytes(pickle.dumps(Bomb(target)))
    with pytest.raises(CheckpointError):
        safe_load(file)
    assert not target.exists()


def test_unreadable_files(tmp_path):
    torch.save(make().state_dict(), tmp_path / "whole.pth")
    data = (tmp_path / "whole.pth").read_bytes()
    (tmp_path / "half.pth").write_bytes(data[: len(data) // 2])
    (tmp_path / "text.pth").write_text("hello")
    (tmp_path / "half.safetensors").write_bytes(b"\x10" * 20)
    for name in ("half.pth", "text.pth", "half.safetensors"):
        with pytest.raises(CheckpointError, match=name):
            read_state_dict(tmp_path / name)
    with pytest.raises(CheckpointError, match="no such file"):
        read_state_dict(tmp_path / "none.pth")
    torch.save({"epoch": 3, "note": "nothing else"}, tmp_path / "empty.pth")
    with pytest.raises(CheckpointError, match=r"empty.pth: no state dict found.*epoch, note"):
        read_state_dict(tmp_path / "empty.pth")


def test_another_variant_is_named():
    with pytest.raises(RuntimeError, match=r"(?s)looks like wbmm_f .training form.*create_model\('wbmm_f'\)") as error:
        timm.create_model("wbmm_a").load_state_dict(timm.create_model("wbmm_f").state_dict())
    assert "size mismatch for stem.conv1.weight" in str(error.value)
    assert len(str(error.value).splitlines()) < 15
    with pytest.raises(CheckpointError, match=r"(?s)The model is wbmm_a_dense.*create_model\('wbmm_a'\)") as error:
        load_weights(timm.create_model("wbmm_a_dense"), timm.create_model("wbmm_a").state_dict())
    assert "resize_tables" not in str(error.value)
    with pytest.raises(RuntimeError, match=r"size mismatch for stem.conv1.weight") as error:
        timm.create_model("wbmm_a", in_chans=1).load_state_dict(timm.create_model("wbmm_a").state_dict())
    assert "Create that model" not in str(error.value)


def test_a_fused_checkpoint_is_named():
    model = make().eval()
    for form in ("compact", "dense"):
        with pytest.raises(RuntimeError, match=f"fused, {form} form.*\n.*\n.*cannot go back to the training form"):
            make().load_state_dict(wbmm.fuse(model, form).state_dict())
    with pytest.raises(RuntimeError, match=r"before wbmm.fuse\(model\)"):
        wbmm.fuse(model).load_state_dict(model.state_dict())
    fused = wbmm.fuse(make().eval())
    fused.load_state_dict(wbmm.fuse(model).state_dict())
    with pytest.raises(RuntimeError, match=r"wbmm.fuse.model, form='dense'"):
        fused.load_state_dict(wbmm.fuse(model, "dense").state_dict())


def test_other_classes_and_foreign_files_are_named():
    with pytest.raises(RuntimeError, match=r"pass num_classes=4, or for a new classifier .*new_classifier=True"):
        make(num_classes=7).load_state_dict(make().state_dict())
    with pytest.raises(RuntimeError, match="of no WBMM model: its keys are bias, weight"):
        make().load_state_dict(torch.nn.Linear(2, 2).state_dict())


def test_of_many_keys_that_do_not_fit_three_are_named(tmp_path):
    file = wbmm.save_model(wbmm.fuse(make().eval()), tmp_path / "fused.safetensors")
    with pytest.raises(CheckpointError, match=r'(?s)"[^"]*", "[^"]*", "[^"]*" and \d+ more.*cannot go back') as raised:
        wbmm.load_weights(make(), file)
    assert len(str(raised.value)) < 1500


def test_windows_are_interpolated_only_when_asked():
    source = randomize(make("wbmm_a_dense"))
    target = make("wbmm_a_hier")
    before = target.stages[0].blocks[0].mixer.local_table.clone()
    with pytest.raises(CheckpointError, match="resize_tables=True"):
        load_weights(target, source.state_dict())
    torch.testing.assert_close(target.stages[0].blocks[0].mixer.local_table, before)
    load_weights(target, source.state_dict(), resize_tables=True)
    mixer = target.stages[0].blocks[0].mixer
    assert mixer.table.shape == (8, 27 * 27)
    assert (mixer.local_table == 0).all()
    torch.testing.assert_close(target.stages[3].blocks[0].mixer.table, source.stages[3].blocks[0].mixer.table)
    torch.testing.assert_close(mixer.table[:, 364], source.stages[0].blocks[0].mixer.table[:, 84] * 169 / 729)


def test_interpolation_leaves_what_fits_and_refuses_what_is_fused():
    wide = randomize(make("wbmm_a_dense", window_size=(1, 5)))
    target = make("wbmm_a_dense", window_size=(1, 5))
    load_weights(target, wide.state_dict(), resize_tables=True)
    torch.testing.assert_close(target.state_dict(), wide.state_dict())
    small = make("wbmm_a_hier", window_size=("6+3", "6+3", 6, 3))
    load_weights(small, randomize(make("wbmm_a_hier")).state_dict(), resize_tables=True)
    assert small.stages[0].blocks[0].mixer.local_table.shape == (8, 25)
    with pytest.raises(CheckpointError, match="fused checkpoint hold its shortcuts"):
        load_weights(
            wbmm.fuse(make("wbmm_a_dense", window_size=14).eval()), wbmm.fuse(make().eval()).state_dict(), True
        )
    with pytest.raises(CheckpointError, match="not square"):
        load_weights(make("wbmm_a_dense"), make("wbmm_a_dense", window_size=(2, 5)).state_dict(), resize_tables=True)


def test_wrapped_dicts_and_prefixes_are_accepted():
    source, target = randomize(make()), make()
    load_weights(target, {"state_dict": {f"module._orig_mod.{k}": v for k, v in source.state_dict().items()}})
    torch.testing.assert_close(target.state_dict(), source.state_dict())


@pytest.mark.parametrize("name", ["wbmm_a", "wbmm_t", "wbmm_s_dense", "wbmm_n_hier"])
def test_identify_knows_the_family(name):
    signature = identify(timm.create_model(name, device="meta").state_dict())
    assert signature.names() == [name]
    assert signature.form == "training"
    assert signature.num_classes == 1000


def test_what_does_not_fit_leaves_a_strict_false_load_alone():
    result = make().load_state_dict({"stem.conv1.bias": torch.zeros(4)}, strict=False)
    assert result.missing_keys


def test_weights_that_a_smaller_type_does_not_hold():
    state_dict = {"count": torch.tensor(7), "small": torch.ones(2), "large": torch.tensor([1.0, 1e5])}
    with pytest.raises(ValueError, match="large has values above 65504, which float16 does not hold: leave it out"):
        round_weights(state_dict, torch.float16, "leave it out")
    rounded = round_weights(state_dict, torch.bfloat16, "leave it out")
    assert [value.dtype for value in rounded.values()] == [torch.int64, torch.bfloat16, torch.bfloat16]

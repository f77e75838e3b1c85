"""Files as they arrive: damaged, bloated, of another kind."""

import os
import random
import re
import warnings
import zipfile
from functools import partial

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import wbmm
from tests.helpers import randomize
from tests.io.hostile import tensor, write
from wbmm.io.digest import DIGEST_KEY, digest
from wbmm.io.files import load_weights
from wbmm.io.reader import safe_load
from wbmm.models.state import CheckpointError
from wbmm.train.build import init_weights


def make():
    return randomize(timm.create_model("wbmm_a", dims=(8, 16, 32, 64), num_classes=4)).eval()


@pytest.mark.parametrize("name", ["model.pth", "model.safetensors", "bare.pth"])
def test_a_flipped_bit_is_noticed(tmp_path, name):
    """Wherever it is: in a weight, a name, the description or the file's own structure."""
    path = tmp_path / name
    if name == "bare.pth":
        torch.save(make().state_dict(), path)
    else:
        wbmm.save_model(make(), path)
    good = path.read_bytes()
    expected = digest(safe_load(path) if name != "model.pth" else safe_load(path)["state_dict"])
    chosen = random.Random(0)
    refused = 0
    for _ in range(60):
        place, bit = chosen.randrange(len(good)), chosen.randrange(8)
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << bit]) + good[place + 1 :])
        try:
            read = safe_load(path)
        except CheckpointError:
            refused += 1
        else:  # padding between records, or dates in the zip's directory
            assert digest(read.get("state_dict", read)) == expected
    assert refused > 30


def test_a_flipped_weight_is_refused_at_every_door(tmp_path):
    for name, where in (("model.pth", None), ("model.safetensors", -3)):
        path = wbmm.save_model(make(), tmp_path / name)
        data = bytearray(path.read_bytes())
        if where is None:
            with zipfile.ZipFile(path) as archive:
                member = next(m for m in archive.infolist() if m.filename.endswith("/data/7"))
            names, extra = (int.from_bytes(data[member.header_offset + at :][:2], "little") for at in (26, 28))
            where = member.header_offset + 30 + names + extra  # the first byte of its numbers
        data[where] ^= 0x40
        path.write_bytes(data)
        for door in (wbmm.load_model, partial(load_weights, make()), partial(init_weights, make())):
            with pytest.raises(CheckpointError, match=r"damaged.*checksum"):
                door(path)


def test_files_without_a_digest_load_as_before(tmp_path):
    save_file({k: v.contiguous() for k, v in make().state_dict().items()}, tmp_path / "a.safetensors")
    wbmm.load_model(tmp_path / "a.safetensors", args={"dims": (8, 16, 32, 64)})
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(make().state_dict(), tmp_path / "a.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(safe_load(tmp_path / "a.pth")["head.fc.weight"], make().head.fc.weight)


def test_the_digest_covers_names_types_shapes_and_the_description():
    tensors = {"a": torch.arange(4.0), "b": torch.zeros(2, dtype=torch.bfloat16)}
    base = digest(tensors, "card")
    assert digest(dict(reversed(tensors.items())), "card") == base
    assert digest({"a": torch.arange(4.0)[::1].clone(), "b": tensors["b"]}, "card") == base
    changed = [
        digest(tensors, "Card"),
        digest({"a": torch.arange(4.0), "c": tensors["b"]}, "card"),
        digest({**tensors, "a": torch.arange(4.0).view(2, 2)}, "card"),
        digest({**tensors, "b": tensors["b"].half()}, "card"),
        digest({**tensors, "a": torch.arange(4.0).neg()}, "card"),
    ]
    assert len({base, *changed}) == 6


def test_our_files_carry_one(tmp_path):
    from safetensors import safe_open

    model = make()
    with safe_open(wbmm.save_model(model, tmp_path / "a.safetensors"), "pt") as file:
        assert len(file.metadata()[DIGEST_KEY]) == 64
    assert len(safe_load(wbmm.save_model(model, tmp_path / "a.pth"))[DIGEST_KEY]) == 64


def test_compressed_and_overlapping_records_are_refused(tmp_path):
    big = {"0": bytes(200_000_000)}
    path = write(tmp_path / "bomb.pth", {"x": tensor(count=50_000_000)}, big, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1_000_000
    with pytest.raises(CheckpointError, match="compressed records"):
        safe_load(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # zipfile's own about the duplicate
        with zipfile.ZipFile(tmp_path / "twice.pth", "w") as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02}.")
            archive.writestr("archive/data.pkl", b"\x80\x02].")
    with pytest.raises(CheckpointError, match="two records of one name"):
        safe_load(tmp_path / "twice.pth")


def test_torchscript_and_plain_zips_are_named(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "script.pt")
    with pytest.raises(CheckpointError, match="TorchScript"):
        safe_load(tmp_path / "script.pt")
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(CheckpointError, match=r"none of torch\.save"):
        safe_load(tmp_path / "a.pth")


def test_pipes_folders_and_missing_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.pth")
    (tmp_path / "folder.pth").mkdir()
    for name, reason in (("pipe.pth", "a pipe"), ("folder.pth", "a folder"), ("x.pth", "no such file"), ("\0", "no")):
        with pytest.raises(CheckpointError, match=reason):
            safe_load(tmp_path / name)


def test_the_older_format_is_read_and_bounded(tmp_path):
    model = make()
    torch.save(model.state_dict(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    read = safe_load(tmp_path / "old.pth")
    torch.testing.assert_close(read, dict(model.state_dict()), rtol=0, atol=0)
    data = (tmp_path / "old.pth").read_bytes()
    for end in (10, 200, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.pth").write_bytes(data[:end])
        with pytest.raises(CheckpointError, match="not a readable checkpoint"):
            safe_load(tmp_path / "cut.pth")


def odd(**changes) -> dict:
    return {**make().state_dict(), **changes}


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        ({**make().state_dict(), 3: torch.zeros(1)}, "names are text"),
        (odd(**{"stem.conv1.weight": torch.zeros(4)}), "does not fit"),
        (odd(**{"stages.2.blocks.0.mixer.table": torch.zeros(32)}), "does not fit"),
        (odd(**{"head.fc.weight": torch.zeros(())}), "does not fit"),
        (odd(**{"head.fc.weight": torch.zeros(4, 64, dtype=torch.int64)}), "these are not weights"),
        (odd(**{"head.fc.weight": torch.full((4, 64), float("inf"))}), "NaN or infinite values"),
        (odd(**{"head.fc.weight": torch.full((4, 64), float("nan"))}), "NaN or infinite values"),
        (odd(**{"head.fc.weight": torch.zeros(4, 64).to(torch.float8_e4m3fn)}), "float8"),
        (odd(**{"head.fc.weight": torch.zeros(4, 64).to_sparse()}), "sparse|dense"),
        (odd(**{"head.fc.weight": torch.zeros(4, 64, device="meta")}), "meta|dense"),
        (odd(**{"head.fc.weight": torch.zeros(4, 64, dtype=torch.complex64)}), "complex|refused"),
        ({}, "no state dict"),
        ({"model": {}}, "no state dict"),
        ({"model": {"model": {"model": {"model": {"model": {"model": 1}}}}}}, "no state dict"),
        ([torch.zeros(1)], "no state dict"),
        (torch.zeros(3), "no state dict"),
    ],
)
def test_odd_contents_end_in_one_line(tmp_path, contents, reason):
    torch.save(contents, tmp_path / "a.pth")
    doors = [
        lambda: wbmm.load_model(tmp_path / "a.pth", args={"dims": (8, 16, 32, 64)}),
        lambda: load_weights(make(), tmp_path / "a.pth"),
        lambda: init_weights(make(), tmp_path / "a.pth"),
    ]
    for door in doors:
        with pytest.raises(CheckpointError) as caught:
            door()
        assert str(caught.value).startswith(str(tmp_path / "a.pth"))
        assert re.search(reason, str(caught.value))


def test_a_state_dict_that_contains_itself():
    loop = {"model": {}}
    loop["model"]["model"] = loop
    with pytest.raises(CheckpointError, match="no state dict"):
        load_weights(make(), loop)


def test_reading_keeps_weights_exactly(tmp_path):
    model = make()
    torch.save({"model": model.state_dict()}, tmp_path / "a.pth")
    torch.testing.assert_close(safe_load(tmp_path / "a.pth")["model"], dict(model.state_dict()), rtol=0, atol=0)
    saved = load_file(wbmm.save_model(model, tmp_path / "a.safetensors"))
    torch.testing.assert_close(saved, dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["model.onnx", "model.xml"])
def test_an_exported_file_is_not_a_checkpoint(tmp_path, name):
    (tmp_path / name).write_bytes(b"something")
    with pytest.raises(CheckpointError, match=f"{name} is an exported file.* give the one that it was made from"):
        safe_load(tmp_path / name)

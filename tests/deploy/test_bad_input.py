"""Bad input to the deployment commands: one line that says what is wrong, exit code 1, and nothing left behind."""

import os
import pickle
import resource
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import timm
import torch

import wbmm
from tests.helpers import randomize
from wbmm import cli

ROOT = Path(__file__).parents[2]


def make():
    return randomize(timm.create_model("wbmm_a", dims=(8, 16, 32, 64), num_classes=4)).eval()


class Bomb:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def good(folder):
    return wbmm.save_model(make(), folder / "good.pth")


def truncated(folder):
    path = good(folder)
    path.write_bytes(path.read_bytes()[:-5000])
    return path


def truncated_safetensors(folder):
    path = wbmm.save_model(make(), folder / "good.safetensors")
    path.write_bytes(path.read_bytes()[:-5000])
    return path


def plain_zip(folder):
    with zipfile.ZipFile(folder / "a.pth", "w") as archive:
        archive.writestr("readme.txt", "hello")
    return folder / "a.pth"


def malicious(folder):
    torch.save({"state_dict": make().state_dict(), "x": Bomb(folder / "pwned")}, folder / "evil.pth")
    return folder / "evil.pth"


def malicious_bare(folder):
    (folder / "evil.pth").write_bytes(pickle.dumps(Bomb(folder / "pwned")))
    return folder / "evil.pth"


def missing_keys(folder):
    state_dict = make().state_dict()
    del state_dict["stages.1.blocks.0.norm.bias"]
    torch.save(state_dict, folder / "a.pth")
    return folder / "a.pth"


def nan_weights(folder):
    model = make()
    model.stem.conv1.weight.data[0, 0, 0, 0] = float("nan")
    torch.save(model.state_dict(), folder / "a.pth")
    return folder / "a.pth"


def text_file(folder):
    (folder / "a.pth").write_text("not a checkpoint")
    return folder / "a.pth"


def absent(folder):
    return folder / "absent.pth"


CASES = {
    truncated: "truncated",
    truncated_safetensors: "truncated",
    plain_zip: "not a readable checkpoint",
    malicious: "could run code",
    malicious_bare: "",
    missing_keys: "stages.1.blocks.0.norm.bias",
    nan_weights: "NaN or infinite values, the first is stem.conv1.weight",
    text_file: "",
    absent: "no such file",
}
COMMANDS = {
    "reparam": lambda file, out: ["reparam", file, out / "x.safetensors"],
    "export": lambda file, out: ["export", file, out / "x.onnx", "--format", "onnx"],
    "quantize": lambda file, out: ["quantize", file, out / "x.onnx", "--calib", out, "--format", "onnx"],
    "predict": lambda file, out: ["predict", file, out.parent / "photo.png"],
    "eval": lambda file, out: ["eval", file, "--data", out.parent / "data"],
}


@pytest.fixture
def place(tmp_path):
    from PIL import Image

    (tmp_path / "out").mkdir()
    Image.effect_noise((60, 50), 90).convert("RGB").save(tmp_path / "photo.png")
    for label in "abcd":
        (tmp_path / "data" / "val" / label).mkdir(parents=True)
        Image.effect_noise((60, 50), 90).convert("RGB").save(tmp_path / "data" / "val" / label / "1.png")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_bad_file_through_every_command(case, command, place, capsys):
    file = case(place)
    code = cli.main([str(part) for part in COMMANDS[command](file, place / "out")])
    error = capsys.readouterr().err
    assert code == 1
    assert str(file) in error
    assert CASES[case] in error
    assert "Traceback" not in error
    assert not list((place / "out").iterdir())
    assert not (place / "pwned").exists()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_bad_file_through_load_model(case, place):
    file = case(place)
    with pytest.raises(ValueError, match=str(file)) as caught:
        wbmm.load_model(file)
    assert CASES[case] in str(caught.value)
    assert not (place / "pwned").exists()


def test_wrong_name_missing_folder_and_existing_file(place, capsys):
    file = good(place)
    for argv, reason in (
        (["--model", "wbmm_t"], "says that it is a wbmm_a, not a wbmm_t"),
        (["--model", "wbmm_q"], "not a wbmm_q"),
    ):
        assert cli.main(["reparam", str(file), str(place / "out" / "x.pth"), *argv]) == 1
        assert reason in capsys.readouterr().err
    assert cli.main(["reparam", str(file), str(place / "nowhere" / "x.pth")]) == 1
    assert "there is no folder" in capsys.readouterr().err
    (place / "out" / "x.pth").write_text("precious")
    assert cli.main(["reparam", str(file), str(place / "out" / "x.pth")]) == 1
    assert "exists already" in capsys.readouterr().err
    assert (place / "out" / "x.pth").read_text() == "precious"


def wbmm_process(*argv, limit=None):
    def restrict():
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-m", "wbmm", *map(str, argv)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, preexec_fn=restrict, stdout=-1, stderr=-1, text=True
    )  # fmt: skip


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_full_disk(place, suffix):
    process = wbmm_process("reparam", good(place), place / "out" / f"x{suffix}", limit=20_000)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1, error
    assert "could not write" in error
    assert "nothing is left behind" in error
    assert len(error.strip().splitlines()) == 1
    assert not list((place / "out").iterdir())


def test_killed_while_writing(place):
    """The kill comes between the first and the last byte: the file's own name is not there, and the next run works."""
    script = (
        "import sys, pathlib, time\n"
        "write = pathlib.Path.write_bytes\n"
        "def slow(path, data):\n"
        "    write(path, data[: len(data) // 2]); print('half', flush=True); time.sleep(60)\n"
        "pathlib.Path.write_bytes = slow\n"
        "from wbmm.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    file, out = good(place), place / "out" / "x.safetensors"
    command = [sys.executable, "-c", script, "reparam", str(file), str(out)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "half"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    assert not out.exists()
    time.sleep(0.1)
    assert cli.main(["reparam", str(file), str(out)]) == 0
    assert [path.name for path in out.parent.iterdir()] == ["x.safetensors"]
    assert wbmm.load_model(out).card.form == "compact"

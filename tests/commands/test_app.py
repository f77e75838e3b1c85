"""`wbmm app`: every kind of file behind the page, and the page itself in Chromium."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.fixtures.colours import make_image
from tests.helpers import randomize
from wbmm.commands.app import Tool, build_page, open_tool
from wbmm.deploy.predict import predict
from wbmm.deploy.runtime import open_runner
from wbmm.io.files import save_model

ROOT = Path(__file__).parents[2]
CHROMIUM = "/usr/bin/chromium"
# No sandbox: tests often run as root in a container. The others keep the browser itself from calling home.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


@pytest.fixture
def checkpoint(trained, tmp_path):
    return save_model(trained, tmp_path / "net.pth")


@pytest.fixture
def red(tmp_path):
    path = tmp_path / "red.png"
    make_image("red", 7).save(path)
    return path


def test_a_classifier_says_what_predict_says(checkpoint, red):
    tool = open_tool(str(checkpoint))
    assert tool.kind == "classifier"
    (expected,) = predict(open_runner(checkpoint), [red], topk=4)
    found = tool.look(Image.open(red))
    assert sum(found.values()) == pytest.approx(1)
    assert {name: pytest.approx(chance, abs=1e-6) for _, name, chance in expected.classes} == found


def test_a_run_folder_and_exported_files(trained, checkpoint, files, tmp_path, red):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(save_model(trained, tmp_path / "best.pt"), run / "best.pt")
    expected = open_tool(str(checkpoint)).look(Image.open(red))
    for source in (run, files["compact"], files["onnx"], files["openvino"]):
        found = open_tool(str(source)).look(Image.open(red))
        assert found == pytest.approx(expected, abs=1e-3)


def test_classes_of_one_name_are_told_apart(trained, tmp_path, red):
    card = trained.card.replace(class_names=["crane", "blue", "crane", "red"])
    found = open_tool(str(save_model(trained, tmp_path / "twice.pth", card))).look(Image.open(red))
    assert list(found) == ["crane (0)", "blue", "crane (2)", "red"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no.pth"], "no.pth: there is no such file"),
        (["{tmp}"], "is a folder without best.pt or last.pt: give a file, or the folder of a run"),
        (["{tmp}/red.png"], "red.png: no model file; give a run's folder or a file that ends with one of .safetensors"),
        (["{net}", "--config", "x.py"], "--config is for the checkpoint of a segmentor or detector"),
        (["{net}", "--port", "0"], "--port 0: give 1 to 65535"),
        (["{net}", "--port", "{busy}"], "in use; give another --port"),
    ],
)
def test_errors_are_one_line(argv, message, checkpoint, red, command, tmp_path, capsys):
    pytest.importorskip("gradio")
    empty = tmp_path / "empty"
    empty.mkdir()
    red.rename(empty / "red.png") if "red.png" in argv[0] else None
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        values = {"tmp": empty, "net": checkpoint, "busy": busy.getsockname()[1]}
        assert command("app", *(text.format(**values) for text in argv)) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_without_gradio_the_extra_is_named(checkpoint, command, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert command("app", checkpoint) == 1
    assert capsys.readouterr().err == "wbmm app: wbmm app needs the package gradio: pip install 'wbmm[app]'\n"


def test_no_part_of_the_page_shares_pictures():
    pytest.importorskip("gradio")
    page = build_page(Tool("segmentor", "x.pth", lambda image, number: (image, ""), ("opacity", 0.6)))
    parts = [part["props"] for part in page.config["components"]]
    assert sum(part["name"] == "image" for part in parts) == 2
    assert not any("share" in (part.get("buttons") or []) for part in parts)
    assert all(part["buttons"] for part in parts if part["name"] == "image")  # None would be all of them
    assert not page.analytics_enabled


@pytest.fixture
def segmentor(tmp_path):
    """(folder with a checkpoint and its configuration, picture)"""
    pytest.importorskip("mmseg")
    from tests.mm.shapes import write_config, write_shapes
    from wbmm.mm.networks import build_segmentor

    config = write_config(tmp_path / "tiny.py", write_shapes(tmp_path / "data", train=1, val=1))
    model = randomize(build_segmentor(config)).eval()
    torch.save({"meta": {}, "state_dict": model.state_dict()}, tmp_path / "iter_7.pth")
    return tmp_path, next((tmp_path / "data" / "images" / "validation").glob("*.jpg"))


@pytest.fixture
def detector(tmp_path):
    """(folder with a checkpoint and its configuration, picture)"""
    pytest.importorskip("mmdet")
    from tests.mm.objects import write_config, write_objects
    from wbmm.mm.networks import build_detector

    config = write_config(tmp_path / "tiny.py", write_objects(tmp_path / "data", train=1, val=1))
    model = build_detector(config)
    randomize(model.backbone)
    for head in model.roi_head.bbox_head:  # far from equal scores, or nothing would be above a threshold
        torch.nn.init.normal_(head.fc_cls.weight, std=0.5)
    torch.save({"meta": {}, "state_dict": model.state_dict()}, tmp_path / "epoch_1.pth")
    return tmp_path, next((tmp_path / "data" / "val2017").glob("*.jpg"))


def test_a_segmentor_with_its_configuration_beside_it(segmentor):
    folder, path = segmentor
    tool = open_tool(str(folder))
    assert tool.kind == "segmentor"
    image = Image.open(path)
    picture, text = tool.look(image, 0.6)
    assert picture.width >= image.width
    assert "%" in text
    left = (picture.width - image.width) // 2
    plain = tool.look(image, 0.0)[0].crop((left, 0, left + image.width, image.height))
    np.testing.assert_array_equal(plain, image)
    assert (np.asarray(picture.crop((left, 0, left + image.width, image.height))) != np.asarray(image)).any()
    (folder / "tiny.py").rename(folder / "elsewhere.txt")
    with pytest.raises(ValueError, match=r"needs its configuration \(--config FILE\)"):
        open_tool(str(folder / "iter_7.pth"))


def test_a_detector(detector):
    folder, path = detector
    tool = open_tool(str(folder / "epoch_1.pth"), folder / "tiny.py")
    assert tool.kind == "detector"
    image = Image.open(path)
    picture, text = tool.look(image, 0.0)
    assert picture.size == image.size
    assert text[0].isdigit()
    assert tool.look(image, 1.0)[1] == "nothing above this score"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serve(file, folder):
    """(process, address, line about the model) of the command, as a user starts it; temporary files go to `folder`."""
    pytest.importorskip("gradio")
    command = [sys.executable, "-m", "wbmm", "app", str(file), "--port", str(free_port())]
    environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    lines = []
    try:
        for line in process.stdout:  # mmdet prints some of its own first
            if line.startswith("http"):
                break
            lines.append(line)
        yield process, line.split("  ")[0], lines[-1]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextmanager
def dropped(address, picture):
    """The page in a browser, with a picture dropped on it, and the list of what it asks for."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"no browser: {CHROMIUM} is missing")
    asked = []
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address, timeout=120_000)
        page.wait_for_selector("text=drop a picture here", timeout=120_000)
        page.set_input_files("input[type=file]", str(picture))
        yield page, asked
        browser.close()


def test_the_page_in_a_browser(checkpoint, red, tmp_path):
    (tmp_path / "tmp").mkdir()
    with serve(checkpoint, tmp_path / "tmp") as (process, address, what):
        assert "wbmm_a (training form, 4 classes" in what
        with dropped(address, red) as (page, asked):
            page.wait_for_function("document.body.innerText.includes('%')", timeout=120_000)
            text = page.inner_text("body")
        expected = open_tool(str(tmp_path / "net.pth")).look(Image.open(red))
        best = max(expected, key=expected.get)
        assert best == "red"
        lines = text.splitlines()
        assert lines[lines.index("classes") + 1] == best  # the heading
        for name, chance in expected.items():
            assert f"{name}\n{round(100 * chance)}%" in text
        assert asked
        assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []  # nothing from elsewhere
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert list((tmp_path / "tmp").glob("wbmm-app-*")) == []


@pytest.mark.parametrize(("kind", "slider"), [("segmentor", "opacity of the colours"), ("detector", "least score")])
def test_pictures_come_back_in_a_browser(kind, slider, request, tmp_path):
    """What the page shows below the picture is what the tool says of it, at the slider's first value."""
    folder, path = request.getfixturevalue(kind)
    tool = open_tool(str(folder))
    _, expected = tool.look(Image.open(path), tool.slider[1])
    (tmp_path / "tmp").mkdir()
    with serve(folder, tmp_path / "tmp") as (_, address, what):
        assert f"a {kind} of " in what
        with dropped(address, path) as (page, _):
            page.wait_for_function("document.querySelector('textarea').value", timeout=120_000)
            assert page.input_value("textarea") == expected
            assert slider in page.inner_text("body")
            page.wait_for_function("document.images.length == 2", timeout=120_000)  # dropped, and drawn

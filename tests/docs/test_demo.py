"""The page of docs/demo: it prepares pictures as `wbmm predict` does, and gives the same classes in Chromium."""

import functools
import http.server
import importlib.util
import json
import re
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from wbmm.data.images import draw_landscape
from wbmm.deploy.predict import predict
from wbmm.deploy.runtime import open_runner
from wbmm.io.card import ModelCard
from wbmm.models.hub import local_weights

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "demo"
CHROMIUM = Path("/usr/bin/chromium")
# No sandbox: tests often run as root in a container. The others keep the browser itself from calling home.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
NO_NETWORK = ("ENOTFOUND", "ECONNREFUSED", "ETIMEDOUT", "EAI_AGAIN", "ENETUNREACH")
_spec = importlib.util.spec_from_file_location("build_demo", ROOT / "scripts" / "build_demo.py")
build_demo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build_demo)


def in_node(code, stdin=b""):
    """What a module with the page's functions prints; standard input is its first picture."""
    if (node := shutil.which("node")) is None:
        pytest.skip("node is not installed")
    code = f"import * as page from {json.dumps((PAGE / 'pictures.js').as_uri())};\n{code}"
    command = [node, "--input-type=module", "--eval", code]
    done = subprocess.run(command, input=stdin, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


READ = "import fs from 'node:fs'; const data = new Uint8ClampedArray(fs.readFileSync(0));\n"


def noise(width, height):
    return np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        *[((300, 200), (84, 56)), ((640, 427), (83, 56)), ((33, 21), (88, 56)), ((101, 99), (57, 56))],
        *[((56, 80), (56, 80)), ((56, 90), (56, 56)), ((1, 1), (56, 56)), ((7, 3000), (56, 24000))],
    ],
)
def test_the_resize_is_that_of_pillow(size, wanted):
    """Byte for byte."""
    picture = noise(*size)
    (width, height), (to_width, to_height) = size, wanted
    code = (
        f"process.stdout.write(page.resize({{data, width: {width}, height: {height}}}, {to_width}, {to_height}).data)"
    )
    found = np.frombuffer(in_node(READ + code, picture.tobytes()), np.uint8).reshape(to_height, to_width, 3)
    np.testing.assert_array_equal(found, Image.fromarray(picture).resize(wanted, Image.Resampling.BICUBIC))


@pytest.mark.parametrize("size", [(300, 200), (200, 301), (57, 56), (55, 58), (640, 427), (1000, 333)])
@pytest.mark.parametrize(("side", "crop_pct"), [(56, 1.0), (56, 0.875), (33, 0.9)])
def test_the_model_sees_what_predict_shows_it(size, side, crop_pct):
    picture = noise(*size)
    code = f"""
        const [width, height] = {list(size)};
        process.stdout.write(page.planes(page.prepare({{data, width, height}}, {{size: {side}, crop_pct: {crop_pct}}})))
    """
    found = np.frombuffer(in_node(READ + code, picture.tobytes()), np.uint8).reshape(3, side, side)
    card = ModelCard("wbmm_a", input_size=(3, side, side), crop_pct=crop_pct, input="uint8")
    np.testing.assert_array_equal(found, card.transform()(Image.fromarray(picture)))


def test_softmax():
    found = json.loads(in_node("console.log(JSON.stringify(page.softmax([1000, 1001, 999])))"))
    assert found == pytest.approx([0.24472847, 0.66524096, 0.09003057])


def test_packages_are_pinned_with_checksums_and_no_address():
    package = json.loads((PAGE / "package.json").read_text())
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in package["dependencies"].values())
    locked = json.loads((PAGE / "package-lock.json").read_text())["packages"]
    assert locked[""]["dependencies"] == package["dependencies"]
    installed = [entry for name, entry in locked.items() if name]
    assert installed
    assert all(entry["integrity"].startswith("sha512-") for entry in installed)
    assert not any("resolved" in entry for entry in installed)


def test_nothing_binary_is_committed():
    kinds = {path.suffix or path.name for path in PAGE.iterdir()}
    assert kinds == {".html", ".css", ".js", ".json", ".npmrc"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built page."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("site")
    try:
        build_demo.build(folder / "demo", ROOT / "build" / "npm")
    except SystemExit as error:
        if any(word in str(error) for word in NO_NETWORK):
            pytest.skip("npm cannot reach its registry")
        raise
    return folder


@pytest.fixture(scope="module")
def address(site):
    """A plain file server."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.is_file():
        pytest.skip(f"there is no browser at {CHROMIUM}")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield chromium
        chromium.close()


def draw_pictures(folder):
    """Of several sizes, formats and modes; the last is a JPEG that says it is to be turned."""
    pictures = [
        folder / name for name in ("wide.png", "tall.jpg", "small.webp", "grey.png", "palette.gif", "turned.jpg")
    ]
    wide, tall, small, grey, palette, turned = (draw_landscape(number) for number in range(6))
    wide.resize((333, 180)).save(pictures[0])
    tall.resize((190, 420)).save(pictures[1], quality=90)
    small.resize((40, 31)).save(pictures[2], lossless=True)
    grey.convert("L").save(pictures[3])
    palette.quantize(64).save(pictures[4])
    orientation = Image.Exif()
    orientation[0x0112] = 6
    turned.resize((200, 150)).save(pictures[5], exif=orientation)
    return pictures


def drop(page, picture):
    """As a mouse does, with the file's bytes."""
    code = """([bytes, name]) => {
        const transfer = new DataTransfer();
        transfer.items.add(new File([new Uint8Array(bytes)], name));
        document.getElementById("drop").dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, bubbles: true}));
    }"""
    page.evaluate(code, [list(picture.read_bytes()), picture.name])
    wait_for(page, f"{picture.name}:")


def wait_for(page, text):
    """Until the page says so."""
    from playwright.sync_api import expect

    expect(page.locator("#status")).to_contain_text(text, timeout=120_000)


def classes(page):
    rows = page.query_selector_all("#classes .class")
    return [(row.query_selector(".name").inner_text(), float(row.get_attribute("data-chance"))) for row in rows]


def bars(page):
    """What part of its row each bar fills."""
    return page.evaluate(
        "[...document.querySelectorAll('.fill')].map(bar => bar.offsetWidth / bar.parentElement.offsetWidth)"
    )


def test_the_page_says_what_predict_says(address, browser, tmp_path):
    page, asked, errors = browser.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(f"{address}demo/")
    wait_for(page, "Ready.")
    pictures = draw_pictures(tmp_path)
    for picture, expected in zip(pictures, predict(open_runner(local_weights("wbmm_a.tiny50")), pictures), strict=True):
        drop(page, picture)
        found = classes(page)
        assert found[0][0] == expected.classes[0][1], picture.name
        assert dict(found) == pytest.approx({name: chance for _, name, chance in expected.classes}, abs=1e-3)
        assert bars(page) == pytest.approx([chance for _, chance in found], abs=0.01)
    page.set_input_files("#file", str(pictures[0]))  # the other way in
    wait_for(page, "wide.png:")
    assert errors == []
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []  # nothing from elsewhere
    assert {url.removeprefix(address) for url in asked} >= {"demo/model.onnx", "demo/ort/ort-wasm-simd-threaded.wasm"}


def test_what_is_not_a_picture(address, browser, tmp_path):
    page = browser.new_page()
    page.goto(f"{address}demo/")
    (tmp_path / "letter.png").write_text("no picture")
    page.set_input_files("#file", str(tmp_path / "letter.png"))
    wait_for(page, "is not a picture")
    assert page.locator("#result").is_hidden()


def test_a_page_without_its_model(browser, tmp_path):
    shutil.copytree(PAGE, tmp_path / "demo")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/demo/")
        wait_for(page, "build_demo.py")
        server.shutdown()


@pytest.mark.parametrize(
    ("name", "scheme", "width"), [("light", "light", 1100), ("dark", "dark", 1100), ("phone", "dark", 360)]
)
def test_light_dark_and_phone(address, browser, name, scheme, width, tmp_path):
    """Nothing is wider than the screen, the keyboard reaches the picture field, text stands out from its ground."""
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    page.goto(f"{address}demo/")
    drop(page, draw_pictures(tmp_path)[0])
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "file"
    ground, text, quiet = page.evaluate(
        "['--ground', '--text', '--quiet'].map(n => getComputedStyle(document.documentElement).getPropertyValue(n))"
    )
    assert contrast(ground, text) > 7
    assert contrast(ground, quiet) > 4.5
    page.screenshot(path=tmp_path / f"{name}.png", full_page=True)


def contrast(one, other):
    """As WCAG defines it, of two colours in hexadecimal digits."""

    def light(colour):
        parts = [int(colour.strip()[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)

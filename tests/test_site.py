"""The site builds without a warning, its links and anchors lead somewhere, and its pages load nothing from the web."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
for package in ("mkdocs", "material", "mkdocstrings"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[docs]'")

CHROMIUM = Path("/usr/bin/chromium")
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "embed": "src"}


class Page(HTMLParser):
    """The links, the anchors and the files that a page loads."""

    def __init__(self, path: Path):
        super().__init__()
        self.links, self.anchors, self.loads = set(), set(), set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors |= {attributes[key] for key in ("id", "name") if attributes.get(key)}
        if tag == "a" and attributes.get("href"):
            self.links.add(attributes["href"])
        elif tag == "link":  # style sheets, icons, hints to connect
            self.loads.add(attributes["href"])
        elif attributes.get(LOADED.get(tag)):
            self.loads.add(attributes[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_every_page_of_the_docs_is_there(site, pages):
    names = {path.relative_to(site).as_posix() for path in pages}
    sources = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    sources += [path.relative_to(ROOT) for path in (ROOT / "models").glob("*.md")]
    expected = {path.with_name(path.name.replace("README", "index")).with_suffix(".html") for path in sources}
    assert {path.as_posix() for path in expected} <= names


def test_links_and_anchors_lead_somewhere(site, pages):
    broken = []
    for path, page in pages.items():
        for link in page.links | page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            lost = parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors
            if not target.is_file() or lost:
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


def test_nothing_is_loaded_from_the_web(site, pages):
    """Links may lead elsewhere; what a page loads by itself may not."""
    outside = {load for page in pages.values() for load in page.loads if urlsplit(load).netloc}
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        outside |= set(re.findall(r"(?:url\(|@import\s*)[\"']?((?:https?:)?//[^\"')\s]+)", text))
    assert outside == set()


@pytest.mark.skipif(not CHROMIUM.exists(), reason="there is no chromium")
def test_a_browser_asks_for_nothing_from_the_web(site):
    """What scripts ask for, too: search, the switch between light and dark. No page is wider than a phone's screen."""
    api = pytest.importorskip("playwright.sync_api")
    outside, wide = set(), []
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.on("request", lambda request: outside.add(request.url) if request.url.startswith("http") else None)
        for name in ("index.html", "operator.html", "api.html", "models/index.html", "segmentation.html"):
            page.goto((site / name).as_uri())
            page.wait_for_load_state("networkidle")
            if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
                wide.append(name)
        browser.close()
    assert outside == set()
    assert wide == []


def test_sources_are_shown_as_code(site):
    """A link to ../wbmm/ops/reference.py leads to a page with its text."""
    text = (site / "wbmm" / "ops" / "reference.py.html").read_text(encoding="utf-8")
    assert "gated_ffn" in text
    assert 'href="wbmm/ops/reference.py.html"' in (site / "design.html").read_text(encoding="utf-8")


def test_the_reference_has_the_docstrings(pages, site):
    anchors = pages[site / "api.html"].anchors
    assert {"wbmm.models.fuse.fuse", "wbmm.layers.mixers.WBMM2d", "wbmm.ops.reference.windowed"} <= anchors

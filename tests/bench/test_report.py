"""`wbmm bench report`: verdicts follow the figures, nothing is mixed or lost, the page is right in a real browser."""

import json
import re
from pathlib import Path

import pytest

from wbmm import cli
from wbmm.bench.dense import BACKBONES
from wbmm.bench.operators import paper_figures
from wbmm.bench.report import build_blocks
from wbmm.bench.report.chart import Axis, Chart, Point, Series
from wbmm.bench.report.findings import net_findings, operator_findings
from wbmm.bench.report.measured import changes, load_runs, op_speeds, split_name
from wbmm.bench.report.page import TableBlock
from wbmm.bench.results import Entry
from wbmm.bench.segmentors import paper_speeds
from wbmm.bench.speed import paper_model_speeds

FACTS = {"device": "cpu", "machine": "Testing CPU", "threads": "2", "torch": "2", "wbmm": "0", "date": "2026-01-02"}
CHROMIUM = Path("/usr/bin/chromium")


def timed(speed, batch, **more):
    """Three runs around a speed in images a second."""
    return {"seconds": [batch / speed * part for part in (0.98, 1.0, 1.03)], **more}


def op_entries(speeds=None, batches=(4, 16), maps=(7, 14, 28, 56)):
    """Cells with the speeds of `speeds`, by default the paper's divided by a hundred, and a backend of ours."""
    speeds = speeds or {key: value / 100 for key, value in paper_figures().items()}
    setting = {"channels": 256, "dtype": "float32", "layout": "nchw", "mode": "forward", "device": "cpu"}
    limits = {"copy": {"seconds": [0.01], "bytes": 10**8}, "product": {"seconds": [0.01], "macs": 10**9}}
    yield Entry("op", {"limits": True, "dtype": "float32", "device": "cpu", "precision": "tf32"}, limits, FACTS, "c")
    for batch in batches:
        for side in maps:
            results = {
                f"{method} {size}x{size}": timed(speed, batch, macs=10**7 * size, bytes=10**6)
                for (method, size, b, s), speed in speeds.items()
                if (b, s) == (batch, side)
            }
            results["WBMM 7x7 (onednn)"] = timed(5e3 / side, batch, macs=10**8, bytes=10**6)
            results["DW-LKA 13x13"] = {"why_not": "no CUDA device"}
            cell = {"batch": batch, "map": side, **setting, "precision": "tf32"}
            yield Entry("op", cell, results, FACTS, "wbmm bench op --quick")


def net_entries(gain=1.2):
    setting = {"device": "cpu", "dtype": "float32", "autocast": False, "precision": "tf32"}
    for bench, forms in (("model", ("plain", "compact")), ("train", ("plain-training", "training"))):
        for size in ("p", "t"):
            cell = {"size": size, "height": 224, "width": 224, "batch": 16, **setting}
            results = {}
            for form in forms:
                results[f"wbmm_{size}:{form}"] = timed(10 * gain, 16, peak_mb=900.0, layout="nchw")
                results[f"unireplknet_{size}:{form}"] = timed(10, 16, peak_mb=1000.0, layout="nchw")
            yield Entry(bench, cell, results, FACTS, f"wbmm bench {bench} --preset paper")
    for bench in ("seg", "det"):
        cell = {"size": "t", "height": 512, "width": 512, "batch": 2, **setting}
        results = {name: timed(2 + 0.1 * i, 2, layout="nchw") for i, name in enumerate(BACKBONES)}
        yield Entry(bench, cell, results, FACTS, f"wbmm bench {bench}")
    cell = {"runtime": "openvino-int8", "size": "p", "height": 224, "width": 224, "batch": 1, "device": "cpu"}
    yield Entry("edge", cell, {"wbmm_p": timed(20, 1), "unireplknet_p": timed(10, 1)}, FACTS, "wbmm bench model")


def write(folder, entries):
    folder.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        line = {key: getattr(entry, key) for key in ("bench", "cell", "results", "facts", "command")}
        with open(folder / f"{entry.bench}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write(tmp_path_factory.mktemp("run"), [*op_entries(), *net_entries()])


@pytest.fixture(scope="module")
def report(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    assert cli.main(["bench", "report", str(run), "--out", str(out)]) == 0
    return out


def verdicts(findings):
    return [finding.verdict for finding in findings]


def test_the_papers_own_figures_bear_it_out_except_where_they_do_not():
    paper = paper_figures()
    found = {finding.claim: finding for finding in operator_findings({}, paper)}
    assert verdicts(found.values()) == ["unknown"] * 7
    losses = [value for _, value in next(iter(found.values())).theirs]
    assert 0.705 < min(losses) < max(losses) < 0.785, "71 to 78 %, as it says"
    windows = found["The product gets faster with larger windows"]
    assert windows.summary(windows.theirs).startswith("23 of 25; 0.69x (batch 4, 28x28)")


def test_verdicts_follow_the_figures():
    paper = paper_figures()
    same = op_speeds(list(op_entries()))
    assert verdicts(operator_findings(same, paper))[:2] == ["holds", "holds"]
    flat = dict.fromkeys(paper, 1000.0)
    flat_ones = verdicts(operator_findings(op_speeds(list(op_entries(flat))), paper))
    assert flat_ones == ["fails", "fails", "unknown", "fails", "fails", "fails", "fails"]
    one_good = {**flat, ("DW-Std", 13, 16, 28): 10.0}
    assert verdicts(operator_findings(op_speeds(list(op_entries(one_good))), paper))[0] == "partly"


def test_findings_of_whole_nets():
    def by_bench(gain):
        benches = {}
        for entry in net_entries(gain):
            benches.setdefault(entry.bench, []).append(entry)
        return {finding.claim[:30]: finding for finding in net_findings(benches)}

    good, bad = by_bench(1.5), by_bench(0.9)
    cpu, training, memory = (
        "On a CPU WBMM is 1.03 to 1.48 ",
        "Training is 1.56 to 1.88 times",
        "Training takes 8 to 12 % less ",
    )
    assert [good[key].verdict for key in (cpu, training, memory)] == ["holds", "holds", "holds"]
    assert [bad[key].verdict for key in (cpu, training)] == ["fails", "fails"]
    hierarchical = good["Segmentors with hierarchical w"]
    assert hierarchical.summary(hierarchical.theirs).startswith("22 of 24; 0.95x (T, 512x512 px, batch 2)")
    assert all(finding.verdict == "unknown" for finding in net_findings({}))
    assert len(paper_speeds()) == 144
    assert len(paper_model_speeds("desktop")) + len(paper_model_speeds("edge")) == 185


def test_names_of_operators():
    assert split_name("WBMM 14x14 (onednn)") == ("WBMM (onednn)", 14)
    assert split_name("DW-Std 5x5, compiled") == ("DW-Std, compiled", 5)
    assert split_name("DW-LKA 27x27") == ("DW-LKA", 27)


def test_the_papers_figures_have_columns_of_their_own(run):
    tables = [block for block in build_blocks(load_runs([run])) if isinstance(block, TableBlock)]
    assert len(tables) >= 8
    for table in tables:
        for i, head in enumerate(table.headers):
            assert ("paper" in head and head != "the paper says") <= (i in table.theirs), head
        assert all(len(row) == len(table.headers) for row in table.rows)


def test_both_pages_say_the_same(report):
    html, text = (report / "report.html").read_text(), (report / "report.md").read_text()
    for needed in ("What holds here", "Roofline", "Segmentors", "Detectors", "Edge runtimes", "wbmm bench op --quick"):
        assert needed in html
        assert needed in text
    assert html.count("<table") == text.count("\n| ---")
    pictures = re.findall(r"\(figures/([^)]+)\.svg\)", text)
    assert len(pictures) == len(set(pictures)) == html.count("<svg")
    assert sorted(path.stem for path in (report / "figures").iterdir()) == sorted(pictures)
    assert "http" not in html, "nothing is asked for from anywhere"
    assert "prefers-color-scheme:dark" in (report / "figures" / f"{pictures[0]}.svg").read_text()


def test_what_became_slower_is_marked(run, tmp_path, capsys):
    old = write(tmp_path / "old", [*op_entries({k: v / 50 for k, v in paper_figures().items()}), *net_entries()])
    found, same = changes(load_runs([run]), load_runs([old]))
    assert same
    assert {change.mark for change in found if change.name == "DW-Std 5x5"} == {"worse"}
    assert {change.mark for change in found if change.name.startswith("unireplknet")} == {""}
    assert cli.main(["bench", "report", str(run), "--against", str(old), "--out", str(tmp_path / "out")]) == 0
    html = (tmp_path / "out" / "report.html").read_text()
    assert re.search(r'<td class="[^"]*worse">0\.50x', html)
    assert "** 0.50x" not in (tmp_path / "out" / "report.md").read_text()
    assert "| **0.50x** |" in (tmp_path / "out" / "report.md").read_text()


def test_another_machine_is_compared_within_its_cells(run, tmp_path):
    twice = {key: value / 50 for key, value in paper_figures().items()}
    entries = [Entry(e.bench, e.cell, e.results, {**FACTS, "machine": "other"}, "") for e in op_entries(twice)]
    for entry in entries:  # twice as fast throughout
        for name, result in entry.results.items():
            if "onednn" in name:
                result["seconds"] = [second / 2 for second in result["seconds"]]
    found, same = changes(load_runs([run]), load_runs([write(tmp_path / "old", entries)]))
    assert not same
    assert all(change.speed == pytest.approx(1, abs=0.02) for change in found if "limits" not in change.cell)


def test_pictures_of_an_earlier_report_go_and_others_stay(run, tmp_path):
    figures = tmp_path / "figures"
    figures.mkdir()
    (figures / "mine.svg").write_text("<svg>mine</svg>")
    (figures / "old.svg").write_text(Chart("old", "", Axis("x"), Axis("y"), [Series("s", [Point(1, 1)])]).svg(True))
    assert cli.main(["bench", "report", str(run), "--out", str(tmp_path)]) == 0
    assert (figures / "mine.svg").is_file()
    assert not (figures / "old.svg").exists()


def test_two_machines_are_told_apart(run, tmp_path):
    other = [Entry(e.bench, e.cell, e.results, {**FACTS, "machine": "other"}, "") for e in op_entries()]
    machines = load_runs([run, write(tmp_path / "other", other)])
    assert [machine.name for machine in machines] == ["2 threads of Testing CPU", "2 threads of other"]
    names = [chart.name for block in build_blocks(machines) for chart in getattr(block, "charts", ())]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["nowhere"], "nowhere: there is no log of a benchmark"), (["{run}", "--against", "{empty}"], "no log")],
)
def test_wrong_arguments_are_one_line(arguments, reason, run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    argv = [text.format(run=run, empty=tmp_path / "empty") for text in arguments]
    assert cli.main(["bench", "report", *argv, "--out", str(tmp_path / "out")]) == 1
    assert reason in capsys.readouterr().err


def test_a_chart_puts_larger_values_higher_and_its_marks_inside():
    points = [Point(1, 10), Point(10, 100, 50, 200), Point(100, 1000)]
    chart = Chart("a", "A & B", Axis("x"), Axis("y"), [Series("s<", points), Series("p", points[:2], theirs=True)])
    svg = chart.svg(standalone=True)
    heights = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)" r="3.2" fill', svg)][:3]
    assert heights == sorted(heights, reverse=True)
    assert "A &amp; B" in svg
    assert "s&lt;" in svg
    width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())
    assert all(0 <= float(x) <= width for x in re.findall(r'c?x[12]?="(-?[\d.]+)"', svg))
    assert all(0 <= float(y) <= height for y in re.findall(r'c?y[12]?="(-?[\d.]+)"', svg))


# What sticks out: an element wider than the window, unless an ancestor of it scrolls.
STICKING_OUT = """() => [...document.querySelectorAll('body *')].filter(e => {
  const box = e.getBoundingClientRect();
  if (box.width === 0 || box.right <= document.documentElement.clientWidth + 1 && box.left >= -1) return false;
  for (let a = e.parentElement; a; a = a.parentElement)
    if (['auto', 'scroll'].includes(getComputedStyle(a).overflowX) && a.getBoundingClientRect().right
        <= document.documentElement.clientWidth + 1) return false;
  return true;
}).map(e => e.outerHTML.slice(0, 120))"""
CUT_TEXT = """() => [...document.querySelectorAll('svg text')].filter(t => {
  const box = t.getBoundingClientRect(), all = t.ownerSVGElement.getBoundingClientRect();
  return box.left < all.left - 1 || box.right > all.right + 1 || box.bottom > all.bottom + 1;
}).map(t => t.textContent)"""


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.is_file():
        pytest.skip(f"there is no browser at {CHROMIUM}")
    with api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        chromium = playwright.chromium.launch(executable_path=str(CHROMIUM), args=arguments)
        yield chromium
        chromium.close()


@pytest.mark.parametrize(
    ("name", "scheme", "width"), [("light", "light", 1280), ("dark", "dark", 1280), ("phone", "light", 390)]
)
def test_the_page_in_a_browser(report, browser, name, scheme, width, tmp_path):
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 900}, device_scale_factor=1, offline=True
    )
    page, asked, errors = context.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((report / "report.html").as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in asked if url.startswith("file:")]) == 1, "the page itself and nothing else"
    assert errors == []
    assert page.evaluate(STICKING_OUT) == []
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.evaluate(CUT_TEXT) == []
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", ground)[:3])) / 3
    assert (brightness > 128) == (scheme == "light")
    ink = page.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
    assert (sum(map(int, re.findall(r"\d+", ink)[:3])) / 3 < 128) == (scheme == "light")
    picture = page.screenshot(full_page=True, path=str(tmp_path / f"{name}.png"))
    assert len(picture) > 50_000
    context.close()


def test_training_has_no_cached_matrix(tmp_path):
    """And so no speed-up of it against the batch: the other curves are drawn."""
    entries = [
        Entry(
            one.bench, one.cell | {"mode": "training"}, {k: v for k, v in one.results.items() if "-C" not in k}, *rest
        )
        if "map" in one.cell
        else one
        for one in op_entries()
        for rest in [(one.facts, one.command)]
    ]
    assert cli.main(["bench", "report", str(write(tmp_path / "runs", entries)), "--out", str(tmp_path)]) == 0
    names = [path.stem for path in (tmp_path / "figures").iterdir()]
    assert any("throughput" in name for name in names)
    assert not any(name.endswith("-batch") for name in names)


def test_other_numbers_are_not_mixed_with_float32(tmp_path):
    """Cells in bfloat16 have rows of their own, and neither the paper's figures nor its findings are put to them."""
    half = {"dtype": "bfloat16", "autocast": True}
    slower = [Entry(e.bench, e.cell | half, e.results, FACTS, "wbmm bench it") for e in net_entries(gain=0.5)]
    folder = write(write(tmp_path / "runs", net_entries(gain=1.2)) / "half", slower).parent
    both, alone = (build_blocks(load_runs([path])) for path in (folder, folder / "half"))
    tables = [block for block in both if isinstance(block, TableBlock)]
    titles = [str(row[0]) for table in tables for row in table.rows]
    assert "P, 224 px, batch 16" in titles
    assert "P, 224 px, batch 16, bfloat16 autocast" in titles
    verdicts = [[row[-1] for row in block.rows] for block in (tables[0],)]
    assert verdicts == [[row[-1] for row in next(b for b in build(net_entries(gain=1.2), tmp_path)).rows]]
    assert all(
        "not measured" in " ".join(map(str, row)) for row in next(b for b in alone if isinstance(b, TableBlock)).rows
    )


def build(entries, folder):
    """The tables of a report."""
    runs = load_runs([write(folder / "only", entries)])
    return [block for block in build_blocks(runs) if isinstance(block, TableBlock)]

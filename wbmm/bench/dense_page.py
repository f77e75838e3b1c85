"""Segmentors and detectors in every form, tested on their test data: the figures of a page in docs/results.

Each test is a process of its own and leaves a file `test-FORM.json` in the run's folder, so that a second call goes on
where the first one stopped. The last checkpoint of a run is tested, not the one that validated best.

The figures of each run are kept beside the page, `page/RUN.json` with `page/RUN.jpg`, small enough to commit. So a
later call adds other runs without the folders of these.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from PIL import Image

from wbmm.handler import run_command
from wbmm.io.atomic import atomic_path, write_text
from wbmm.io.reader import safe_load
from wbmm.machine import measured_line
from wbmm.mm import require
from wbmm.text import render_table

__all__ = ["DenseRun", "Record", "main", "put_between"]

BEGIN, END = "<!-- results: written by tools/dense_report.py -->", "<!-- end -->"
WIDTH, ROWS_SHOWN = 620, 0.51  # of the picture: pixels, and the share of the mosaic's height
# Form to (arguments of the test tool, ending of the exported file).
FORMS = {
    "checkpoint": ([], None),
    "fused": (["--fuse"], None),
    "multi-scale": (["--tta"], None),
    "onnx": ([], ".onnx"),
    "openvino": ([], ".xml"),
}
NAMES = {"onnx": "ONNX Runtime", "openvino": "OpenVINO"}
METRICS = {
    "seg": {"mIoU": "mIoU"},
    "det": {
        "coco/bbox_mAP": "box AP",
        "coco/bbox_mAP_50": "box AP50",
        "coco/segm_mAP": "mask AP",
        "coco/segm_mAP_50": "mask AP50",
    },
}
DIGITS = {"seg": 2, "det": 3}


@dataclass
class DenseRun:
    """A finished run.

    Attributes:
        folder: its work folder.
        extra: `seg` or `det`.
        config: the whole configuration, as the runner wrote it.
        checkpoint: the last one.
    """

    folder: Path
    extra: str
    config: Path
    checkpoint: Path

    @property
    def forms(self) -> list[str]:
        return [form for form in FORMS if self.extra == "seg" or form != "multi-scale"]

    @property
    def name(self) -> str:
        """`wbmm-a-dense_upernet-small` of `wbmm-a-dense_upernet-small_1xb8-300_camvid-160x160`."""
        return "_".join(self.config.stem.split("_")[:2])

    def result(self, form: str) -> dict | None:
        file = self.folder / f"test-{form}.json"
        return json.loads(file.read_text()) if file.is_file() else None


@dataclass
class Record:
    """What the page says of a run.

    Attributes:
        extra: `seg` or `det`.
        config: its configuration in the project.
        place: its folder, from `runs` on.
        start: the weights that it started from.
        results: metrics and machine of each tested form.
    """

    name: str
    extra: str
    config: str
    place: str
    start: str
    iterations: int
    batch: int
    seed: str
    minutes: float
    results: dict[str, dict]

    def value(self, form: str, key: str) -> float | None:
        return self.results.get(form, {"metrics": {}})["metrics"].get(key)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/dense_report.py", description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path, help="Markdown; figures go between its marks, the rest stays")
    runs = "work folders of finished runs (without any: the page again, of the runs that it knows)"
    parser.add_argument("runs", nargs="*", type=Path, help=runs)
    parser.add_argument("--no-tests", dest="test", action="store_false", help="write what there is, test nothing")
    parser.add_argument("--forms", nargs="+", choices=FORMS, help="test these alone (default: all)")
    return run_command("dense_report", lambda: _report(parser.parse_args(argv)))


def _report(args: argparse.Namespace) -> None:
    runs = [_open(folder) for folder in args.runs]
    for run in runs if args.test else ():
        for form in args.forms or run.forms:
            if form in run.forms and run.result(form) is None:
                _test(run, form)
    kept = args.page.with_suffix("")
    known = {file.stem: Record(**json.loads(file.read_text())) for file in kept.glob("*.json")}
    known |= {run.name: _record(run) for run in runs if any(map(run.result, run.forms))}
    if not known:
        raise ValueError("no run has been tested yet; leave --no-tests out")
    if len({record.extra for record in known.values()}) > 1:
        raise ValueError("segmentors and detectors have different metrics: give one kind of runs")
    kept.mkdir(parents=True, exist_ok=True)
    for run in runs:
        if run.name in known:
            write_text(kept / f"{run.name}.json", json.dumps(asdict(known[run.name]), indent=1) + "\n")
            _draw(run, kept / f"{run.name}.jpg")
    write_text(args.page, put_between(_old(args.page), _figures([known[name] for name in sorted(known)], args.page)))
    print(args.page.read_text())


def _old(page: Path) -> str:
    return page.read_text() if page.is_file() else f"# {page.stem}\n\n{BEGIN}\n{END}\n"


def put_between(page: str, text: str) -> str:
    """A page with `text` between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN} and {END} for the figures to stand between")
    return f"{before}{BEGIN}\n{text.strip()}\n{END}{after}"


def _open(folder: Path) -> DenseRun:
    configs = sorted(folder.glob("*.py"), key=lambda path: len(path.name))
    if not configs or not any(folder.glob("*_*.pth")):
        raise ValueError(f"{folder} holds no run: expected a configuration (.py) and checkpoints (.pth) in it")
    extra = "seg" if "decode_head" in configs[-1].read_text() else "det"
    require(extra)
    from wbmm.mm.loading import find_checkpoints

    checkpoints = find_checkpoints(folder)
    if not checkpoints:
        raise ValueError(f"{folder} holds no checkpoint that a run has written by its count (iter_N.pth, epoch_N.pth)")
    return DenseRun(folder, extra, configs[-1], checkpoints[0])


def _test(run: DenseRun, form: str) -> None:
    options, ending = FORMS[form]
    model = run.checkpoint
    if ending is not None:
        model = run.folder / f"exported{ending}"
        if not model.is_file():
            _call("wbmm", "export", str(run.checkpoint), str(model), "--config", str(run.config))
    argv = [str(run.config), str(model), "--work-dir", str(run.folder / f"test-{form}"), *options]
    _call("wbmm.mm.tools", f"test_{run.extra}", *argv, "--json", str(run.folder / f"test-{form}.json"))


def _call(module: str, *argv: str) -> None:
    print(f"$ python -m {module} {' '.join(argv)}", flush=True)
    if subprocess.run([sys.executable, "-m", module, *argv], check=False).returncode:
        raise ValueError(f"`python -m {module} {' '.join(argv)}` failed: the reason is above")


def _record(run: DenseRun) -> Record:
    from mmengine.config import Config

    from wbmm.mm.mm_checkpoint import read_mm_checkpoint

    cfg, meta = Config.fromfile(run.config), read_mm_checkpoint(run.checkpoint)["meta"]
    results = {form: result for form in run.forms if (result := run.result(form)) is not None}
    data = run.config.stem.split("_")[-1].split("-")[0]
    return Record(
        run.name,
        run.extra,
        config=f"configs/{data}/{run.config.name}",
        place="/".join(["runs", *run.folder.resolve().parts[-2:]]),
        start=_start(cfg),
        iterations=meta["iter"],
        batch=cfg.train_dataloader.batch_size,
        seed=str(meta.get("seed", "-")),
        minutes=_minutes(run),
        results=results,
    )


def _figures(runs: list[Record], page: Path) -> str:
    extra = runs[0].extra
    forms = [form for form in FORMS if any(form in run.results for run in runs)]
    parts = [render_table(*_seg_table(runs, forms) if extra == "seg" else _det_table(runs, forms), markdown=True)]
    parts += [_differences(runs, extra), _training_table(runs)]
    for run in runs:
        if (page.with_suffix("") / f"{run.name}.jpg").is_file():
            parts.append(f"![Annotated and predicted, by {run.name}]({page.stem}/{run.name}.jpg)")
    parts.append(_machines(runs))
    commands = [f"python tools/train_{extra}.py {run.config} --work-dir {run.place}" for run in runs]
    where = "/".join(page.resolve().parts[-3:])
    commands.append(f"python tools/dense_report.py {where} {' '.join(run.place for run in runs)}")
    parts.append("```sh\n" + "\n".join(commands) + "\n```")
    return "\n\n".join(filter(None, parts))


def _machines(runs: list[Record]) -> str:
    """Where and when the forms of each run were tested; runs of which the same is said share a sentence."""
    found: dict[str, list[str]] = {}
    for run in runs:
        names = found.setdefault(measured_line(next(iter(run.results.values()))["facts"]), [])
        names.append(run.name)
    if len(found) == 1:
        return next(iter(found))
    return "\n".join(f"- {', '.join(names)}. {line}" for line, names in found.items())


def _seg_table(runs: list[Record], forms: list[str]) -> tuple[list[str], list[list[str]]]:
    headers = ["run", *(f"test mIoU %, {NAMES.get(form, form)}" for form in forms)]
    return headers, [[run.name, *(_value(run, form, "mIoU") for form in forms)] for run in runs]


def _det_table(runs: list[Record], forms: list[str]) -> tuple[list[str], list[list[str]]]:
    keys = [key for key in METRICS["det"] if any(run.value(form, key) is not None for run in runs for form in forms)]
    rows = [
        [run.name, NAMES.get(form, form), *(_value(run, form, key) for key in keys)] for run in runs for form in forms
    ]
    return ["run", "form", *(METRICS["det"][key] for key in keys)], rows


def _value(run: Record, form: str, key: str) -> str:
    value = run.value(form, key)
    return "-" if value is None else f"{value:.{DIGITS[run.extra]}f}"


def _differences(runs: list[Record], extra: str) -> str:
    """The largest difference of the forms that should give the same."""
    found = {}
    for form in ("fused", "onnx", "openvino"):
        pairs = [(run.value("checkpoint", key), run.value(form, key)) for run in runs for key in METRICS[extra]]
        values = [abs(first - second) for first, second in pairs if first is not None and second is not None]
        if values:
            found[form] = max(values)
    if not found:
        return ""
    texts = ", ".join(f"{NAMES.get(form, form)} {value:.{DIGITS[extra] + 1}f}" for form, value in found.items())
    unit = "points of mIoU" if extra == "seg" else "AP"
    return f"Largest difference from the checkpoint in PyTorch, in {unit}: {texts}."


def _training_table(runs: list[Record]) -> str:
    rows = [[run.name, run.start, str(run.iterations), str(run.batch), run.seed, f"{run.minutes:.0f}"] for run in runs]
    headers = ["run", "starts from", "iterations", "batch", "seed", "minutes of training"]
    return render_table(headers, rows, markdown=True)


def _minutes(run: DenseRun) -> float:
    """Of training iterations, without validation; parts that a resumed run repeated count once."""
    times = {}
    for file in sorted(run.folder.glob("*/vis_data/scalars.json")):
        entries = [json.loads(line) for line in file.read_text().splitlines()]
        times |= {entry["iter"]: entry["time"] for entry in entries if "loss" in entry}
    before = [0, *sorted(times)]
    return sum(times[step] * (step - last) for last, step in pairwise(before)) / 60


def _start(cfg) -> str:
    """The weights that a run started from, with their accuracy where their run is at hand."""
    source = cfg.get("init")
    if not source:
        return "scratch"
    path = Path(source)
    text = f"`{source}`" + (", tables resized" if cfg.get("resize_tables") else "")
    log = path.parent / "metrics.jsonl"
    if not path.is_file() or not log.is_file():
        return text
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    last = [entry for entry in entries if entry["kind"] == "eval"][-1]
    epochs = safe_load(path)["config"]["schedule"]["epochs"]
    return f"{text}: {epochs} epochs, top-1 {last['top1']:.1f} %"


def _draw(run: DenseRun, target: Path) -> None:
    """The upper half of the sheet that testing drew, if it did."""
    sheet = run.folder / "test-checkpoint" / "test_mosaic.png"
    if not sheet.is_file():
        return
    with Image.open(sheet) as file:
        picture = file.convert("RGB")
    legend = 40 if run.extra == "seg" else 0
    top = picture.crop((0, 0, picture.width, int(picture.height * ROWS_SHOWN) - legend // 2))
    factor = WIDTH / top.width
    with atomic_path(target, force=True) as temporary:
        top.resize((WIDTH, round(top.height * factor))).save(temporary, format="JPEG", quality=80)

"""What a run's folder says: `wbmm runs DIR` for several side by side; of one, its summary, curves and first batch."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import yaml
from torch import Tensor

from wbmm.data.classes import in_words
from wbmm.io.atomic import write_text
from wbmm.io.figures import BLUE, GREY, ORANGE, draw_mosaic, new_figure, save_figure, to_pictures
from wbmm.text import render_table
from wbmm.train.console import duration

from .config import TrainConfig, flatten
from .guard import read_marker
from .log import METRICS_FILE, STATUS_FILE, read_metrics, working_seconds

__all__ = [
    "EXAMPLE",
    "FIRST_BATCH",
    "MOST_SHOWN",
    "RunFacts",
    "add_arguments",
    "compare_runs",
    "draw_batch",
    "draw_curves",
    "find_runs",
    "run",
    "smooth",
    "write_summary",
]

EXAMPLE = "wbmm runs runs --sort top1"
MOST_COLUMNS = 4  # of settings that differ, on a terminal
NOT_SETTINGS = {"out", "resume", "device", "log.name", "data.workers"}


class RunFacts:
    """What a run's folder says.

    Attributes:
        config: The resolved configuration as plain values.
        train, eval: The records of metrics.jsonl.
        status: running, finished, stopped or failed. A killed run stays at running.
        seconds: Working time up to the last record.
        interrupted: What the marker of a run that a signal stopped says: signal, step, total_steps.
    """

    def __init__(self, run_dir: str | Path):
        self.folder = Path(run_dir)
        records = read_metrics(self.folder)
        self.train = [record for record in records if record["kind"] == "train"]
        self.eval = [record for record in records if record["kind"] == "eval"]
        config_file, status_file = self.folder / "config.yaml", self.folder / STATUS_FILE
        self.config = yaml.safe_load(config_file.read_text()) if config_file.is_file() else {}
        self.status = json.loads(status_file.read_text())["status"] if status_file.is_file() else "unknown"
        self.step = max((record["step"] for record in records), default=0)
        self.seconds = working_seconds(records)
        self.interrupted = read_marker(self.folder)

    def get(self, key: str, default="?"):
        """A configuration value by its dotted name."""
        value = self.config
        for part in key.split("."):
            value = value.get(part, default) if isinstance(value, dict) else default
        return value

    @property
    def best(self) -> dict | None:
        """The evaluation with the highest top1, that of `best.pt`; the last of equal ones."""
        return max((record for record in reversed(self.eval) if _top1(record) is not None), key=_top1, default=None)

    @property
    def final(self) -> dict | None:
        return self.eval[-1] if self.eval else None

    def typical(self, name: str) -> float | None:
        """The median of a training figure, without the first report, which holds the warming-up."""
        values = [record[name] for record in (self.train[1:] or self.train)]
        return median(values) if values else None

    def data_wait(self) -> float | None:
        """The share of the whole training time spent waiting for data: each report weighs as its steps took."""
        pairs, before = [], 0
        for record in self.train:
            if record["images_per_s"] > 0 and record["step"] > before:
                pairs.append((record["data_wait"], (record["step"] - before) / record["images_per_s"]))
            before = record["step"]
        weight = sum(share for _, share in pairs)
        return sum(wait * share for wait, share in pairs) / weight if weight else None


def top1_of(record: dict | None) -> float | None:
    return None if record is None else _top1(record)


def _top1(record: dict) -> float | None:
    """Of the moving average where there is one: it is what `best.pt` follows."""
    return record.get("ema_top1", record.get("top1"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a run's folder, or one that holds runs at any depth")
    parser.add_argument("--sort", choices=("name", "top1"), default="name", help="order of the rows")
    parser.add_argument("--markdown", action="store_true", help="a Markdown table, with every setting that differs")


def run(args: argparse.Namespace) -> int:
    runs = [RunFacts(folder) for folder in find_runs(args.folder)]
    if args.sort == "top1":
        runs.sort(key=lambda item: -(top1_of(item.best) or 0))
    print(compare_runs(runs, args.folder, args.markdown))
    return 0


def find_runs(folder: Path) -> list[Path]:
    """The folders at or below `folder` that hold metrics."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    found = sorted(path.parent for path in folder.rglob(METRICS_FILE))
    if not found:
        raise ValueError(f"no run below {folder}: no folder holds a {METRICS_FILE}")
    return found


def compare_runs(runs: list[RunFacts], base: Path, markdown: bool = False) -> str:
    """A table, one row a run."""
    differing = _differing([flatten(item.config) for item in runs])
    others = [] if markdown else differing[MOST_COLUMNS:]
    differing = differing[: len(differing) - len(others)]
    head = ["run", "status", "epoch", "best top1", "final top1", "loss", "images/s", "wait", "time", *differing]
    rows = [_row(item, base, differing) for item in runs]
    table = render_table(head, rows, markdown)
    return f"{table}\n\nThey differ in {', '.join(others)} too: --markdown shows it." if others else table


def _row(item: RunFacts, base: Path, differing: list[str]) -> list[str]:
    name = str(item.folder.relative_to(base)) if item.folder != base else item.folder.name
    last = (item.train or item.eval or [{}])[-1]
    cells = [
        name,
        item.status,
        f"{last.get('epoch', 0):.3g}/{item.get('schedule.epochs')}",
        _number(top1_of(item.best), ".2f"),
        _number(top1_of(item.final), ".2f"),
        _number(item.train[-1]["loss"] if item.train else None, ".4f"),
        _number(item.typical("images_per_s"), ",.0f"),
        _number(item.data_wait(), ".1%"),
        duration(item.seconds),
    ]
    return cells + [str(flatten(item.config).get(key, "-")) for key in differing]


def _number(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


def _differing(configs: list[dict]) -> list[str]:
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if key not in NOT_SETTINGS and len({repr(config.get(key)) for config in configs}) > 1]


def write_summary(run_dir: str | Path) -> Path:
    """Writes summary.md and, with matplotlib, curves.png into the run's folder; returns the path of the summary."""
    run = RunFacts(run_dir)
    best = (run.best["epoch"], top1_of(run.best)) if run.best else None
    try:
        draw_curves(run.train, run.eval, best, run.folder.name, run.folder / "curves.png")
        picture = "![curves](curves.png)"
    except ImportError as error:
        picture = f"No curves: {error}"
    rows = "\n".join(f"| {name} | {value} |" for name, value in _summary_rows(run))
    evals = _eval_table(run.eval)
    text = f"# {run.folder.name}\n\n| | |\n| --- | --- |\n{rows}\n\n{picture}\n"
    if evals:
        text += f"\n## Evaluations\n\n{evals}\n"
    write_text(run.folder / "summary.md", text)
    return run.folder / "summary.md"


def _summary_rows(run: RunFacts):
    size, channels = run.get("data.size"), run.get("data.in_chans")
    stopped = run.status == "stopped" and {"step", "total_steps"} <= run.interrupted.keys()
    where = f" at step {run.interrupted['step']} of {run.interrupted['total_steps']}" if stopped else ""
    yield "status", run.status + where
    yield "model", run.get("model.name")
    yield "data", f"{run.get('data.source')}, {size} px, {channels} channel{'' if channels == 1 else 's'}"
    yield "global batch, seed", f"{run.get('global_batch')}, {run.get('seed')}"
    yield "steps, epochs", f"{run.step}, {(run.train or run.eval or [{'epoch': 0}])[-1]['epoch']:.3g}"
    if run.best:
        yield "best top-1", f"{top1_of(run.best):.2f} % (epoch {run.best['epoch']:g})"
        yield "final top-1", f"{top1_of(run.final):.2f} %"
    if run.train:
        yield "final training loss", f"{run.train[-1]['loss']:.4f}"
        yield "training speed, median", f"{run.typical('images_per_s'):,.0f} images/s"
        yield "waiting for data", f"{100 * (run.data_wait() or 0):.1f} % of the training time"
        yield "memory, highest", f"{max(record['memory_mb'] for record in run.train):,.0f} MB"
    yield "time, pauses left out", duration(run.seconds)
    yield "configuration", "[config.yaml](config.yaml)"


def _eval_table(records: list[dict], most: int = 30) -> str:
    if not records:
        return ""
    names = [name for name in records[-1] if name not in ("kind", "step", "epoch", "seconds", "time")]
    keep = records[:: math.ceil(len(records) / most)]
    keep += [] if keep[-1] is records[-1] else [records[-1]]
    lines = [f"| epoch | step | {' | '.join(names)} |", "| --- " * (len(names) + 2) + "|"]
    for record in keep:
        values = " | ".join(f"{record[name]:.4g}" if name in record else "" for name in names)
        lines.append(f"| {record['epoch']:g} | {record['step']} | {values} |")
    return "\n".join(lines)


FIRST_BATCH = "train_batch.png"
MOST_SHOWN = 24
WINDOW, LEAST_WINDOW = 0.05, 5  # of a curve that its smoothing spans, about; in points, at least
COLOURS = (ORANGE, "#009E73", "#CC79A7")  # of evaluations: with an average there are two


def draw_curves(
    train: list[dict], evals: list[dict], best: tuple[float, float] | None, title: str, path: str | Path
) -> Path:
    """Draws loss, accuracy and learning rate against epochs.

    Args:
        train, evals: the records of a run, with `epoch`, `loss`, `lr`, `top1` and so on.
        best: epoch and top-1 of the best evaluation.
        title: for instance the run's name.
        path: of the .png or .pdf file.
    """
    figure = new_figure(13, 4, "the picture of the curves")
    loss, accuracy, rate = figure.subplots(1, 3)
    _plot(loss, train, "loss", "training, each report", color=BLUE, alpha=0.3, linewidth=1.0)
    smoothed = [record | {"loss": value} for record, value in zip(*_smoothed(train, "loss"), strict=True)]
    _plot(loss, smoothed, "loss", "training, smoothed", color=BLUE)
    for axis, ending in ((loss, "loss"), (accuracy, "top1")):
        for name, colour in zip(_names(evals, ending), COLOURS, strict=False):
            _plot(axis, evals, name, _label(name, ending), marker="o", color=colour)
    _plot(rate, train, "lr", "learning rate", color=BLUE)
    _titles(title, best, loss, accuracy, rate)
    return save_figure(figure, path)


def smooth(values: Sequence[float], window: float = WINDOW) -> list[float]:
    """An exponential average over about the share `window` of the values, which starts at the first of them."""
    keep = 1 - 1 / max(window * len(values), LEAST_WINDOW)
    mean, weight, smoothed = 0.0, 0.0, []
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        smoothed.append(mean / weight)
    return smoothed


def _smoothed(records: list[dict], name: str) -> tuple[list[dict], list[float]]:
    chosen = _finite(records, name)
    return chosen, smooth([record[name] for record in chosen])


def _finite(records: list[dict], name: str) -> list[dict]:
    return [record for record in records if name in record and math.isfinite(record[name])]


def _plot(axis, records: list[dict], name: str, label: str, **style) -> None:
    chosen = _finite(records, name)
    if chosen:
        style = {"markersize": 3, "linewidth": 1.6, **style}
        axis.plot([r["epoch"] for r in chosen], [r[name] for r in chosen], label=label, **style)


def _titles(title: str, best: tuple[float, float] | None, loss, accuracy, rate) -> None:
    loss.set_title(f"{title}: loss")
    accuracy.set_title("top-1 accuracy, %")
    rate.set_title("learning rate")
    if best:
        epoch, value = best
        accuracy.axhline(value, color=GREY, linewidth=0.8, linestyle="--")
        accuracy.set_title(f"top-1 accuracy: best {value:.2f} % at epoch {epoch:g}")
    for axis in (loss, accuracy, rate):
        axis.set_xlabel("epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if len(axis.get_legend_handles_labels()[0]) > 1:
            axis.legend(frameon=False, loc="upper right" if axis is loss else "center right")
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))


def _names(records: list[dict], ending: str) -> list[str]:
    return [name for name in (records[-1] if records else {}) if name.endswith(ending)]


def _label(name: str, ending: str) -> str:
    prefix = name[: -len(ending)].strip("_/ ")
    return f"validation, {prefix}" if prefix else "validation"


def draw_batch(
    images: Tensor, targets: Tensor, config: TrainConfig, class_names: Sequence[str] | None, path: str | Path
) -> Path:
    """Draws training images as the net sees them, augmented and mixed, with their classes below.

    Args:
        images: `[N, C, H, W]`, normalised as the configuration says.
        targets: `[N, classes]`, with label smoothing and mixing in them.
        config: of the run.
        class_names: None for numbers.
        path: of the .png or .pdf file.
    """
    names = in_words(class_names) if class_names else [f"class {n}" for n in range(targets.shape[1])]
    shares = _shares(targets.numpy(), config.mix.label_smoothing)
    captions = [_caption(row, names) for row in shares]
    pictures = to_pictures(images, config.data.mean, config.data.std)
    title = f"the first training images as the net sees them: {config.data.size} px, augmented and normalised back"
    return draw_mosaic(pictures, captions, path, title)


def _shares(targets: np.ndarray, smoothing: float) -> np.ndarray:
    """How much of each class is in a picture, without what label smoothing gave to all."""
    return (targets - smoothing / targets.shape[1]) / (1 - smoothing)


def _caption(shares: np.ndarray, names: Sequence[str]) -> str:
    first, *others = [number for number in np.argsort(-shares)[:2] if shares[number] > 0.005]
    if not others:
        return names[first]
    return "\n".join(f"{100 * shares[number]:.0f} % {names[number]}" for number in (first, *others))

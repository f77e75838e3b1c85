"""Pictures of a run: its curves, and the images of its first step."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from wbmm.data.classes import in_words
from wbmm.io.figures import BLUE, GREY, ORANGE, draw_mosaic, new_figure, save_figure, to_pictures

from .config import TrainConfig

__all__ = ["FIRST_BATCH", "MOST_SHOWN", "draw_batch", "draw_curves", "smooth"]

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
        accuracy.text(0.98, 0.04, f"best {value:.2f} % at epoch {epoch:g}", transform=accuracy.transAxes, ha="right")
    for axis in (loss, accuracy, rate):
        axis.set_xlabel("epoch")
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

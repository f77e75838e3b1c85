"""What a classifier gets wrong: confusion matrix, accuracy of each class, and the mistakes that it was surest of.

The functions take plain labels, probabilities, names and pictures, whatever model they come from:

    matrix = confusion_matrix(labels, probabilities.argmax(1), len(names))
    draw_confusion(matrix, names, "confusion.png")
    draw_class_scores(class_scores(matrix, names), "classes.png")
    draw_mistakes(surest_mistakes(probabilities, labels, 24), source.image, names, "mistakes.png")
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wbmm.io.atomic import replacing
from wbmm.io.figures import BLUE, GREY, ORANGE, draw_mosaic, new_figure, save_figure, shorten
from wbmm.text import render_table

__all__ = [
    "ClassScore",
    "Mistake",
    "class_scores",
    "class_table",
    "confusion_matrix",
    "draw_class_scores",
    "draw_confusion",
    "draw_mistakes",
    "surest_mistakes",
    "write_class_scores",
]

MOST_CLASSES = 60  # drawn; with more of them, those with the most mistakes
MOST_NUMBERS = 20  # classes up to which each cell of the matrix has its number
NAME = 24  # characters of a class in a figure
LEAST_SCALE = 10.0  # per cent at which the colours of mistakes end, if no mistake is more frequent
ROOM = 22.0  # per cent below which a bar has its number beside it


@dataclass(frozen=True)
class ClassScore:
    """How well one class is told from the others.

    Attributes:
        name: of the class.
        images: of this class.
        right: how many of them were recognised.
        predicted: how many images, of any class, were taken for it.
        taken_for: the class that its mistakes are most often taken for, "" without a mistake.
        taken: how many of them are.
    """

    name: str
    images: int
    right: int
    predicted: int
    taken_for: str = ""
    taken: int = 0

    @property
    def accuracy(self) -> float | None:
        """Per cent of its images that were recognised (recall); None without images."""
        return 100 * self.right / self.images if self.images else None

    @property
    def precision(self) -> float | None:
        """Per cent of the images taken for it that are of it; None if there are none."""
        return 100 * self.right / self.predicted if self.predicted else None


@dataclass(frozen=True)
class Mistake:
    """One image with another class than was predicted.

    Attributes:
        index: of the image, in the order of the labels.
        label, predicted: class numbers.
        probability: that the model gave to its prediction.
        of_label: that it gave to the right class.
    """

    index: int
    label: int
    predicted: int
    probability: float
    of_label: float


def confusion_matrix(labels: Any, predictions: Any, classes: int) -> np.ndarray:
    """`[classes, classes]`: how many images of each class (row) were taken for each class (column)."""
    labels, predictions = np.asarray(labels, dtype=np.int64), np.asarray(predictions, dtype=np.int64)
    if labels.shape != predictions.shape or labels.ndim != 1:
        raise ValueError(f"labels {labels.shape} and predictions {predictions.shape}: give one of each for an image")
    for what, numbers in (("label", labels), ("prediction", predictions)):
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < classes:
            raise ValueError(f"a {what} is outside 0 to {classes - 1}, the numbers of the {classes} classes")
    return np.bincount(labels * classes + predictions, minlength=classes * classes).reshape(classes, classes)


def class_scores(matrix: np.ndarray, names: Sequence[str]) -> list[ClassScore]:
    """The score of each class, in the order of their numbers."""
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    scores = []
    for number, name in enumerate(names):
        worst = int(wrong[number].argmax())
        taken = int(wrong[number, worst])
        images, right, predicted = int(matrix[number].sum()), int(matrix[number, number]), int(matrix[:, number].sum())
        scores.append(ClassScore(str(name), images, right, predicted, str(names[worst]) if taken else "", taken))
    return scores


def surest_mistakes(probabilities: Any, labels: Any, count: int) -> list[Mistake]:
    """The mistakes with the highest probability, the surest first.

    Args:
        probabilities: `[N, classes]`, of each class for each image.
        labels: `[N]`.
        count: at most so many.
    """
    probabilities, labels = np.asarray(probabilities), np.asarray(labels)
    predicted = probabilities.argmax(1)
    highest = probabilities.max(1)
    wrong = np.flatnonzero(predicted != labels)
    chosen = wrong[np.argsort(-highest[wrong], kind="stable")][:count]
    return [
        Mistake(int(i), int(labels[i]), int(predicted[i]), float(highest[i]), float(probabilities[i, labels[i]]))
        for i in chosen
    ]


def class_table(scores: Sequence[ClassScore], most: int | None = None, markdown: bool = False) -> str:
    """The classes as a table for a terminal or in Markdown, those that are recognised least first."""
    rows = [
        (score.name, score.images, _percent(score.accuracy), _percent(score.precision), _taken(score))
        for score in _worst_first(scores)[:most]
    ]
    headers = ("class", "images", "accuracy %", "precision %", "most often taken for")
    return render_table(headers, rows, markdown=markdown)


def write_class_scores(scores: Sequence[ClassScore], path: str | Path) -> Path:
    """The classes as a CSV file, in the order of their numbers; percentages in full."""
    columns = ("class", "images", "right", "accuracy", "predicted", "precision", "taken_for", "taken")
    path = Path(path)
    with replacing(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for score in scores:
            shares = ("" if share is None else f"{share:.4f}" for share in (score.accuracy, score.precision))
            accuracy, precision = shares
            counts = (score.name, score.images, score.right, accuracy, score.predicted, precision)
            writer.writerow((*counts, score.taken_for, score.taken))
    return path


def draw_confusion(
    matrix: np.ndarray, names: Sequence[str], path: str | Path, title: str = "", most: int = MOST_CLASSES
) -> Path:
    """Draws a confusion matrix: each row in per cent of its class, what is right in blue and mistakes in orange.

    Mistakes have a scale of their own, which ends at the largest: they are what one looks for.

    Args:
        matrix: `[classes, classes]`, see `confusion_matrix`.
        names: of the classes.
        path: of the .png or .pdf file.
        title: the first words above the picture.
        most: classes that are drawn. If there are more, they are those with the most mistakes.
    """
    chosen = _most_mistaken(matrix, most)
    share = 100 * matrix[np.ix_(chosen, chosen)] / np.maximum(matrix[chosen].sum(1, keepdims=True), 1)
    texts = [shorten(names[number], NAME) for number in chosen]
    count = len(chosen)
    cell = 0.55 if count <= 12 else 0.36 if count <= MOST_NUMBERS else 0.21
    size = 10 if count <= 12 else 9 if count <= MOST_NUMBERS else 8
    side = count * cell + 0.085 * size / 8 * max(map(len, texts))
    figure = new_figure(max(side + 1.3, 5.0), max(side + 0.8, 3.8), "the picture of a confusion matrix")
    axis = figure.subplots()
    right = np.eye(count, dtype=bool)
    largest = max(float(share[~right].max(initial=0)), LEAST_SCALE)
    for mask, colours, top, what in ((~right, "Blues", 100.0, "right"), (right, "Oranges", largest, "mistaken")):
        cells = np.ma.array(share, mask=mask | (share == 0))
        shown = axis.imshow(cells, cmap=colours, vmin=0, vmax=top, interpolation="nearest")
        bar = figure.colorbar(shown, ax=axis, fraction=0.03, pad=0.03, shrink=0.6, aspect=25)
        bar.set_label(f"{what}, % of the class", fontsize=9)
        bar.ax.tick_params(labelsize=8)
    axis.set_xticks(range(count), texts, rotation=90, fontsize=size)
    axis.set_yticks(range(count), texts, fontsize=size)
    axis.set_xticks(np.arange(-0.5, count), minor=True)
    axis.set_yticks(np.arange(-0.5, count), minor=True)
    axis.grid(which="minor", color="#DDDDDD", linewidth=0.5)
    axis.tick_params(which="both", length=0)
    axis.set_xlabel("predicted", fontsize=11)
    axis.set_ylabel("true class", fontsize=11)
    axis.set_title(_confusion_title(matrix, count, title), fontsize=11)
    if count <= MOST_NUMBERS:
        _write_numbers(axis, share, largest, size)
    return save_figure(figure, path)


def _write_numbers(axis: Any, share: np.ndarray, largest: float, size: int) -> None:
    for row, column in zip(*np.nonzero(share), strict=True):
        value, top = share[row, column], 100.0 if row == column else largest
        colour = "white" if value > 0.6 * top else "black"
        axis.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=size - 1, color=colour)


def _confusion_title(matrix: np.ndarray, drawn: int, title: str) -> str:
    images = int(matrix.sum())
    right = 100 * np.trace(matrix) / max(images, 1)
    parts = [title] if title else []
    parts.append(f"{right:.1f} % of {images:,} images right")
    if drawn < len(matrix):
        parts.append(f"\nthe {drawn} of {len(matrix)} classes with the most mistakes")
    return ": ".join(parts[:2]) + "".join(parts[2:]) if title else "".join(parts)


def _most_mistaken(matrix: np.ndarray, most: int) -> np.ndarray:
    """The numbers of the classes to draw, in order."""
    if len(matrix) <= most:
        return np.arange(len(matrix))
    wrong = matrix.sum(1) + matrix.sum(0) - 2 * np.diag(matrix)
    return np.sort(np.argsort(-wrong, kind="stable")[:most])


def draw_class_scores(
    scores: Sequence[ClassScore], path: str | Path, title: str = "accuracy of each class", most: int = MOST_CLASSES
) -> Path:
    """Draws a bar for each class, the worst first, with what it is most often taken for.

    Args:
        scores: see `class_scores`; classes without images are left out.
        path: of the .png or .pdf file.
        title: above the picture.
        most: classes that are drawn. If there are more, they are the worst.
    """
    known = [score for score in _worst_first(scores) if score.images]
    if not known:
        raise ValueError("no class has an image: there is no accuracy to draw")
    mean = 100 * sum(score.right for score in known) / sum(score.images for score in known)
    drawn = known[:most]
    figure = new_figure(9.5, 1.1 + 0.23 * max(len(drawn), 4), "the picture of each class's accuracy")
    axis = figure.subplots()
    places = range(len(drawn))
    axis.barh(places, [score.accuracy for score in drawn], color=BLUE, height=0.72)
    axis.plot([mean, mean], [-0.6, len(drawn) - 0.4], color=ORANGE, linewidth=1.6, linestyle="--")
    for place, score in zip(places, drawn, strict=True):
        where, colour, ground = (1, "white", BLUE) if score.accuracy >= ROOM else (score.accuracy + 1, "black", "white")
        box = {"facecolor": ground, "edgecolor": "none", "pad": 0.8}  # over the dashed line
        text = f"{score.accuracy:.0f} % of {score.images}"
        axis.text(where, place, text, va="center", fontsize=8, color=colour, bbox=box)
        axis.text(104, place, shorten(_taken(score), 40), va="center", fontsize=8.5)
    axis.text(104, -0.75, "most often taken for", va="bottom", fontsize=9, color=GREY)
    axis.set_yticks(places, [shorten(score.name, NAME) for score in drawn], fontsize=9)
    axis.set_ylim(len(drawn) - 0.4, -0.6)
    axis.set_xlim(0, 150)
    axis.spines["bottom"].set_bounds(0, 100)
    axis.set_xticks(range(0, 101, 20))
    axis.set_xlabel("images recognised, %", loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", alpha=0.25)
    left = f"; the {len(drawn)} worst of {len(known)} classes" if len(drawn) < len(known) else ""
    axis.set_title(f"{title}: {mean:.1f} % over all (dashed){left}", fontsize=11, loc="left", pad=16)
    return save_figure(figure, path)


def draw_mistakes(
    mistakes: Sequence[Mistake],
    image: Callable[[int], Any],
    names: Sequence[str],
    path: str | Path,
    title: str = "the surest mistakes",
    columns: int = 6,
) -> Path:
    """Draws the images of mistakes with what they are and what they were taken for.

    Args:
        mistakes: see `surest_mistakes`.
        image: the picture of an index: a PIL image or an array of bytes, e.g. `source.image`.
        names: of the classes.
        path: of the .png or .pdf file.
        title: above the pictures.
    """
    if not mistakes:
        raise ValueError("there is no mistake to draw")
    captions = [
        f"true: {names[item.label]}\nsaid: {names[item.predicted]}\n{100 * item.probability:.0f} % sure"
        for item in mistakes
    ]
    return draw_mosaic([image(item.index) for item in mistakes], captions, path, title, columns)


def _worst_first(scores: Sequence[ClassScore]) -> list[ClassScore]:
    return sorted(scores, key=lambda score: (score.accuracy is None, score.accuracy or 0.0))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1f}"


def _taken(score: ClassScore) -> str:
    return f"{score.taken_for} ({100 * score.taken / score.images:.0f} %)" if score.taken else ""

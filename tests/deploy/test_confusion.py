"""What a classifier gets wrong: counted, listed and drawn."""

import csv

import numpy as np
import pytest
from PIL import Image

from wbmm.deploy.confusion import (
    class_scores,
    class_table,
    confusion_matrix,
    draw_class_scores,
    draw_confusion,
    draw_mistakes,
    surest_mistakes,
    write_class_scores,
)
from wbmm.io.figures import draw_mosaic, shorten

NAMES = ["cat", "dog", "fox"]
LABELS = [0, 0, 0, 1, 1, 2]
PREDICTED = [0, 1, 1, 1, 2, 2]


def test_rows_are_true_classes():
    assert confusion_matrix(LABELS, PREDICTED, 3).tolist() == [[1, 2, 0], [0, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize(
    ("labels", "predicted", "told"),
    [([0, 3], [0, 0], "a label is outside 0 to 2"), ([0], [-1], "a prediction"), ([0], [0, 1], "one of each")],
)
def test_numbers_that_are_no_classes(labels, predicted, told):
    with pytest.raises(ValueError, match=told):
        confusion_matrix(labels, predicted, 3)


def test_scores_of_each_class():
    cat, dog, fox = class_scores(confusion_matrix(LABELS, PREDICTED, 3), NAMES)
    assert (cat.images, cat.right, cat.predicted, cat.taken_for, cat.taken) == (3, 1, 1, "dog", 2)
    assert cat.accuracy == pytest.approx(100 / 3)
    assert cat.precision == 100
    assert dog.precision == pytest.approx(100 / 3)
    assert (fox.accuracy, fox.taken_for) == (100, "")


def test_a_class_without_images_has_no_accuracy(tmp_path):
    scores = class_scores(confusion_matrix([0, 0], [0, 0], 2), NAMES[:2])
    assert scores[1].accuracy is None
    assert class_table(scores).splitlines()[-1].split() == ["dog", "0", "-", "-"]
    assert draw_class_scores(scores, tmp_path / "classes.png").is_file()
    with pytest.raises(ValueError, match="no class has an image"):
        draw_class_scores(scores[1:], tmp_path / "none.png")


def test_the_table_has_the_worst_first_and_the_file_the_order_of_the_classes(tmp_path):
    scores = class_scores(confusion_matrix(LABELS, PREDICTED, 3), NAMES)
    lines = class_table(scores, most=2).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["cat", "dog"]
    assert "dog (67 %)" in lines[2]
    with open(write_class_scores(scores, tmp_path / "classes.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == NAMES
    assert rows[0] | {"accuracy": "33.3333", "taken_for": "dog", "taken": "2"} == rows[0]


def test_the_surest_mistakes_come_first():
    probabilities = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.05, 0.95]])
    found = surest_mistakes(probabilities, [0, 0, 1, 0], 2)
    assert [(item.index, item.label, item.predicted) for item in found] == [(3, 0, 1), (1, 0, 1)]
    assert (found[0].probability, found[0].of_label) == (0.95, 0.05)
    assert surest_mistakes(probabilities, [0, 1, 0, 1], 5) == []


@pytest.mark.parametrize("suffix", ["png", "pdf"])
@pytest.mark.parametrize("classes", [2, 70])
def test_pictures_are_drawn(tmp_path, suffix, classes):
    """Names that matplotlib would take for formulas, and more classes than fit, are drawn all the same."""
    rng = np.random.default_rng(0)
    names = [f"class $_{number}^ {'long ' * 9}" for number in range(classes)]
    matrix = confusion_matrix(rng.integers(classes, size=500), rng.integers(classes, size=500), classes)
    first = draw_confusion(matrix, names, tmp_path / f"matrix.{suffix}", "drawn")
    second = draw_class_scores(class_scores(matrix, names), tmp_path / f"classes.{suffix}")
    for path in (first, second):
        assert path.read_bytes().startswith(b"%PDF" if suffix == "pdf" else b"\x89PNG")


def test_the_picture_of_mistakes_shows_the_images(tmp_path):
    mistakes = surest_mistakes(np.array([[0.1, 0.9], [0.2, 0.8]]), [0, 0], 6)
    red = Image.new("RGB", (40, 30), (255, 0, 0))
    path = draw_mistakes(mistakes, {0: red, 1: np.zeros((8, 8), dtype=np.uint8)}.get, NAMES, tmp_path / "m.png")
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    assert (pixels == (255, 0, 0)).all(1).sum() > 1000
    assert (pixels == 0).all(1).sum() > 1000
    with pytest.raises(ValueError, match="no mistake"):
        draw_mistakes([], red, NAMES, path)


def test_a_mosaic_checks_what_it_is_given(tmp_path):
    with pytest.raises(ValueError, match="1 pictures and 0 captions"):
        draw_mosaic([np.zeros((4, 4))], [], tmp_path / "m.png")
    with pytest.raises(ValueError, match=r"m\.jpg: a figure ends with \.png or \.pdf"):
        draw_mosaic([np.zeros((4, 4), dtype=np.uint8)], ["x"], tmp_path / "m.jpg")
    assert shorten("a" * 30, 10) == "a" * 9 + "…"

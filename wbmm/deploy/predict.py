"""`wbmm predict`: what a model sees in images: the first classes in text, on the pictures and in a CSV file."""

import argparse
import csv
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from timm.data import ImageNetInfo

from wbmm.data.classes import in_words
from wbmm.data.images import Batch, batches, find_images
from wbmm.data.sources import FileSource
from wbmm.io.atomic import atomic_path, check_target
from wbmm.io.card import ModelCard
from wbmm.progress import progress_bar

from .evaluate import classifier
from .export import add_runtime_argument, open_compiled

__all__ = ["EXAMPLE", "Prediction", "add_arguments", "annotate", "class_names", "predict", "run"]

EXAMPLE = "wbmm predict wbmm_t.safetensors photos/ cat.jpg --out predictions"
CSV_NAME = "predictions.csv"
MOST_LINES = 20  # printed; a table holds all
LEAST_WIDTH, MOST_SIDE = 320, 1280  # of a picture
BACKGROUND, BAR, TEXT = (24, 24, 28), (52, 92, 160), (240, 240, 240)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_or_file", metavar="MODEL_OR_FILE", help="a checkpoint, run folder, .onnx, .xml, .pt2 or timm name"
    )
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE_OR_FOLDER", help="folders are searched through")
    parser.add_argument("--topk", type=int, default=5)
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"folder for pictures and {CSV_NAME}; made if missing")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="the CSV file, if elsewhere")
    parser.add_argument("--no-pictures", dest="pictures", action="store_false", help="in --out, the CSV file alone")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1), help="processes that read images")
    parser.add_argument("--device", default="cpu")
    add_runtime_argument(parser)
    parser.add_argument("--model", help="the model's name, where the file does not tell")
    parser.add_argument("--no-ema", dest="ema", action="store_false", help="the weights themselves, not their average")
    parser.add_argument("--force", action="store_true", help="replace pictures and CSV files that exist")


@dataclass(frozen=True)
class Prediction:
    """The first classes of one image: (class number, name, probability), best first; or why there are none."""

    path: Path
    classes: tuple[tuple[int, str, float], ...] = ()
    error: str = ""

    def line(self) -> str:
        return "  ".join(f"{name} {100 * probability:.1f}%" for _, name, probability in self.classes)


def class_names(card: ModelCard) -> list[str]:
    """A name for each class, fit to print: the card's, with words for ImageNet's numbers; or numbers."""
    names = card.class_names or (ImageNetInfo().label_names() if card.num_classes == 1000 else None)
    return in_words(names) if names else [f"class {number}" for number in range(card.num_classes)]


def predict(runner, paths: list[Path], topk: int = 5, batch: int = 16, workers: int = 0) -> Iterator[Prediction]:
    """The predictions for image files, in order; a file that cannot be read has an error instead."""
    names = class_names(runner.card)
    for part in batches(FileSource(paths), runner.card, batch, workers):
        found = {index: Prediction(paths[index], error=error) for index, error in part.errors.items()}
        if part.images is not None:
            found |= _classify(runner, part, paths, names, min(topk, len(names)))
        yield from (found[index] for index in sorted(found))


def _classify(runner, part: Batch, paths: list[Path], names: list[str], topk: int) -> dict[int, Prediction]:
    best = runner(part.images).float().cpu().softmax(1).topk(topk, dim=1)
    if not best.values.isfinite().all():
        raise ValueError(f"the model's outputs are not finite, for instance for {paths[part.indices[0]]}")
    rows = zip(part.indices, best.indices.tolist(), best.values.tolist(), strict=True)
    return {
        index: Prediction(paths[index], tuple((n, names[n], p) for n, p in zip(numbers, chances, strict=True)))
        for index, numbers, chances in rows
    }


def run(args: argparse.Namespace) -> int:
    for name in ("topk", "batch"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: give 1 or more")
    if args.workers < 0:
        raise ValueError(f"--workers {args.workers}: give 0 or more")
    paths = find_images(args.images)
    runner = open_compiled(args.model_or_file, args.device, args.model, args.ema, args.runtime)
    runner = classifier(runner, args.model_or_file)
    csv_file, pictures = _targets(args, paths)
    print(f"{args.model_or_file}: {runner.card.describe()}, {runner.name}")
    print(f"transform: {runner.card.describe_transform()}\n")
    bad, topk = 0, min(args.topk, runner.card.num_classes)
    with _csv_rows(csv_file, topk, args.force) as write, progress_bar(len(paths), "images") as advance:
        for number, prediction in enumerate(predict(runner, paths, topk, args.batch, args.workers)):
            write(prediction)
            _show(prediction, number, len(paths))
            bad += bool(prediction.error)
            if pictures and not prediction.error:
                _save_picture(prediction, pictures[number], args.force)
            advance(1)
    _summary(len(paths), bad, csv_file, args.out if pictures else None)
    return 1 if bad else 0


def _targets(args: argparse.Namespace, paths: list[Path]) -> tuple[Path | None, list[Path]]:
    """The CSV file and a picture for each image, all checked before the work starts."""
    if args.out is not None:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot make the folder {args.out}: {error.strerror}") from None
    csv_file = args.csv or (args.out / CSV_NAME if args.out else None)
    if csv_file is not None:
        check_target(csv_file, args.force)
    if args.out is None or not args.pictures:
        return csv_file, []
    pictures = _picture_names(args.out, args.images, paths)
    for picture in pictures:
        if picture.exists() and not args.force:
            raise FileExistsError(f"{picture} exists already; say --force to replace it, or choose another --out")
    return csv_file, pictures


def _picture_names(out: Path, given: list[Path], paths: list[Path]) -> list[Path]:
    """One .png for each image, in the folders of the images; a name that is taken gets a number."""
    taken: set[Path] = set()
    pictures = []
    for path in paths:
        folder = next((folder for folder in given if folder.is_dir() and folder in path.parents), path.parent)
        place = out / path.relative_to(folder).with_suffix(".png")
        names = (place.with_stem(f"{place.stem}-{number}") if number > 1 else place for number in range(1, 10**9))
        pictures.append(next(name for name in names if name not in taken))
        taken.add(pictures[-1])
    return pictures


@contextmanager
def _csv_rows(path: Path | None, topk: int, force: bool) -> Iterator:
    """A function that writes one prediction; the file is there when all are written."""
    if path is None:
        yield lambda prediction: None
        return
    columns = [f"{what}_{rank}" for rank in range(1, topk + 1) for what in ("class", "name", "probability")]
    with atomic_path(path, force) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["file", *columns, "error"])

        def write(prediction: Prediction) -> None:
            cells = [cell for number, name, chance in prediction.classes for cell in (number, name, f"{chance:.6f}")]
            cells += [""] * (len(columns) - len(cells))
            writer.writerow([prediction.path, *cells, prediction.error])

        yield write


def _show(prediction: Prediction, number: int, total: int) -> None:
    if prediction.error:
        print(prediction.error, file=sys.stderr)
    elif total == 1:
        for _, name, chance in prediction.classes:
            print(f"{100 * chance:6.2f} %  {name}")
    elif number < MOST_LINES:
        print(f"{prediction.path}: {prediction.line()}")
    elif number == MOST_LINES:
        print(f"... and {total - MOST_LINES} more")


def _save_picture(prediction: Prediction, target: Path, force: bool) -> None:
    source = FileSource([prediction.path])
    lines = [(name, chance) for _, name, chance in prediction.classes]
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(target, force) as temporary:
        annotate(source.image(0), lines).save(temporary)


def _summary(total: int, bad: int, csv_file: Path | None, pictures: Path | None) -> None:
    print(f"\n{total - bad} of {total} images" + (f"; {bad} could not be read" if bad else ""))
    if csv_file is not None:
        print(f"table: {csv_file}")
    if pictures is not None:
        print(f"pictures: {pictures}")


def annotate(image: Image.Image, lines: list[tuple[str, float]]) -> Image.Image:
    """The image over one line a class: its name, its probability, and a bar as long as that.

    Args:
        image: any mode and size; a tiny one is enlarged by a whole factor, so that its pixels stay visible.
        lines: (name, probability from 0 to 1), best first.
    """
    image = _readable_size(image.convert("RGB"))
    width = max(image.width, LEAST_WIDTH)
    size = max(14, width // 32)
    font = ImageFont.load_default(size)
    step = round(size * 1.5)
    sheet = Image.new("RGB", (width, image.height + step * len(lines) + size // 2), BACKGROUND)
    sheet.paste(image, ((width - image.width) // 2, 0))
    draw = ImageDraw.Draw(sheet)
    for number, (name, probability) in enumerate(lines):
        top = image.height + size // 4 + number * step
        draw.rectangle((0, top, round(probability * (width - 1)), top + step - 3), fill=BAR)
        percent = f"{100 * probability:.1f} %"
        room = width - size - draw.textlength(percent, font)
        draw.text((size // 2, top), _shorten(name, room - size // 2, draw, font), fill=TEXT, font=font)
        draw.text((room + size // 2, top), percent, fill=TEXT, font=font)
    return sheet


def _readable_size(image: Image.Image) -> Image.Image:
    factor = LEAST_WIDTH // max(image.size)
    if factor > 1:
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    if max(image.size) > MOST_SIDE:
        image = image.copy()
        image.thumbnail((MOST_SIDE, MOST_SIDE))
    return image


def _shorten(text: str, room: float, draw: ImageDraw.ImageDraw, font) -> str:
    if draw.textlength(text, font) <= room:
        return text
    while text and draw.textlength(f"{text}...", font) > room:
        text = text[:-1]
    return f"{text}..."

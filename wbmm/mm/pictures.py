"""Pictures of segmentations and detections: read one after another, and drawn with colours, legends and boxes."""

import colorsys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from wbmm.data.sources import BadImage, FileSource
from wbmm.io.atomic import check_target
from wbmm.progress import progress_bar

__all__ = [
    "class_colours",
    "distinct_colours",
    "draw_classes",
    "draw_examples",
    "draw_objects",
    "picture_targets",
    "read_pictures",
]

BACKGROUND, TEXT = (24, 24, 28), (240, 240, 240)  # of a legend
LEAST_WIDTH = 320
LEAST_SHARE = 0.001  # of the pixels, to be named in the legend
MASK_OPACITY = 0.45
SHADES = ((0.9, 0.95), (0.55, 0.95), (0.95, 0.6), (0.5, 0.65))  # saturation and value
TILE = 360  # width of a picture in a mosaic


def picture_targets(folder: Path, paths: list[Path], force: bool) -> list[Path]:
    """A picture for each image, all checked before the work starts; equal names get a number."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {folder}: {error.strerror}") from None
    taken: dict[str, int] = {}
    targets = []
    for path in paths:
        number = taken[path.stem] = taken.get(path.stem, 0) + 1
        targets.append(folder / f"{path.stem}{f'-{number}' if number > 1 else ''}.png")
    inputs = {path.resolve() for path in paths}
    for target in targets:
        if target.resolve() in inputs:
            raise ValueError(f"{target} is one of the images to read: choose another folder with --out")
        check_target(target, force)
    return targets


def read_pictures(source: FileSource) -> Iterator[tuple[int, Image.Image]]:
    """(number, picture in RGB) of each file that can be read; the others are named, and a bar shows how far it is."""
    with progress_bar(len(source), "images") as advance:
        for number in range(len(source)):
            try:
                picture = ImageOps.exif_transpose(source.image(number)).convert("RGB")  # as the loader of training does
            except BadImage as error:
                print(f"skipped: {error}")
            else:
                yield number, picture
            advance(1)


def class_colours(count: int, palette=None) -> np.ndarray:
    """`[count, 3]` bytes: the data set's own colours where there are enough, or distinct hues."""
    if palette is not None and len(palette) >= count:
        return np.asarray(palette, dtype=np.uint8)[:count]
    return distinct_colours(count)


@lru_cache
def distinct_colours(count: int) -> np.ndarray:
    """`[count, 3]` bytes: each as far as can be from all before it, as the eye sees them (CIE Lab), and from grey."""
    hues = np.arange(max(24, -(-count // len(SHADES)))) / max(24, -(-count // len(SHADES)))
    known = np.array([colorsys.hsv_to_rgb(hue, *shade) for shade in SHADES for hue in hues])
    places = _lab(known)
    distance = np.linalg.norm(places - _lab(np.array([[0.5, 0.5, 0.5]])), axis=1)
    chosen = []
    for _ in range(count):
        chosen.append(int(np.argmax(distance)))
        distance = np.minimum(distance, np.linalg.norm(places - places[chosen[-1]], axis=1))
    return np.round(255 * known[chosen]).astype(np.uint8).reshape(count, 3)


def _lab(rgb: np.ndarray) -> np.ndarray:
    """sRGB from 0 to 1, `[N, 3]`, in CIE Lab, where distances are about those that the eye sees."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = linear @ to_xyz.T / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], 1)


def draw_classes(
    image: Image.Image, labels: np.ndarray, classes: list[str], colours: np.ndarray, opacity: float = 0.6
) -> Image.Image:
    """A picture with its classes in colour and, below it, the name and share of each that is there.

    Args:
        image: RGB.
        labels: `[H, W]` class numbers, of the image's size.
        classes: a name a class.
        colours: `[classes, 3]`.
        opacity: of the colours, from 0 to 1.
    """
    if labels.shape != (image.height, image.width):
        raise ValueError(f"labels of {labels.shape[0]}x{labels.shape[1]} for an image of {image.height}x{image.width}")
    painted = Image.blend(image, Image.fromarray(colours[labels]), opacity)
    shares = np.bincount(labels.ravel(), minlength=len(classes)) / labels.size
    shown = [int(number) for number in np.argsort(-shares) if shares[number] >= LEAST_SHARE]
    return _with_legend(painted, [(f"{classes[n]}  {100 * shares[n]:.1f} %", tuple(colours[n])) for n in shown])


def _with_legend(image: Image.Image, entries: list[tuple[str, tuple]]) -> Image.Image:
    width = max(image.width, LEAST_WIDTH)
    size = max(12, width // 50)
    font = ImageFont.load_default(size)
    longest = max((font.getlength(text) for text, _ in entries), default=0)
    columns = max(1, int(width // (longest + 3 * size)))
    rows = -(-len(entries) // columns)
    step = round(1.6 * size)
    sheet = Image.new("RGB", (width, image.height + rows * step + size), BACKGROUND)
    sheet.paste(image, ((width - image.width) // 2, 0))
    draw = ImageDraw.Draw(sheet)
    for number, (text, colour) in enumerate(entries):
        left = size // 2 + number % columns * (width // columns)
        top = image.height + size // 2 + number // columns * step
        draw.rectangle((left, top, left + size, top + size), fill=tuple(map(int, colour)))
        draw.text((left + round(1.5 * size), top - size // 8), text, fill=TEXT, font=font)
    return sheet


def draw_objects(
    image: Image.Image, boxes: np.ndarray, names: list[str], colours: np.ndarray, masks: np.ndarray | None = None
) -> Image.Image:
    """A copy of a picture with its objects; those that come first are drawn last, on top.

    Args:
        image: RGB.
        boxes: `[N, 4]`, left, top, right, bottom in pixels.
        names: a text an object.
        colours: `[N, 3]` bytes.
        masks: `[N, H, W]` of booleans, of the image's size, or None.
    """
    pixels = np.asarray(image).astype(np.float32)
    order = range(len(boxes) - 1, -1, -1)
    for i in order if masks is not None else ():
        if masks[i].shape != pixels.shape[:2]:
            raise ValueError(f"a mask of {masks[i].shape} for an image of {pixels.shape[:2]}")
        pixels[masks[i]] = (1 - MASK_OPACITY) * pixels[masks[i]] + MASK_OPACITY * colours[i]
    picture = Image.fromarray(pixels.round().astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    line = max(1, round(min(image.size) / 250))
    font = ImageFont.load_default(max(10, min(image.size) // 40))
    for i in order:
        left, top, right, bottom = (float(value) for value in boxes[i])
        colour = tuple(map(int, colours[i]))
        pen.rectangle((left, top, max(left, right), max(top, bottom)), outline=colour, width=line)
        _label(pen, names[i], left, top, colour, font, image.size)
    return picture


def _label(pen: ImageDraw.ImageDraw, text: str, left: float, top: float, colour: tuple, font, size: tuple) -> None:
    """The text on a patch of the object's colour, above its box or, at the edge of the picture, inside it."""
    x0, y0, x1, y1 = pen.textbbox((0, 0), text, font=font)
    width, height = x1 - x0 + 4, y1 - y0 + 4
    left = max(0.0, min(left, size[0] - width))
    top = top - height if top >= height else top
    pen.rectangle((left, top, left + width, top + height), fill=colour)
    dark = sum(share * value for share, value in zip((0.3, 0.59, 0.11), colour, strict=True)) > 140
    pen.text((left + 2 - x0, top + 2 - y0), text, fill=(0, 0, 0) if dark else (255, 255, 255), font=font)


def draw_examples(
    rows: Sequence[Sequence[Image.Image]], titles: Sequence[str], legend: Sequence[tuple[str, tuple]] = ()
) -> Image.Image:
    """One sheet of pictures: a row each, under titles for the columns; all are scaled to one width.

    Args:
        rows: as many pictures in each as there are titles.
        titles: of the columns.
        legend: names and colours, below.
    """
    scaled = [[p.resize((TILE, max(1, round(p.height * TILE / p.width)))) for p in row] for row in rows]
    heights = [max(picture.height for picture in row) for row in scaled]
    top, gap = 28, 6
    sheet = Image.new("RGB", (len(titles) * (TILE + gap) - gap, top + sum(heights) + gap * len(heights)), BACKGROUND)
    pen = ImageDraw.Draw(sheet)
    for column, title in enumerate(titles):
        pen.text((column * (TILE + gap) + 6, 5), title, fill=TEXT, font=ImageFont.load_default(16))
    for row, height in zip(scaled, heights, strict=True):
        for column, picture in enumerate(row):
            sheet.paste(picture, (column * (TILE + gap), top))
        top += height + gap
    return _with_legend(sheet, list(legend)) if legend else sheet

"""Pictures of segmentations and detections: read one after another, and drawn with colours, legends and boxes."""

import colorsys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from wbmm.data.sources import BadImage, FileSource
from wbmm.io.atomic import check_target
from wbmm.progress import progress_bar

__all__ = ["class_colours", "draw_classes", "draw_objects", "picture_targets", "read_pictures"]

BACKGROUND, TEXT = (24, 24, 28), (240, 240, 240)  # of a legend
LEAST_WIDTH = 320
LEAST_SHARE = 0.001  # of the pixels, to be named in the legend
MASK_OPACITY = 0.45


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
    golden = 0.618034  # steps around the circle of hues that never come close to each other
    shades = [(0.95, 0.75), (0.65, 0.9), (0.9, 0.5)]
    colours = [colorsys.hsv_to_rgb(i * golden % 1, *shades[i % len(shades)]) for i in range(count)]
    return np.round(255 * np.array(colours)).astype(np.uint8).reshape(count, 3)


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

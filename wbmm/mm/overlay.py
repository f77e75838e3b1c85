"""Classes of pixels as a picture: colours over the photograph, and a legend below."""

import colorsys

import numpy as np
from PIL import Image, ImageDraw, ImageFont

__all__ = ["class_colours", "overlay"]

BACKGROUND, TEXT = (24, 24, 28), (240, 240, 240)
LEAST_WIDTH = 320
LEAST_SHARE = 0.001  # of the pixels, to be named in the legend


def class_colours(count: int, palette=None) -> np.ndarray:
    """`[count, 3]` bytes: the data set's own colours where there are enough, or distinct hues."""
    if palette is not None and len(palette) >= count:
        return np.asarray(palette, dtype=np.uint8)[:count]
    golden = 0.618034  # steps around the circle of hues that never come close to each other
    shades = [(0.95, 0.75), (0.65, 0.9), (0.9, 0.5)]
    colours = [colorsys.hsv_to_rgb(i * golden % 1, *shades[i % len(shades)]) for i in range(count)]
    return np.round(255 * np.array(colours)).astype(np.uint8).reshape(count, 3)


def overlay(
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

"""Detections as a picture: masks in colour, boxes, and a label with the score at each."""

import numpy as np
from PIL import Image, ImageDraw, ImageFont

__all__ = ["draw_objects"]

OPACITY = 0.45


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
        pixels[masks[i]] = (1 - OPACITY) * pixels[masks[i]] + OPACITY * colours[i]
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

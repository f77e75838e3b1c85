"""A picture with what a model said about it, written below."""

from PIL import Image, ImageDraw, ImageFont

__all__ = ["annotate"]

LEAST_WIDTH, MOST_SIDE = 320, 1280
BACKGROUND, BAR, TEXT = (24, 24, 28), (52, 92, 160), (240, 240, 240)


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

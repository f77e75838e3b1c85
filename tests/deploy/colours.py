"""Images of four colours."""

from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"black": (40, 40, 40), "blue": (40, 60, 200), "green": (40, 180, 60), "red": (200, 50, 50)}


def make_image(colour: str, seed: int) -> Image.Image:
    """36 x 44 px of a colour with much noise."""
    noise = np.random.default_rng(seed).normal(0, 40, (44, 36, 3))
    return Image.fromarray((np.array(COLOURS[colour]) + noise).clip(0, 255).astype(np.uint8))


def write_images(root: Path, per_class: int, first_seed: int, names=tuple(COLOURS)) -> Path:
    """`root/class/number.png`, with a class for each name."""
    for colour, name in zip(COLOURS, names, strict=False):
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            make_image(colour, first_seed + i).save(root / name / f"{i}.png")
    return root

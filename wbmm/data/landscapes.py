"""Drawn landscapes: pictures for comparing two forms of a model, where nobody gave photographs.

They have what a photograph has and noise has not: a spectrum that falls off with the frequency, smooth shading, edges
at every scale and correlated colours. The same number always gives the same picture.
"""

import numpy as np
from PIL import Image

__all__ = ["draw_landscape"]

SIZE = (288, 384)  # height, width
HILLS, STONES = 4, 8


def draw_landscape(number: int) -> Image.Image:
    """One of any number of different landscapes, in RGB: a sky, hills before each other, stones on the ground."""
    rng = np.random.default_rng(number)
    height, width = SIZE
    rows, columns = np.mgrid[0:height, 0:width] / [[[height]], [[width]]]
    picture = _colour(rng) + 0.4 * rows[..., None] + 0.15 * _texture(rng, slope=1.5)[..., None]
    for hill in range(HILLS):
        ridge = 0.35 + 0.15 * hill + 0.12 * _texture(rng, slope=1.7)[0]  # a row of noise is an outline
        picture = _paint(picture, rows > ridge, rng, shade=1 - 0.6 * (rows - ridge))
    for _ in range(STONES):
        y, x, radius = rng.uniform(0.55, 1), rng.uniform(0, 1), rng.uniform(0.02, 0.12)
        distance = np.hypot((rows - y) * 1.5, columns - x) / (radius * (1 + 0.2 * _texture(rng, slope=1.5)))
        light = np.clip(1 - 0.7 * ((rows - y) + (columns - x)) / radius, 0.2, 1.6)
        picture = _paint(picture, distance < 1, rng, shade=light)
    picture += rng.normal(0, 0.01, picture.shape)  # the grain of a sensor
    return Image.fromarray((255 * np.clip(picture, 0, 1)).round().astype(np.uint8))


def _paint(picture: np.ndarray, where: np.ndarray, rng: np.random.Generator, shade: np.ndarray) -> np.ndarray:
    """The picture with a surface of a new colour and texture at some places."""
    texture = 1 + 0.3 * _texture(rng, slope=rng.uniform(0.8, 1.3))
    surface = _colour(rng) * (shade * texture)[..., None]
    return np.where(where[..., None], surface, picture)


def _colour(rng: np.random.Generator) -> np.ndarray:
    """Mostly grey: the channels of a photograph differ little."""
    return np.clip(rng.uniform(0.15, 0.7) + rng.normal(0, 0.1, 3), 0.02, 1)


def _texture(rng: np.random.Generator, slope: float) -> np.ndarray:
    """Noise of mean 0 and variance 1 whose amplitudes fall as 1 / frequency ** slope; 1 is usual in photographs."""
    spectrum = np.fft.rfft2(rng.normal(size=SIZE))
    frequency = np.hypot(np.fft.fftfreq(SIZE[0])[:, None], np.fft.rfftfreq(SIZE[1])[None])
    frequency[0, 0] = np.inf
    noise = np.fft.irfft2(spectrum / frequency**slope, SIZE)
    return noise / noise.std()

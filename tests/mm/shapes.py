"""Small data in ADE20K's format: discs, squares and triangles before a wall and a floor, with unlabelled seams."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

# Labels as stored (class + 1) and mean colours; 0 is unlabelled.
WALL, FLOOR, DISC, SQUARE, TRIANGLE = 1, 4, 13, 20, 150
COLOURS = {
    WALL: (190, 190, 170),
    FLOOR: (90, 70, 50),
    DISC: (200, 60, 50),
    SQUARE: (60, 110, 200),
    TRIANGLE: (70, 170, 80),
}
SIZES = [(128, 128), (97, 131), (150, 120)]


def draw(rng: np.random.Generator, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """An image `[H, W, 3]` and its labels `[H, W]`, both uint8."""
    labels = Image.new("L", (width, height), WALL)
    pen = ImageDraw.Draw(labels)
    pen.rectangle((0, int(height * rng.uniform(0.5, 0.8)), width, height), fill=FLOOR)
    for _ in range(rng.integers(2, 5)):
        side = int(min(height, width) * rng.uniform(0.2, 0.4))
        x, y = int(rng.uniform(0, width - side)), int(rng.uniform(0, height - side))
        kind = rng.choice([DISC, SQUARE, TRIANGLE])
        if kind == DISC:
            pen.ellipse((x, y, x + side, y + side), fill=DISC)
        elif kind == SQUARE:
            pen.rectangle((x, y, x + side, y + side), fill=SQUARE)
        else:
            pen.polygon([(x, y + side), (x + side, y + side), (x + side // 2, y)], fill=TRIANGLE)
    labels = np.array(labels)
    image = np.zeros((height, width, 3))
    for label, colour in COLOURS.items():
        image[labels == label] = np.array(colour) + rng.normal(0, 15, 3)
    image += rng.normal(0, 12, image.shape)
    labels[:3] = 0
    return image.clip(0, 255).astype(np.uint8), labels


def write_shapes(root: Path, train: int = 8, val: int = 3, sizes=SIZES, seed: int = 0) -> Path:
    """Writes images and annotations as ADE20K has them; returns the root."""
    rng = np.random.default_rng(seed)
    for part, count in (("training", train), ("validation", val)):
        for kind in ("images", "annotations"):
            (root / kind / part).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            image, labels = draw(rng, *sizes[i % len(sizes)])
            Image.fromarray(image).save(root / "images" / part / f"ADE_{i:04d}.jpg", quality=95)
            Image.fromarray(labels).save(root / "annotations" / part / f"ADE_{i:04d}.png")
    return root


TINY = """
_base_ = ["{base}"]

# The tiny UPerNet: wbmm_a_hier (narrower unless told), 64 channels, from scratch.
crop = ({crop}, {crop})
scale = (4 * {crop}, {crop})
model = dict(
    data_preprocessor=dict(size=crop),
    backbone=dict(arch="wbmm_a_hier", dims={dims}, drop_path_rate=0.0, init_cfg={init}),
    decode_head=dict(in_channels={dims}, channels=64, dropout_ratio=0.0),
    auxiliary_head=dict(in_channels={dims}[2], channels=64, dropout_ratio=0.0),
)
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations"),
    dict(type="RandomResize", scale=scale, ratio_range=(0.75, 1.5), keep_ratio=True),
    dict(type="RandomCrop", crop_size=crop, cat_max_ratio=0.75),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PackSegInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=scale, keep_ratio=True),
    dict(type="LoadAnnotations"),
    dict(type="PackSegInputs"),
]
tta_ratios = (1.0, 1.25)
loader = dict(num_workers=0, persistent_workers=False)
data = dict(data_root="{data}", serialize_data=False)
train_dataloader = dict(batch_size={batch}, dataset=dict(pipeline=train_pipeline, **data), **loader)
val_dataloader = dict(dataset=dict(pipeline=test_pipeline, **data), **loader)
test_dataloader = val_dataloader
optim_wrapper = dict(optimizer=dict(lr={lr}), paramwise_cfg=dict(decay_rate=1.0, groups=None))
param_scheduler = [
    dict(type="LinearLR", start_factor=0.1, by_epoch=False, begin=0, end={warmup}),
    dict(type="PolyLR", power=1.0, eta_min=0.0, by_epoch=False, begin={warmup}, end={iterations}),
]
train_cfg = dict(max_iters={iterations}, val_interval={interval})
default_hooks = dict(checkpoint=dict(interval={interval}), logger=dict(interval=1))
"""
BASE = Path(__file__).parents[2] / "configs" / "ade20k" / "wbmm-t-hier_upernet_8xb2-160k_ade20k-512x512.py"


DEFAULTS = {
    **{"dims": [8, 16, 32, 64], "init": None, "crop": 64},
    **{"batch": 2, "iterations": 2, "warmup": 1, "interval": 100, "lr": 1e-3},
}


def write_config(path: Path, data: Path, **changes) -> Path:
    """A configuration that trains on such data; narrow unless told otherwise."""
    path.write_text(TINY.format(base=BASE, data=data, **{**DEFAULTS, **changes}))
    return path

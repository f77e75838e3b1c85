"""`wbmm analyze erf`: effective receptive fields of models side by side, on the same pictures."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from wbmm.progress import Advance, progress_bar
from wbmm.text import render_table

from .opening import add_model_arguments, find_pictures, open_subject, with_size
from .output import COLUMN, Output, add_output_arguments, drawing

__all__ = ["EXAMPLE", "SHARES", "add_arguments", "area_ratio", "effective_field", "run", "smallest_square"]

EXAMPLE = "wbmm analyze erf wbmm_a.tiny50 convnext_atto --random-weights --images photos/ --size 224"
SHARES = (0.2, 0.3, 0.5, 0.99)
DECADES = 3  # of contributions that the pictures show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="MODEL", help="checkpoints, runs' folders, any names of timm's")
    parser.add_argument(
        "--images", nargs="+", type=Path, metavar="PATH", help="images or folders (default: drawn landscapes)"
    )
    parser.add_argument("--size", type=int, metavar="PX", help="of the images (default: the first model's)")
    parser.add_argument("--most", type=int, default=50, metavar="N", help="images to average over (default: 50)")
    parser.add_argument("--stage", type=int, metavar="N", help="the map to start from (default: the last)")
    parser.add_argument("--batch", type=int, default=4)
    add_model_arguments(parser)
    add_output_arguments(parser)


def effective_field(
    net: nn.Module, images: Tensor, stage: int | None = None, batch: int = 4, advance: Advance = lambda count: None
) -> Tensor:
    """How much each pixel contributes to the middle of a map, `[H, W]`, of sum 1.

    The gradient of the sum over channels of the map's middle (one position, or the mean of the two or four in the
    middle of an even side) by the image; its magnitude, summed over colours and averaged over images. Each image counts
    alike.

    Args:
        net: any model with `forward_intermediates`, or whose `forward_features` gives a map.
        images: `[N, C, H, W]`.
        stage: from 1; None for the last map.
        batch: images at a time.
        advance: called with the number of images that are done.
    """
    device = next(net.parameters()).device
    total = torch.zeros(images.shape[2:], dtype=torch.float64)
    for part in images.split(batch):
        part = part.to(device).requires_grad_()
        with torch.enable_grad():
            middle = _middle(_map(net, part, stage))
            (gradient,) = torch.autograd.grad(middle.sum(), part)
        field = gradient.detach().abs().double().sum(1).cpu()
        sums = field.sum((1, 2), keepdim=True)
        if not (sums > 0).all():
            raise ValueError("an image has no gradient: the middle of the map does not depend on it")
        total += (field / sums).sum(0)
        advance(len(part))
    return total / len(images)


def _map(net: nn.Module, images: Tensor, stage: int | None) -> Tensor:
    """A map `[B, C, H, W]` of a model."""
    if hasattr(net, "forward_intermediates"):
        maps = net.forward_intermediates(images, intermediates_only=True, output_fmt="NCHW")
    else:
        maps = [net.forward_features(images)]
    if stage is not None and not 1 <= stage <= len(maps):
        raise ValueError(f"--stage {stage}: a {type(net).__name__} has maps 1 to {len(maps)}")
    found = maps[-1 if stage is None else stage - 1]
    if found.ndim != 4:
        raise ValueError(f"a {type(net).__name__} gives no map of height and width")
    return found


def _middle(values: Tensor) -> Tensor:
    height, width = values.shape[2:]
    rows, columns = ((side - 1) // 2 for side in (height, width))
    return values[:, :, rows : height // 2 + 1, columns : width // 2 + 1].mean((2, 3))


def smallest_square(field: Tensor, share: float) -> tuple[int, int, int]:
    """(side, top, left) of the smallest square of pixels with a share of a field, wherever it lies.

    Strided convolutions put the middle of a map off the middle of the image by up to half of their stride, each model
    by its own amount: a centred square would measure that.

    Args:
        field: `[H, W]`, not negative.
        share: of its sum, from 0 to 1.
    """
    sums = nn.functional.pad(field.double(), (1, 0, 1, 0)).cumsum(0).cumsum(1)
    least, most = 1, min(field.shape)
    while least < most:
        side = (least + most) // 2
        if _boxes(sums, side).max() >= share * sums[-1, -1] * (1 - 1e-9):
            most = side
        else:
            least = side + 1
    boxes = _boxes(sums, least)
    top, left = divmod(int(boxes.argmax()), boxes.shape[1])
    return least, top, left


def _boxes(sums: Tensor, side: int) -> Tensor:
    """The sum of every square of that side, from the integral image."""
    return sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side] + sums[:-side, :-side]


def area_ratio(field: Tensor, share: float) -> float:
    """Area of the smallest square with a share of a field, over the area of the whole."""
    return smallest_square(field, share)[0] ** 2 / field.numel()


def run(args: argparse.Namespace) -> int:
    for name in ("batch", "most"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: give 1 or more")
    pictures = find_pictures(args.images, args.most)
    subjects = [open_subject(f, args.device, args.model, args.ema, args.random_weights) for f in args.files]
    size = args.size or subjects[0].card.input_size[1]
    output = Output(args, "erf")
    fields, rows, models = [], [], []
    with progress_bar(len(subjects) * len(pictures.originals), "images") as advance:
        for subject in subjects:
            images = pictures.prepared(with_size(subject.card, size))
            fields.append(effective_field(subject.net, images, args.stage, args.batch, advance))
            areas = {share: area_ratio(fields[-1], share) for share in SHARES}
            rows.append((subject.label, *(f"{100 * area:.1f}" for area in areas.values())))
            models.append({"model": subject.label, "card": subject.card.describe(), "area_ratio": areas})
    headers = ("model", *(f"area of {100 * share:g} %" for share in SHARES))
    what = f"{size}x{size} px, {len(pictures.originals)} {'drawn landscapes' if args.images is None else pictures.what}"
    print(f"{what}\n\n{render_table(headers, rows)}")
    picture = _draw(output, fields, [subject.label for subject in subjects])
    page = [
        "# Effective receptive fields",
        f"{what}. The area of 50 % is that of the smallest square with half of all contributions, in per cent of the "
        "image.",
        f"![effective receptive fields]({picture})",
        render_table(headers, rows, markdown=True),
    ]
    facts = {"size": size, "images": len(pictures.originals), "stage": args.stage, "models": models}
    output.finish(facts, "\n\n".join(page), args.device)
    return 0


def _draw(output: Output, fields: Sequence[Tensor], labels: Sequence[str]) -> str:
    """The fields on one logarithmic scale each, with the squares of 50 and 99 %."""
    columns = 2 if len(fields) == 4 else min(len(fields), 3)
    rows = -(-len(fields) // columns)
    width = COLUMN if columns < 3 else 2 * COLUMN
    with drawing(rows * (width / columns) + 0.35, "the figure of receptive fields", width) as figure:
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for axis in axes:
            axis.set_axis_off()
        for axis, field, label in zip(axes, fields, labels, strict=False):
            decades = np.log10(np.clip((field / field.max()).numpy(), 10**-DECADES, None))
            shown = axis.imshow(decades, cmap="cividis", vmin=-DECADES, vmax=0, interpolation="nearest")
            for share, style in ((0.5, "-"), (0.99, ":")):
                side, top, left = smallest_square(field, share)
                across, down = np.array([0, 1, 1, 0, 0]) * side, np.array([0, 0, 1, 1, 0]) * side
                axis.plot(left - 0.5 + across, top - 0.5 + down, f"w{style}", linewidth=0.8)
            axis.set_title(label[:34])
        bar = figure.colorbar(shown, ax=list(axes), location="bottom", shrink=0.7, aspect=30, pad=0.02)
        bar.set_label("contribution, log10 of the largest; squares: 50 % (solid), 99 %")
        return output.figure(figure)

"""`wbmm analyze cam`: where a classifier looks, by Grad-CAM of the package grad-cam."""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from wbmm.deploy.predict import class_names
from wbmm.extras import need
from wbmm.io.card import ModelCard
from wbmm.io.figures import shorten, to_pictures
from wbmm.models.wbmm import WBMM
from wbmm.progress import progress_bar

from .opening import add_model_arguments, find_pictures, open_subject, with_size
from .output import COLUMN, Output, add_output_arguments, drawing

__all__ = ["EXAMPLE", "activation_maps", "add_arguments", "run", "target_layer"]

EXAMPLE = "wbmm analyze cam wbmm_a.tiny50 photos/ --size 224 --out analysis"
OPACITY = 0.55


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="MODEL", help="a checkpoint in any form, a run's folder, or a model's name")
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE_OR_FOLDER", help="folders are searched through")
    parser.add_argument("--class", dest="wanted", metavar="NAME_OR_NUMBER", help="(default: the predicted class)")
    parser.add_argument("--stage", type=int, metavar="N", help="the map to look at (default: the last)")
    parser.add_argument("--size", type=int, metavar="PX", help="of the images (default: the model's)")
    parser.add_argument("--most", type=int, default=8, metavar="N", help="images of a folder (default: 8)")
    add_model_arguments(parser)
    add_output_arguments(parser)


def target_layer(net: nn.Module, stage: int | None = None) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The module whose output Grad-CAM weights, and what makes a map `[B, C, H, W]` of that output.

    For WBMM it is a stage, in training and fused forms alike. For timm's models it is what `feature_info` names. Of a
    transformer with a class token, the first norm of its last block: behind it, the other tokens have no gradient.

    Args:
        net: a classifier.
        stage: from 1; None for the last.
    """
    info = getattr(net, "feature_info", None)
    if not info:
        raise ValueError(f"a {type(net).__name__} does not say where its maps are (no feature_info)")
    modules = [item["module"] for item in info]
    if stage is not None and not 1 <= stage <= len(modules):
        raise ValueError(f"--stage {stage}: a {type(net).__name__} has maps 1 to {len(modules)}")
    layer = net.get_submodule(modules[-1 if stage is None else stage - 1])
    tokens = int(getattr(net, "num_prefix_tokens", 0))
    last = getattr(net, "output_fmt", "NCHW") == "NHWC"

    def reshape(values: Tensor) -> Tensor:
        if values.ndim == 3:
            values = values[:, tokens:].transpose(1, 2)
            return values.unflatten(2, _grid(net, values.shape[2]))
        return values.permute(0, 3, 1, 2) if last else values

    norm = getattr(layer, "norm1", None)
    return (layer if isinstance(net, WBMM) or norm is None or not tokens else norm), reshape


def _grid(net: nn.Module, count: int) -> tuple[int, int]:
    grid = getattr(getattr(net, "patch_embed", None), "grid_size", None)
    if grid and grid[0] * grid[1] == count:
        return tuple(grid)
    side = int(count**0.5)
    if side * side != count:
        raise ValueError(f"{count} tokens of a {type(net).__name__} are no square: give a square --size")
    return side, side


def activation_maps(
    net: nn.Module, images: Tensor, classes: list[int] | None = None, stage: int | None = None
) -> tuple[Tensor, Tensor]:
    """Grad-CAM of images `[N, C, H, W]`.

    Args:
        net: a classifier, in any form.
        images: as it takes them.
        classes: the class of each image; None for the predicted ones.
        stage: the map, from 1; None for the last.

    Returns:
        Maps `[N, H, W]` from 0 to 1, of the images' size, and the logits `[N, classes]`.
    """
    package = need("pytorch_grad_cam", "wbmm analyze cam")
    targets = need("pytorch_grad_cam.utils.model_targets").ClassifierOutputTarget
    layer, reshape = target_layer(net, stage)
    with torch.enable_grad(), package.GradCAM(model=net, target_layers=[layer], reshape_transform=reshape) as cam:
        wanted = None if classes is None else [targets(number) for number in classes]
        maps = cam(input_tensor=images.requires_grad_(), targets=wanted)
        return torch.from_numpy(maps), cam.outputs.detach().float().cpu()


def _class_number(wanted: str | None, card: ModelCard) -> int | None:
    if wanted is None:
        return None
    names = class_names(card)
    for known in (names, card.class_names or []):
        if wanted in known:
            return list(known).index(wanted)
    if wanted.isdecimal() and int(wanted) < card.num_classes:
        return int(wanted)
    raise ValueError(f"--class {wanted}: give a name such as {names[0]}, or a number from 0 to {card.num_classes - 1}")


def run(args: argparse.Namespace) -> int:
    pictures = find_pictures(args.images, args.most)
    need("pytorch_grad_cam", "wbmm analyze cam")
    subject = open_subject(args.file, args.device, args.model, args.ema, args.random_weights)
    if not subject.card.num_classes:
        raise ValueError(f"{subject.label} has no classes: {subject.card.describe()}")
    card = with_size(subject.card, args.size)
    number, names = _class_number(args.wanted, card), class_names(card)
    output = Output(args, "cam")
    images = pictures.prepared(card)
    maps, facts = [], []
    with progress_bar(len(images), "images") as advance:
        for name, image in zip(pictures.names, images.split(1), strict=True):
            found, logits = activation_maps(subject.net, image, None if number is None else [number], args.stage)
            chances = logits[0].softmax(0)
            chosen = int(chances.argmax()) if number is None else number
            maps.append(found[0])
            half = float((found[0] > 0.5).double().mean())
            sure = float(chances[chosen])
            facts.append({"image": name, "class": names[chosen], "probability": sure, "above_half": half})
            print(f"{name}: {names[chosen]} {100 * sure:.1f} %; {100 * half:.0f} % of the image is above half")
            advance(1)
    shown = to_pictures(images, card.mean, card.std)
    captions = [f"{shorten(fact['class'], 20)} {100 * fact['probability']:.0f} %" for fact in facts]
    picture = _draw(output, shown, maps, captions)
    stage = "the last map" if args.stage is None else f"map {args.stage}"
    page = [
        f"# Where {subject.label} looks",
        f"{card.describe()}. Grad-CAM of {stage}, for "
        + ("the predicted class of each image." if number is None else f"the class {names[number]}."),
        f"![Grad-CAM]({picture})",
    ]
    output.finish({"model": subject.label, "card": card.describe(), "images": facts}, "\n\n".join(page), args.device)
    return 0


def _draw(output: Output, pictures: list, maps: list[Tensor], captions: list[str]) -> str:
    """Each picture, and beside it the same under its map: bright where the class comes from."""
    columns = min(2, len(pictures))
    rows = -(-len(pictures) // columns)
    width = columns * COLUMN
    with drawing(rows * (COLUMN / 2 + 0.22), "the figure of activation maps", width) as figure:
        axes = figure.subplots(rows, 2 * columns, squeeze=False).flatten()
        for axis in axes:
            axis.set_axis_off()
        for i, (picture, values, caption) in enumerate(zip(pictures, maps, captions, strict=True)):
            for axis in axes[2 * i : 2 * i + 2]:
                axis.imshow(picture, cmap="gray", vmin=0, vmax=255, interpolation="lanczos")
            axes[2 * i + 1].imshow(values, cmap="cividis", vmin=0, vmax=1, alpha=OPACITY, interpolation="bilinear")
            axes[2 * i].set_title(caption, loc="left")
        return output.figure(figure)

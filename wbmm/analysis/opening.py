"""What the analyses look at: a model with modules to look into, from any checkpoint or name, and pictures for it."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
import torch.nn as nn
from PIL import Image
from torch import Tensor

from wbmm.data.images import draw_landscape, find_images
from wbmm.data.sources import FileSource
from wbmm.deploy.runtime import EXPORTED, open_runner
from wbmm.io.card import ModelCard, card_of
from wbmm.io.files import OF_A_RUN, build_from_card, run_checkpoint
from wbmm.io.reader import read_checkpoint
from wbmm.machine import check_device
from wbmm.mm.backbone import WBMMBackbone
from wbmm.mm.mm_checkpoint import MMCheckpoint, is_mm, read_mm_checkpoint
from wbmm.models.state import CheckpointError

__all__ = ["Pictures", "Subject", "add_model_arguments", "find_pictures", "open_subject", "spread", "with_size"]


@dataclass(frozen=True)
class Subject:
    """A model to look into.

    Attributes:
        label: short, for titles and tables.
        net: in eval mode, on its device.
        card: what it is and how its images are prepared.
        untrained: builds the same model as it was before training.
    """

    label: str
    net: nn.Module
    card: ModelCard
    untrained: Callable[[], nn.Module]


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What every analysis says about its models beside their names."""
    parser.add_argument("--model", help="the model's name, where the file does not tell")
    parser.add_argument("--no-ema", dest="ema", action="store_false", help="the weights themselves, not their average")
    parser.add_argument("--random-weights", action="store_true", help="a name without a tag is an untrained model")
    parser.add_argument("--device", default="cpu")


def open_subject(
    source: str, device: str = "cpu", model: str | None = None, ema: bool = True, random_weights: bool = False
) -> Subject:
    """A model from a checkpoint, a run's folder, or a name of timm's.

    Args:
        source: the file, the folder or the name. Of a segmentor's or detector's checkpoint, the backbone is taken.
        device: where it runs.
        model: its name, where the file does not tell.
        ema: a checkpoint's moving average, where it has one.
        random_weights: a name such as wbmm_a gives the untrained model; one with a tag, wbmm_a.tiny50, has weights.
    """
    check_device(device)
    path = run_checkpoint(source) if Path(source).exists() else Path(source)  # a name stays one
    if path.suffix in EXPORTED:
        raise ValueError(f"{path}: an exported file has no layers to look into; give the checkpoint it was made from")
    if path.is_file() and is_mm(read_checkpoint(path).contents):
        return _open_backbone(path, device)
    if random_weights and "." not in source and timm.is_model(source):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = timm.create_model(source).eval()
        net.card = card_of(net)
        return Subject(f"{source}, untrained", net.to(device), net.card, lambda: _fresh(net.card))
    runner = open_runner(path if path.is_file() else source, device, model, ema)
    return Subject(_label(path, source), runner.net, runner.card, lambda: _fresh(runner.card))


def _label(path: Path, source: str) -> str:
    """A file by its name; one that is called like every run's, with its folder."""
    return source if not path.is_file() else f"{path.parent.name}/{path.name}" if path.name in OF_A_RUN else path.name


def _open_backbone(path: Path, device: str) -> Subject:
    try:
        checkpoint = MMCheckpoint(read_mm_checkpoint(path))
        net, config = checkpoint.backbone, checkpoint.backbone_config
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    card = ModelCard(model=config.get("arch") or "wbmm", form=net.form, num_classes=0, kind="features")
    fresh = {**config, "form": "training", "sync_bn": False}
    return Subject(path.name, net.to(device).eval(), card, lambda: _seeded(lambda: WBMMBackbone(**fresh)))


def _fresh(card: ModelCard) -> nn.Module:
    return _seeded(lambda: build_from_card(card.replace(form="training")))


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().eval()


def with_size(card: ModelCard, size: int | None) -> ModelCard:
    """The card with another image size, if one is asked for."""
    if size is None:
        return card
    if size < 32:
        raise ValueError(f"--size {size}: give 32 or more")
    return card.replace(input_size=(card.input_size[0], size, size))


@dataclass(frozen=True)
class Pictures:
    """Some pictures: `originals` as they are, `names`, and in words what they are."""

    originals: list[Image.Image]
    names: list[str]
    what: str

    def prepared(self, card: ModelCard) -> Tensor:
        """`[N, C, H, W]`, as the card says."""
        transform = card.transform()
        return torch.stack([transform(image) for image in self.originals])


def spread(count: int, most: int) -> list[int]:
    """At most so many of the numbers below `count`, evenly spread."""
    if most >= count:
        return list(range(count))
    return [round(i * (count - 1) / max(most - 1, 1)) for i in range(most)]


def find_pictures(paths: list[Path] | None, most: int) -> Pictures:
    """Up to `most` pictures, evenly spread over files and folders; drawn landscapes where none are given."""
    if most < 1:
        raise ValueError(f"{most} images: give 1 or more")
    if not paths:
        count = min(most, 16)
        return Pictures([draw_landscape(i) for i in range(count)], [f"landscape {i}" for i in range(count)], "drawn")
    found = find_images(paths)
    chosen = [found[i] for i in spread(len(found), most)]
    source = FileSource(chosen)
    return Pictures([source.image(i) for i in range(len(chosen))], [path.stem for path in chosen], "photographs")

"""What is timed: models from `NAME` or `NAME:FORM`, each in the memory format of its form, and a training step."""

import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from wbmm.models.fuse import fuse
from wbmm.models.plain import to_plain

from .setting import CPU, Setting

__all__ = ["FORMS", "TRAINING_FORMS", "TrainingStep", "build", "images_for", "split"]

FORMS = {
    "training": "as it is trained",
    "compact": "fused, with tables",
    "dense": "fused, with matrices",
    "plain": "fused, in the reference implementation",
    "plain-training": "as it is trained, in the reference implementation",
}
TRAINING_FORMS = ("training", "plain-training")


def split(spec: str, forms: tuple[str, ...] = tuple(FORMS)) -> tuple[str, str]:
    """Name and form; without a form, `training`."""
    name, _, form = spec.partition(":")
    form = form or "training"
    if form not in forms:
        raise ValueError(f"{spec!r}: form {form!r} is none of {', '.join(forms)}")
    if not timm.is_model(name):
        raise ValueError(f"{spec!r}: timm knows no model {name!r}; see `wbmm list` and timm.list_models()")
    return name, form


def build(spec: str, setting: Setting = CPU, size: tuple[int, int] | None = None) -> nn.Module:
    """A model with random weights, in eval mode.

    Args:
        spec: `NAME` or `NAME:FORM`.
        setting: where it goes, and in which type.
        size: (H, W) of the images, for models that are built for one size.
    """
    name, form = split(spec)
    # Swin and its like refuse images of another size than they were built for.
    fixed = size is not None and timm.get_pretrained_cfg(name).fixed_input_size
    try:
        model = timm.create_model(name, **({"img_size": tuple(size)} if fixed else {})).eval()
        if form in ("compact", "dense", "plain"):
            model = fuse(model, "compact" if form == "plain" else form)
        if form.startswith("plain"):
            model = to_plain(model)
    except ValueError as error:
        raise ValueError(f"{spec!r}: {error}") from error
    return setting.place(model, _layout(spec))


def images_for(spec: str, images: Tensor, setting: Setting = CPU) -> Tensor:
    """Images as a model takes them: on its device, of its type, in its memory format."""
    return setting.place(images, _layout(spec))


def _layout(spec: str) -> torch.memory_format:
    return torch.contiguous_format if split(spec)[1].startswith("plain") else torch.channels_last


class TrainingStep:
    """Forward, cross entropy, backward, AdamW; a call is one step."""

    def __init__(self, model: nn.Module, images: Tensor, setting: Setting = CPU) -> None:
        self.model, self.setting = model.train(), setting
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.images = images
        self.labels = torch.arange(len(images), device=images.device) % 10

    def __call__(self) -> None:
        with self.setting.autocasting():
            loss = F.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

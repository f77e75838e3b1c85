"""What is timed: models from `NAME` or `NAME:FORM`, each in the memory format of its form, and a training step."""

import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from wbmm.layers.depthwise import find_implicit_gemm, large_kernel_conv2d
from wbmm.models.fuse import fuse
from wbmm.models.plain import to_plain

from .setting import CPU, Setting

__all__ = ["FORMS", "LKA", "TRAINING_FORMS", "TrainingStep", "build", "images_for", "layout_of", "split", "why_not"]

FORMS = {
    "training": "as it is trained",
    "compact": "fused, with tables",
    "dense": "fused, with matrices",
    "plain": "fused, in the reference implementation",
    "plain-training": "as it is trained, in the reference implementation",
}
TRAINING_FORMS = ("training", "plain-training")
LKA = "+lka"  # after a form: large kernels by their CUDA package
LARGE = 13  # side of the kernels that the package runs


def split(spec: str, forms: tuple[str, ...] = tuple(FORMS)) -> tuple[str, str]:
    """Name and form; without a form, `training`."""
    name, _, form = spec.removesuffix(LKA).partition(":")
    form = form or "training"
    if form not in forms:
        raise ValueError(f"{spec!r}: form {form!r} is none of {', '.join(forms)}")
    if not timm.is_model(name):
        raise ValueError(f"{spec!r}: timm knows no model {name!r}; see `wbmm list` and timm.list_models()")
    return name, form


def why_not(spec: str, setting: Setting) -> str | None:
    """None, or why a model cannot run here."""
    if spec.endswith(LKA) and (not setting.on_cuda or find_implicit_gemm() is None):
        return "the large-kernel CUDA package is not installed, or there is no CUDA device"
    return None


def build(
    spec: str, setting: Setting = CPU, size: tuple[int, int] | None = None, layout: torch.memory_format | None = None
) -> nn.Module:
    """A model with random weights, in eval mode.

    Args:
        spec: `NAME`, `NAME:FORM` or `NAME:FORM+lka`.
        setting: where it goes, and in which type.
        size: (H, W) of the images, for models that are built for one size.
        layout: memory format; by default that of its form.
    """
    name, form = split(spec)
    # Swin and its like refuse images of another size than they were built for.
    fixed = size is not None and timm.get_pretrained_cfg(name).fixed_input_size
    options = {"img_size": tuple(size)} if fixed else {}
    if spec.endswith(LKA) and not form.startswith("plain"):
        options["large_kernel"] = "implicit_gemm"
    try:
        model = timm.create_model(name, **options).eval()
        if form in ("compact", "dense", "plain"):
            model = fuse(model, "compact" if form == "plain" else form)
        if form.startswith("plain"):
            model = to_plain(model)
    except ValueError as error:
        raise ValueError(f"{spec!r}: {error}") from error
    if spec.endswith(LKA) and form.startswith("plain"):
        _use_package(model)
    return setting.place(model, layout or layout_of(spec))


def images_for(spec: str, images: Tensor, setting: Setting = CPU, layout: torch.memory_format | None = None) -> Tensor:
    """Images as a model takes them: on its device, of its type, in its memory format."""
    return setting.place(images, layout or layout_of(spec))


def layout_of(spec: str) -> torch.memory_format:
    """The memory format that a form is made for."""
    return torch.contiguous_format if split(spec)[1].startswith("plain") else torch.channels_last


class _LargeKernel(nn.Module):
    """A convolution of the reference implementation, run by the package."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias

    def forward(self, x: Tensor) -> Tensor:
        return large_kernel_conv2d(x, self.weight, self.bias)


def _use_package(model: nn.Module) -> None:
    """Puts the package in the place of large depthwise convolutions."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Conv2d) and child.kernel_size == (LARGE, LARGE) and child.groups > 1:
                setattr(module, name, _LargeKernel(child))


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

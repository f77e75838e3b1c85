"""What benchmarks time and where: models from `NAME` or `NAME:FORM`, a training step, the device, the numbers' type."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial

import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from wbmm.layers.depthwise import find_implicit_gemm, large_kernel_conv2d
from wbmm.machine import PRECISIONS, check_device, describe_precision, set_precision
from wbmm.models.fuse import fuse
from wbmm.models.plain import to_plain
from wbmm.progress import progress_bar
from wbmm.text import first_line
from wbmm.timing import Timing, time_interleaved

__all__ = [
    "CPU",
    "DTYPES",
    "FORMS",
    "LKA",
    "TRAINING_FORMS",
    "Setting",
    "TrainingStep",
    "add_setting_arguments",
    "build",
    "dtype_name",
    "images_for",
    "layout_of",
    "split",
    "why_not",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def dtype_name(text: str) -> str:
    """A data type by its name in `DTYPES` or its short one, for argparse."""
    return SHORT.get(text, text)


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
    parser.add_argument(
        "--dtype",
        type=dtype_name,
        choices=DTYPES,
        default="float32",
        help="type of weights and images; bf16 and fp16 for short (default: float32)",
    )
    parser.add_argument(
        "--autocast", action="store_true", help="weights and images stay in float32; autocast computes in --dtype"
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="tf32",
        help="of float32 products: " + "; ".join(f"{name}, {text}" for name, text in PRECISIONS.items()),
    )


@dataclass(frozen=True)
class Setting:
    """The shared options of one run.

    Attributes:
        device: e.g. `cpu` or `cuda:1`.
        dtype: one of `DTYPES`; the type of weights and images, or with `autocast` what autocast computes in.
        autocast: whether weights and images stay in float32.
        precision: of float32 products, one of `wbmm.machine.PRECISIONS`.
    """

    device: str = "cpu"
    dtype: str = "float32"
    autocast: bool = False
    precision: str = "tf32"

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "Setting":
        """The options, checked; the precision is set for this process."""
        setting = cls(args.device, args.dtype, args.autocast, args.precision)
        setting.apply()
        return setting

    def apply(self) -> None:
        """Sets the precision of this process; an error if the options cannot be used here."""
        if self.autocast and self.dtype == "float32":
            raise ValueError("--autocast needs a --dtype to compute in: bfloat16 or float16")
        check_device(self.device)
        set_precision(self.precision)

    @property
    def on_cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def product_dtype(self) -> torch.dtype:
        """What matrices are multiplied in."""
        return DTYPES[self.dtype]

    def describe(self) -> str:
        """For the note under a table."""
        numbers = f"float32 weights under autocast to {self.dtype}" if self.autocast else f"{self.dtype} weights"
        effect = describe_precision(self.precision, self.device)
        return f"{self.device}, {numbers}, precision {self.precision} ({effect})"

    def columns(self) -> dict[str, object]:
        """For a CSV."""
        return asdict(self)

    def argv(self) -> list[str]:
        """The options that differ from their defaults."""
        argv = []
        for name, value in asdict(self).items():
            if value != getattr(Setting, name):
                argv += [f"--{name}"] if value is True else [f"--{name}", value]
        return argv

    def place(self, item: nn.Module | Tensor, layout: torch.memory_format = torch.channels_last) -> nn.Module | Tensor:
        """A model or images on the device, in the type and memory format to compute with."""
        return item.to(
            device=self.device, dtype=torch.float32 if self.autocast else DTYPES[self.dtype], memory_format=layout
        )

    def autocasting(self) -> AbstractContextManager:
        """Autocast, where it is asked for. To be entered anew at each pass: it keeps converted weights."""
        return torch.autocast(torch.device(self.device).type, DTYPES[self.dtype]) if self.autocast else nullcontext()

    def forward(self, model: Callable[[Tensor], object], images: Tensor) -> object:
        """One forward pass."""
        with self.autocasting():
            return model(images)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Makes the device the current one. An operator that lacks the type ends in an error of one line."""
        try:
            with torch.cuda.device(self.device) if self.on_cuda else nullcontext():
                yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self.dtype == "float32":
                raise
            raise ValueError(f"--dtype {self.dtype} does not work on {self.device}: {first_line(error)}") from error

    def time(
        self, calls: Mapping[object, Callable[[], object]], label: str, rounds: int, warmup: int = 2, pause: float = 0.0
    ) -> dict[object, Timing]:
        """`time_interleaved` on the device, with a progress bar called `label`."""
        with self.running(), progress_bar(warmup + rounds, label) as advance:
            return time_interleaved(calls, rounds, warmup, partial(advance, 1), pause, self.device)


CPU = Setting()


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
